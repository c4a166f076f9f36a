"""Plain data of the transfer engine: its configuration, memory and plans."""

import ipaddress
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

PROVIDERS = ("auto", "efa", "verbs", "tcp", "net", "tcp;ofi_rxm", "loopback")
DEVICE_MEMORY = ("auto", "direct", "staged")
MAX_UNIT_BYTES = 1 << 20
"""A unit is at most this long; a larger page is planned as several units."""

MAX_DOMAINS = 64
"""NICs of one engine."""

MAX_CPUS = 1024
"""CPUs that a thread may be pinned to have lower numbers: glibc's sets end there (CPU_SETSIZE)."""

# As csrc/region.h writes it: the length and the number of domains, then each domain's index, key
# and base.
_DESCRIPTOR = struct.Struct("<QI")
_ACCESS = struct.Struct("<IQQ")

PageList = NDArray[np.integer[Any]] | Sequence[int]


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}: {value} is not in {low}..{high}")


@dataclass(frozen=True)
class EngineConfig:
    """How an engine is opened; a bad field is a ValueError that names it.

    `provider`: "auto" takes the first that the machine offers of efa, verbs, tcp, net and
    tcp;ofi_rxm; "loopback" stays within the process. `bind` is this node's IPv4 address as peers
    reach it. `control_port` is where peers say HELLO; 0 takes a free one. `domains` names the NICs
    to spread writes over, each as the provider lists it ("eth0", "mlx5_0") or, over IP, by an IPv4
    address of this machine, through whose interface its traffic then goes; () is the provider's
    first for `bind`. `domain_cpus` has for each of them the CPUs on which its progress thread runs;
    an empty entry, or () for all, pins nothing. `spin_us` is how long a thread looks for work
    before it sleeps. `bytes_in_flight` bounds what one device group has on its way to one peer,
    over all of the group's domains; 0 is what suits the provider (16 MiB, over TCP 768 KiB).
    `posts_in_flight` bounds the writes to one peer on each domain. `peer_timeout_ms` of silence is
    a lost peer. `slot_bits` of the 32-bit immediate number the counters. `libfabric_path` is a
    library to load instead of the system's (or of the one that the environment variable
    JAXDISAGG_LIBFABRIC names). `device_memory` says how a GPU's memory is reached: "direct", by the
    NIC itself, which is an error where the provider cannot; "staged", through pinned memory;
    "auto", directly with a NIC that can, else staged. `staging_bytes` of pinned memory are held for
    each device that sends from staged regions, in equal parts for the domains of the first of them
    (at least 2 MiB each). `trace` records triggers, posts and completions.
    """

    provider: str = "auto"
    bind: str = "127.0.0.1"
    control_port: int = 0
    domains: tuple[str, ...] = ()
    domain_cpus: tuple[tuple[int, ...], ...] = ()
    spin_us: int = 50
    bytes_in_flight: int = 0
    posts_in_flight: int = 128
    heartbeat_ms: int = 250
    peer_timeout_ms: int = 5000
    slot_bits: int = 20
    libfabric_path: str | None = None
    device_memory: str = "auto"
    staging_bytes: int = 64 << 20
    trace: bool = False

    def __post_init__(self) -> None:
        if self.provider not in PROVIDERS:
            raise ValueError(f"provider: {self.provider!r} is none of {', '.join(PROVIDERS)}")
        try:
            address = ipaddress.IPv4Address(self.bind)
        except ValueError:
            raise ValueError(f"bind: {self.bind!r} is not an IPv4 address") from None
        if address.is_unspecified:
            raise ValueError(f"bind: {self.bind} is no address that a peer can connect to")
        _check_range("control_port", self.control_port, 0, 65535)
        _check_range("spin_us", self.spin_us, 0, 1_000_000)
        _check_range("bytes_in_flight", self.bytes_in_flight, 0, 1 << 40)
        _check_range("posts_in_flight", self.posts_in_flight, 1, 65536)
        _check_range("heartbeat_ms", self.heartbeat_ms, 1, 60_000)
        _check_range("peer_timeout_ms", self.peer_timeout_ms, 1, 3_600_000)
        _check_range("slot_bits", self.slot_bits, 1, 20)
        if self.device_memory not in DEVICE_MEMORY:
            raise ValueError(
                f"device_memory: {self.device_memory!r} is none of {', '.join(DEVICE_MEMORY)}"
            )
        _check_range("staging_bytes", self.staging_bytes, 2 << 20, 1 << 40)
        if self.peer_timeout_ms <= self.heartbeat_ms:
            raise ValueError(
                f"peer_timeout_ms: {self.peer_timeout_ms} must exceed heartbeat_ms "
                f"{self.heartbeat_ms}"
            )
        self._check_domains()

    def _check_domains(self) -> None:
        _check_range("domains", len(self.domains), 0, MAX_DOMAINS)
        for name in self.domains:
            if not name:
                raise ValueError(f"domains: an empty name in {self.domains}")
            if self.domains.count(name) > 1:
                raise ValueError(f"domains: {name!r} is there twice")
        if self.domain_cpus and len(self.domain_cpus) != max(1, len(self.domains)):
            raise ValueError(
                f"domain_cpus: {len(self.domain_cpus)} entries for "
                f"{max(1, len(self.domains))} domains"
            )
        for cpus in self.domain_cpus:
            for cpu in cpus:
                _check_range("domain_cpus", cpu, 0, MAX_CPUS - 1)


@dataclass(frozen=True)
class MemoryRegion:
    """Memory of this process that peers may write: `length` bytes at `address`.

    `descriptor` goes to peers, which make a RemoteRegion of it.
    """

    id: int
    address: int
    length: int
    descriptor: bytes

    def remote(self) -> "RemoteRegion":
        """The region as a peer sees it."""
        return RemoteRegion(self.descriptor, self.length)


@dataclass(frozen=True)
class RemoteRegion:
    """A peer's registered memory: the `descriptor` that it announced, of `length` bytes.

    A ValueError if the descriptor is none of ours or is of another length.
    """

    descriptor: bytes
    length: int

    def __post_init__(self) -> None:
        size = len(self.descriptor)
        if size < _DESCRIPTOR.size:
            raise ValueError(f"descriptor: {size} bytes are no region descriptor")
        length, domains = _DESCRIPTOR.unpack_from(self.descriptor)
        if not 1 <= domains <= MAX_DOMAINS or size != _DESCRIPTOR.size + _ACCESS.size * domains:
            raise ValueError(f"descriptor: {size} bytes are no region descriptor")
        indices = [access[0] for access in _ACCESS.iter_unpack(self.descriptor[_DESCRIPTOR.size :])]
        if indices != sorted(set(indices)) or indices[-1] >= MAX_DOMAINS:
            raise ValueError(
                f"descriptor: domains {indices} do not ascend within 0..{MAX_DOMAINS - 1}"
            )
        if length != self.length:
            raise ValueError(f"length: {self.length}, the descriptor says {length}")


@dataclass(frozen=True, eq=False)
class Landing:
    """Pages that the writes of one slot fill: the same ones of each of `regions`.

    Page p of a region starts at p * `page_bytes`; `pages` is a uint32 array [n].
    """

    regions: tuple[MemoryRegion, ...]
    pages: PageList
    page_bytes: int

    def __post_init__(self) -> None:
        size = self.page_bytes
        if not isinstance(size, int | np.integer) or not 1 <= size < 1 << 64:
            raise ValueError(f"page_bytes: {size!r}, must be an integer in 1..2^64-1")


@dataclass(frozen=True)
class PageUnit:
    """Where one unit lies within a page on each side, in bytes.

    Page p of the source starts at p * `source_page_bytes`; the unit is `length` bytes (at most
    MAX_UNIT_BYTES) from `source_offset` in it. The destination likewise.
    """

    source_page_bytes: int
    source_offset: int
    destination_page_bytes: int
    destination_offset: int
    length: int


@dataclass(frozen=True, eq=False)
class PlanWrite:
    """The same pages of several layers from one device: what its triggers post.

    `source_pages` and `destination_pages` are uint32 arrays [n]; `remotes` has one region for each
    of the `layers` layers from `first_layer`. It counts n * `layers` units.
    """

    transfer: int
    ordinal: int
    first_layer: int
    layers: int
    source_pages: PageList
    destination_pages: PageList
    unit: PageUnit
    remotes: tuple[RemoteRegion, ...]


TRACE_DTYPE = np.dtype(
    [
        ("order", "u8"),
        ("t_ns", "i8"),
        ("kind", "S12"),
        ("step", "i8"),
        ("layer", "i4"),
        ("ordinal", "i4"),
        ("transfer", "i8"),
        ("bytes", "i8"),
    ]
)
"""One record of a trace. `kind` is b"trigger", b"post" or b"complete"; `step` the step's number
(its low half for a trigger without a plan; 0 for a write outside a step); layer, ordinal and
transfer are -1 where there is none."""
