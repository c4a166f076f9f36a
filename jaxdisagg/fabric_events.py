"""Brings the transfer engine's events to a node's loop, and a node's memory to its peers."""

import logging
import threading
from collections.abc import Callable, Sequence

from ffi_transport.engine import TransferEngine
from ffi_transport.types import Event, RemoteRegion
from jaxdisagg.cache import PagedCache
from jaxdisagg.messages import ContextBuffers, NodeHello, Region

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5


class EventPump:
    """A thread that waits for the engine's events (without the GIL) and hands them on in order."""

    def __init__(
        self, engine: TransferEngine, deliver: Callable[[Sequence[Event]], None], name: str
    ) -> None:
        self._engine = engine
        self._deliver = deliver
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; returns when it has ended."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            events = self._engine.poll(POLL_SECONDS)
            if events:
                self._deliver(events)


def register_cache(
    engine: TransferEngine, cache: PagedCache, *, source: bool
) -> tuple[tuple[tuple[Region, ...], ...], tuple[ContextBuffers, ...]]:
    """Register every shard of a cache; returns what HELLO announces of it.

    Regions are by rank and layer; context buffers by dp rank, those of its tp rank 0. With
    `source`, the trigger learns which registration belongs to (ordinal, layer), the context
    buffer being layer `num_layers`.
    """
    dp = cache.mesh.shape["dp"]
    shards = cache.shards()
    layers = len(cache.layers)
    ranks = len(shards) // (layers + 1)
    rows: list[list[Region]] = [[] for _ in range(ranks)]
    contexts: list[ContextBuffers] = []
    for shard in shards:
        region = engine.register_memory(shard.address, shard.nbytes)
        if source:
            engine.set_source_region(shard.ordinal, shard.layer, region)
        announced = Region(region.descriptor, shard.nbytes)
        if shard.layer < layers:
            rows[shard.rank].append(announced)
        elif shard.rank % (ranks // dp) == 0:
            contexts.append(ContextBuffers(announced, cache.context_bytes, cache.context_rows))
    return tuple(map(tuple, rows)), tuple(contexts)


class RemoteCache:
    """A peer's announced memory as the transfer engine takes it."""

    def __init__(self, hello: NodeHello) -> None:
        self.hello = hello
        self._regions = [
            [RemoteRegion(r.descriptor, r.length) for r in row] for row in hello.regions
        ]
        self._contexts = [
            RemoteRegion(c.region.descriptor, c.region.length) for c in hello.contexts
        ]

    def layers(self, dp_rank: int, rank: int) -> tuple[RemoteRegion, ...]:
        """The cache shard of each layer on one device."""
        return tuple(self._regions[self.hello.layout.ordinal(dp_rank, rank)])

    def context(self, dp_rank: int) -> tuple[RemoteRegion, ContextBuffers]:
        """The context buffers of a dp rank."""
        return self._contexts[dp_rank], self.hello.contexts[dp_rank]
