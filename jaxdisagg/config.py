"""What a node and a deployment are made of, as frozen dataclasses; `config_text` reads them.

A value that cannot work is refused here, by field name, before any process is started.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

Role = Literal["prefill", "decode", "mixed"]
DTYPES = ("float32", "bfloat16")
DEVICE_MEMORY = ("auto", "direct", "staged")
PROVIDERS = ("auto", "efa", "verbs", "tcp", "net", "tcp;ofi_rxm")
# The engine's MAX_DOMAINS; importing that imports numpy, whose threads start at once, and a process
# reads its configuration before it is pinned.
MAX_NICS = 64
# A socket takes a deadline of less than a microsecond for none, jax's watch takes an int32.
LEAST_SECONDS, MOST_SECONDS = 1e-3, 1e7
# Tokens. A page is cut into units, all of which a transfer plan lists.
MAX_PAGE_SIZE = 1 << 20
MAX_ID = 256
MAX_CPUS, MAX_GPUS = 4096, 1024  # beyond any number of one
DEFAULT_MODEL_LEN = 2048
# For all processes of a node to find each other, load and compile.
START_SECONDS = 600.0
DEFAULT_PORT = 8000


def is_number(text: str) -> bool:
    """Whether it is a whole number in ASCII digits."""
    return text.isascii() and text.isdigit()


def _at_least(low: int, **values: int) -> None:
    for name, value in values.items():
        if value < low:
            raise ValueError(f"{name}={value} must be at least {low}")


def _check_numbers(name: str, numbers: tuple[int, ...], limit: int) -> None:
    for i, number in enumerate(numbers):
        if not 0 <= number < limit:
            raise ValueError(f"{name}[{i}]={number} must be in 0..{limit - 1}")


def _check_port(**ports: int) -> None:
    for name, port in ports.items():
        if not 0 <= port <= 65535:
            raise ValueError(f"{name}={port} must be in 0..65535")


@dataclass(frozen=True)
class MeshConfig:
    """Devices of one node: dp replicas of tp ranks; `cpus` pins the node (empty: not pinned).

    `ep` adds no devices: experts are cut over `dp`, over `tp` or over all of them, that many parts.
    `processes` hold equal shares of the devices, in rank order. `gpus` are the node's CUDA devices
    in rank order, one for each of its devices, counted among those that CUDA_VISIBLE_DEVICES names
    where it is set; () is what a deployment deals, or jax finds. A process on a machine of its own
    may name its share alone.
    """

    tp: int = 1
    dp: int = 1
    ep: int = 1
    cpus: tuple[int, ...] = ()
    processes: int = 1
    gpus: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _at_least(1, tp=self.tp, dp=self.dp, ep=self.ep, processes=self.processes)
        if self.devices % self.processes:
            raise ValueError(
                f"processes={self.processes} must divide the dp*tp={self.devices} devices"
            )
        if self.ep not in (1, self.dp, self.tp, self.devices):
            raise ValueError(
                f"ep={self.ep} must be 1, dp={self.dp}, tp={self.tp} or dp*tp={self.devices}"
            )
        _check_numbers("cpus", self.cpus, MAX_CPUS)
        self._check_gpus()

    def _check_gpus(self) -> None:
        _check_numbers("gpus", self.gpus, MAX_GPUS)
        for gpu in self.gpus:
            if self.gpus.count(gpu) > 1:
                raise ValueError(f"gpus: {gpu} is named twice")
        if len(self.gpus) not in (0, self.devices, self.devices // self.processes):
            raise ValueError(
                f"gpus={'+'.join(map(str, self.gpus))}: {len(self.gpus)} for the "
                f"dp*tp={self.devices} devices of processes={self.processes}"
            )

    @property
    def devices(self) -> int:
        """Number of devices that the node uses."""
        return self.tp * self.dp

    def cpus_of(self, process: int) -> tuple[int, ...]:
        """The CPUs of one process: its part of `cpus`, or all where there are too few to part."""
        n = len(self.cpus)
        if n < self.processes:
            return self.cpus
        return self.cpus[process * n // self.processes : (process + 1) * n // self.processes]

    def gpus_of(self, process: int) -> tuple[int, ...]:
        """The CUDA devices of one process: its share of `gpus`, or all where they are its share."""
        share = self.devices // self.processes
        if len(self.gpus) <= share:
            return self.gpus
        return self.gpus[process * share : (process + 1) * share]


@dataclass(frozen=True)
class CacheConfig:
    """The paged cache of one dp rank: `pages` of `page_size` tokens, page 0 being scratch."""

    page_size: int = 16
    pages: int = 513

    def __post_init__(self) -> None:
        _at_least(1, page_size=self.page_size)
        if self.page_size > MAX_PAGE_SIZE:
            raise ValueError(f"page_size={self.page_size} must be at most {MAX_PAGE_SIZE}")
        _at_least(2, pages=self.pages)


@dataclass(frozen=True)
class BatchConfig:
    """Sizes that fix the compiled step programs.

    `chunks` are the token buckets of a prefill step and `prefill_rows` the requests that may share
    one; `decode_rows` are the batch buckets of a decode step. A one-row bucket is refused: a
    one-row bf16 matrix product takes a slow path on CPU. All sizes are per dp rank. A
    `max_model_len` of 0 is the model's own limit, but at most DEFAULT_MODEL_LEN: page tables are
    as wide as it.
    """

    chunks: tuple[int, ...] = (64, 256)
    prefill_rows: int = 8
    decode_rows: tuple[int, ...] = (2, 8)
    max_model_len: int = 0

    def __post_init__(self) -> None:
        if not self.chunks or not self.decode_rows:
            raise ValueError("chunks and decode_rows must hold at least one bucket")
        _at_least(2, chunks=min(self.chunks), decode_rows=min(self.decode_rows))
        if self.max_model_len:
            _at_least(2, max_model_len=self.max_model_len)
        _at_least(1, prefill_rows=self.prefill_rows)
        for name in ("chunks", "decode_rows"):
            if list(getattr(self, name)) != sorted(set(getattr(self, name))):
                raise ValueError(f"{name}={getattr(self, name)} must ascend without repetition")


@dataclass(frozen=True)
class Timeouts:
    """Every wait's deadline, in seconds.

    `connect`: to a prefill node and all its processes, and for this node's own to arm a counter.
    `queue`: for pages and a peer, before the prefill begins. `prefill`: from PREFILL to the last
    counted write. `cancel_resend`: between two CANCELs. `cancel_fence`: for the answer to them, and
    for this node's processes to close their links to a peer. `member`: a process of this node that
    says nothing for so long has hung, and the node fails.
    """

    connect: float = 10.0
    queue: float = 300.0
    prefill: float = 120.0
    cancel_resend: float = 0.5
    cancel_fence: float = 10.0
    member: float = 15.0

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if not LEAST_SECONDS <= value <= MOST_SECONDS:  # also nan
                raise ValueError(
                    f"{f.name}={value} must be in {LEAST_SECONDS:g}..{MOST_SECONDS:g} (seconds)"
                )


@dataclass(frozen=True)
class NodeConfig:
    """One node process. `http_port` and `fabric_port` 0 take a free port.

    `nics` are the network devices that the cache goes through, by name or IPv4 address; () is by
    topology with efa and verbs, else the provider's first. The sides of a pair may have unequal
    numbers. `mtp` loads the model's multi-token-prediction module, which drafts tokens for the
    decode steps to check; both sides of a pair must agree on it. Of a node of several processes,
    each has the same configuration but for `process`, its number, and `group`, "host:port" at which
    process 0 listens for the others (there None: a free port of `host`). `gpu_memory` is the part
    of each GPU's memory that the node takes for itself at once; 0 is what a deployment deals to
    nodes that share a GPU, or jax's own default. `device_memory` says how the transfer reaches a
    GPU's memory: "direct", by the NIC itself, or the node does not start; "staged", through host
    memory; "auto", directly where that can be.
    """

    role: Role
    model: Path
    id: str = "node"
    dtype: str = "float32"
    mesh: MeshConfig = field(default_factory=MeshConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    timeouts: Timeouts = field(default_factory=Timeouts)
    host: str = "127.0.0.1"
    http_port: int = 0
    fabric_port: int = 0
    provider: str = "auto"
    nics: tuple[str, ...] = ()
    router: str | None = None
    max_requests: int = 256
    rules: Path | None = None
    mtp: bool = False
    gpu_memory: float = 0.0
    device_memory: str = "auto"
    process: int = 0
    group: str | None = None

    def __post_init__(self) -> None:
        self._check_process()
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} must be one of {', '.join(DTYPES)}")
        if self.role not in ("prefill", "decode", "mixed"):
            raise ValueError(f"role={self.role!r} must be prefill, decode or mixed")
        if self.provider not in PROVIDERS:
            raise ValueError(f"provider={self.provider!r} must be one of {', '.join(PROVIDERS)}")
        self._check_nics()
        # It is the value of an HTTP header, and a name in HELLO.
        if not (0 < len(self.id) <= MAX_ID and self.id.isascii() and self.id.isprintable()):
            raise ValueError(f"id={self.id!r} must be 1 to {MAX_ID} printable ASCII characters")
        _check_port(http_port=self.http_port, fabric_port=self.fabric_port)
        _at_least(1, max_requests=self.max_requests)
        if not 0 <= self.gpu_memory < 1:  # also nan
            raise ValueError(f"gpu_memory={self.gpu_memory} must be a part of 1, as 0.4")
        if self.device_memory not in DEVICE_MEMORY:
            raise ValueError(
                f"device_memory={self.device_memory!r} must be one of {', '.join(DEVICE_MEMORY)}"
            )

    def _check_nics(self) -> None:
        if self.nics and self.role == "mixed":
            raise ValueError(f"nics={'+'.join(self.nics)}: a mixed node transfers nothing")
        for name in self.nics:
            if not name or name.split() != [name]:
                raise ValueError(f"nics: {name!r} is no name of a network device and no address")
            if self.nics.count(name) > 1:
                raise ValueError(f"nics: {name!r} is named twice")
        if len(self.nics) > MAX_NICS:
            raise ValueError(f"nics: {len(self.nics)} are more than {MAX_NICS}")

    def _check_process(self) -> None:
        if not 0 <= self.process < self.mesh.processes:
            raise ValueError(
                f"process={self.process} must be in 0..{self.mesh.processes - 1}: "
                f"processes={self.mesh.processes}"
            )
        if self.group is None:
            if self.process:
                raise ValueError(f"group: process {self.process} must know where process 0 listens")
            return
        if self.mesh.processes == 1:
            raise ValueError(f"group={self.group!r}: a node of one process has no others")
        host, _, port = self.group.rpartition(":")
        if not host or not is_number(port):
            raise ValueError(f"group={self.group!r} must be HOST:PORT")
        _check_port(group=int(port))

    @property
    def table_width(self) -> int:
        """Pages of the longest request: the one fixed width of page tables."""
        return -(-self.batch.max_model_len // self.cache.page_size)


@dataclass(frozen=True)
class ServeConfig:
    """A deployment on this machine: a router and its nodes."""

    nodes: tuple[NodeConfig, ...]
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT

    def __post_init__(self) -> None:
        roles = {node.role for node in self.nodes}
        if not roles & {"decode", "mixed"}:
            raise ValueError("nodes: at least one decode or mixed node is needed")
        if "decode" in roles and "prefill" not in roles:
            raise ValueError("nodes: decode nodes need at least one prefill node")
        ids = [node.id for node in self.nodes]
        if len(set(ids)) < len(ids):
            raise ValueError(f"id: {max(ids, key=ids.count)!r} names more than one node")
        _check_port(port=self.port)
        for node in self.nodes:
            if node.process:
                raise ValueError(f"process={node.process}: {node.id} is started as a whole")
        self._check_pairs()

    def _check_pairs(self) -> None:
        """What HELLO would refuse after the warm-up of both nodes is refused here at once.

        What depends on the model too, such as a tp or page sizes that do not fit, is
        `model_fit.check_nodes`'s.
        """
        apart = [node for node in self.nodes if node.role != "mixed"]
        for node in apart[1:]:
            for name, one, other in (
                ("dtype", apart[0].dtype, node.dtype),
                ("mtp", apart[0].mtp, node.mtp),
            ):
                if one != other:
                    raise ValueError(
                        f"{name}: {one} at {apart[0].id}, {other} at {node.id}; prefill and decode "
                        "nodes must have the same"
                    )
