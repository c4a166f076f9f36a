"""Where a request's cache lands in a decode node, told to the transfer engine when it counts.

The memory of a GPU must be seen to between the last write and the first step that reads it
(`TransferEngine.arm`), so a counter there knows the pages that its request's writes fill. They are
those of the request's lease: all layers' and the context row, on the devices of its dp rank.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from ffi_transport.types import Landing, MemoryRegion
from jaxdisagg.cache_layout import CacheLayout


class Destination(msgspec.Struct, frozen=True, array_like=True):
    """A request's place in a decode node: packed uint32 pages of a dp rank, and a context row."""

    dp_rank: int
    pages: bytes
    context: int


class DeviceLandings:
    """The regions of one process that lie in GPUs; none on a process without.

    `layers[rank]` has a region per layer of the cache, `contexts[rank]` is the rank's context rows
    of `context_bytes` each. Ranks are those of the node: dp_rank * tp + tp_rank.
    """

    def __init__(
        self,
        layout: CacheLayout,
        layers: Mapping[int, Sequence[MemoryRegion]],
        contexts: Mapping[int, MemoryRegion],
        context_bytes: int,
    ) -> None:
        self._layout = layout
        self._layers = layers
        self._contexts = contexts
        self._context_bytes = context_bytes

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._layers)

    def of(self, destination: Destination) -> tuple[Landing, ...]:
        """What a request's writes fill here: () where that is host memory, or nothing."""
        first = self._layout.ordinal(destination.dp_rank, 0)
        ranks = [rank for rank in range(first, first + self._layout.tp) if rank in self._layers]
        if not ranks:
            return ()
        pages = np.frombuffer(destination.pages, "<u4")
        layers = tuple(region for rank in ranks for region in self._layers[rank])
        contexts = tuple(self._contexts[rank] for rank in ranks)
        return (
            Landing(layers, pages, self._layout.shard_bytes),
            Landing(contexts, [destination.context], self._context_bytes),
        )
