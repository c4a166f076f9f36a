"""How nodes greet: who a node is, how its cache lies in memory, and whether two nodes fit.

It travels as one of the application's messages (messages.py) inside the transport's HELLO.
"""

import dataclasses
from typing import Annotated, Literal

import msgspec

from jaxdisagg.cache_layout import CacheLayout
from jaxdisagg.transfer_plan import plan

PROTOCOL_VERSION = 3
MAX_PROCESSES = 4096

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]
NodeName = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A registered buffer: the transport's opaque descriptor and the length in bytes."""

    descriptor: bytes
    length: Count


class ContextBuffers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A registered array of equal buffers, one of which each request is lent.

    Buffer i lies at i * buffer_bytes of `region`.
    """

    region: Region
    buffer_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    count: Annotated[int, msgspec.Meta(ge=1)]


class NodeHello(msgspec.Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """Who a node is and how its cache lies in memory; announced, never assumed.

    `model` is the fingerprint of the weights' architecture and content, `dtype` of cache and
    weights, `num_pages` the pages of one dp rank, scratch included. `regions[ordinal][layer]` is
    the cache shard of a device (`layout.ordinal(dp_rank, rank)`) and layer; `contexts[ordinal]`
    its context buffers. With `mtp` the last layer is the MTP module's. `epoch` differs after each
    start of the process (0..2**64-1). `processes` are the control addresses of a node of several
    processes, which hold equal shares of its devices in their order; the first, which leads, is
    who greets with this. None is a node of one process.
    """

    role: Literal["prefill", "decode"]
    node: NodeName
    epoch: int
    model: str
    dtype: str
    layout: CacheLayout
    num_pages: Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]
    max_model_len: Annotated[int, msgspec.Meta(ge=1)]
    regions: tuple[tuple[Region, ...], ...] = ()
    contexts: tuple[ContextBuffers, ...] = ()
    mtp: bool = False
    protocol: int = PROTOCOL_VERSION
    processes: tuple[NodeName, ...] = ()

    def __post_init__(self) -> None:
        _check_epoch(self.epoch)
        layout = self.layout
        if layout.devices % self.process_count:
            raise ValueError(
                f"processes: {len(self.processes)}, must share the layout's {layout.devices} "
                "devices equally"
            )
        if len(set(self.processes)) < len(self.processes):
            raise ValueError("processes: an address is listed twice")
        shard = self.num_pages * layout.shard_bytes
        for name in ("regions", "contexts"):
            devices = len(getattr(self, name))
            if devices not in (0, layout.devices):
                raise ValueError(f"{name}: {devices} devices, the layout has {layout.devices}")
        for ordinal, row in enumerate(self.regions):
            if len(row) != layout.layers:
                raise ValueError(
                    f"regions: {len(row)} layers of device {ordinal}, "
                    f"the layout has {layout.layers}"
                )
            for layer, region in enumerate(row):
                if region.length != shard:
                    raise ValueError(
                        f"regions: device {ordinal} layer {layer} has {region.length} bytes, "
                        f"num_pages and the layout make {shard}"
                    )
        for buffers in self.contexts:
            if buffers.region.length < buffers.buffer_bytes * buffers.count:
                raise ValueError(
                    f"contexts: a region of {buffers.region.length} bytes cannot hold "
                    f"{buffers.count} buffers of {buffers.buffer_bytes}"
                )

    @property
    def process_count(self) -> int:
        """Processes of the node."""
        return max(len(self.processes), 1)


class MemberHello(msgspec.Struct, frozen=True, tag="member", forbid_unknown_fields=True):
    """A process of a node that another one leads: its node's name, its leader's epoch, its number.

    What the node is, the leader's NodeHello says.
    """

    node: NodeName
    epoch: int
    process: Annotated[int, msgspec.Meta(ge=1, lt=MAX_PROCESSES)]

    def __post_init__(self) -> None:
        _check_epoch(self.epoch)


def _check_epoch(epoch: int) -> None:
    if not 0 <= epoch < 1 << 64:
        raise ValueError(f"epoch: {epoch}, must be in 0..2**64-1")


def compatibility(mine: NodeHello, theirs: NodeHello) -> list[str]:
    """Why these two nodes cannot work together: one line per field, with both values.

    Empty when they can. Each line begins with the field's name.
    """
    problems: list[str] = []

    def compare(name: str, a: object, b: object) -> None:
        if a != b:
            problems.append(f"{name}: {a} at {mine.node}, {b} at {theirs.node}")

    compare("protocol version", mine.protocol, theirs.protocol)
    compare("model", mine.model, theirs.model)
    compare("dtype", mine.dtype, theirs.dtype)
    compare("mtp", *("on" if node.mtp else "off" for node in (mine, theirs)))
    compare("kind", mine.layout.kind, theirs.layout.kind)
    compare("layers", *(node.layout.layers - node.mtp for node in (mine, theirs)))
    for name in ("kv_heads", "head_dim", "itemsize"):
        compare(name.replace("_", " "), getattr(mine.layout, name), getattr(theirs.layout, name))
    if mine.role == theirs.role:
        problems.append(f"role: {mine.node} and {theirs.node} are both {mine.role} nodes")
    context_bytes = [{c.buffer_bytes for c in node.contexts} for node in (mine, theirs)]
    compare("context bytes", *(sorted(sizes) or "no buffers" for sizes in context_bytes))
    try:  # only what the plan alone decides: the other fields are compared above
        free = {name: getattr(theirs.layout, name) for name in ("page_size", "tp", "dp")}
        other = dataclasses.replace(mine.layout, **free)
        source, target = (mine.layout, other) if mine.role == "prefill" else (other, mine.layout)
        plan(source, target)
    except ValueError as error:
        problems.append(str(error))
    return problems
