"""A node's cache as peers may write it, and a peer's announced memory as the engine takes it."""

from ffi_transport.engine import TransferEngine
from ffi_transport.types import RemoteRegion
from jaxdisagg.cache import PagedCache
from jaxdisagg.fabric import device_domains
from jaxdisagg.hello import ContextBuffers, NodeHello, Region
from jaxdisagg.mesh import rank_devices


def register_cache(
    engine: TransferEngine, cache: PagedCache, *, source: bool
) -> tuple[tuple[tuple[Region, ...], ...], tuple[ContextBuffers, ...]]:
    """Register every shard of a cache; returns what HELLO announces of it.

    A device's shards are registered with the NICs that are its own (`fabric.device_domains`).
    Regions are by rank and layer, context buffers by rank. With `source`, the trigger learns which
    registration belongs to (ordinal, layer), the context buffer coming after the last of
    `cache.layers`.
    """
    shards = cache.shards()
    layers = len(cache.layers)
    ranks = sorted({shard.rank for shard in shards})
    devices = rank_devices(cache.mesh)
    shares = device_domains(engine, [devices[rank] for rank in ranks])
    domains = dict(zip(ranks, shares, strict=True))
    rows: dict[int, list[Region]] = {}
    contexts: list[ContextBuffers] = []
    for shard in shards:
        region = engine.register_memory(shard.address, shard.nbytes, domains[shard.rank])
        if source:
            engine.set_source_region(shard.ordinal, shard.layer, region)
        announced = Region(region.descriptor, shard.nbytes)
        if shard.layer < layers:
            rows.setdefault(shard.rank, []).append(announced)
        else:
            contexts.append(ContextBuffers(announced, cache.context_bytes, cache.context_rows))
    return tuple(map(tuple, rows.values())), tuple(contexts)


class RemoteCache:
    """A peer's announced memory as the transfer engine takes it.

    Raises ValueError, naming the field, for a HELLO that announces no memory, or memory that it
    describes in two ways: nothing of it may fail later, in the middle of a step.
    """

    def __init__(self, hello: NodeHello) -> None:
        if not hello.regions:
            raise ValueError("regions: none, a decode node must announce its cache")
        if not hello.contexts:
            raise ValueError("contexts: none, a decode node must announce its context buffers")
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

    def context(self, dp_rank: int, rank: int) -> tuple[RemoteRegion, ContextBuffers]:
        """The context buffers of one device."""
        ordinal = self.hello.layout.ordinal(dp_rank, rank)
        return self._contexts[ordinal], self.hello.contexts[ordinal]
