"""A node's cache as peers may write it, and a peer's announced memory as the engine takes it."""

import logging
from dataclasses import dataclass

from ffi_transport.engine import TransferEngine
from ffi_transport.types import MemoryRegion, RemoteRegion
from jaxdisagg.cache import PagedCache
from jaxdisagg.cache_layout import CacheLayout
from jaxdisagg.fabric import device_domains
from jaxdisagg.hello import ContextBuffers, NodeHello, Region
from jaxdisagg.landings import DeviceLandings
from jaxdisagg.mesh import rank_devices

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheMemory:
    """A process's part of a cache as it is registered.

    `regions[device][layer]` and `contexts[device]` are what HELLO announces, in the rank order of
    its devices. `mode` says how peers reach it: "host" is memory of the process itself, "direct" a
    GPU's that its NIC writes, "staged" a GPU's through host memory; several are joined by "+".
    """

    regions: tuple[tuple[Region, ...], ...]
    contexts: tuple[ContextBuffers, ...]
    landings: DeviceLandings
    mode: str


def register_cache(
    engine: TransferEngine, cache: PagedCache, layout: CacheLayout, *, source: bool
) -> CacheMemory:
    """Register every shard of a cache, which is this process's part of one of `layout`.

    A device's shards are registered with the NICs that are its own (`fabric.device_domains`), a
    GPU's as its memory. With `source`, the trigger learns which registration belongs to (ordinal,
    layer), the context buffer coming after the last of `cache.layers`.
    """
    shards = cache.shards()
    layers = len(cache.layers)
    ranks = sorted({shard.rank for shard in shards})
    devices = rank_devices(cache.mesh)
    shares = device_domains(engine, [devices[rank] for rank in ranks])
    domains = dict(zip(ranks, shares, strict=True))
    rows: dict[int, list[MemoryRegion]] = {rank: [] for rank in ranks}
    contexts: dict[int, MemoryRegion] = {}
    modes: set[str] = set()
    for shard in shards:
        region = engine.register_memory(
            shard.address, shard.nbytes, domains[shard.rank], device=shard.device
        )
        if source:
            engine.set_source_region(shard.ordinal, shard.layer, region)
        if shard.layer < layers:
            rows[shard.rank].append(region)
        else:
            contexts[shard.rank] = region
        mode = engine.memory_mode(region)
        if mode == "staged" and mode not in modes:
            log.info("device memory is reached through host memory: %s", engine.why_staged(region))
        modes.add(mode)
    on_gpus = {shard.rank for shard in shards if shard.device is not None}
    landings = DeviceLandings(
        layout,
        {rank: row for rank, row in rows.items() if rank in on_gpus},
        {rank: region for rank, region in contexts.items() if rank in on_gpus},
        cache.context_bytes,
    )
    return CacheMemory(
        regions=tuple(tuple(map(_announced, row)) for row in rows.values()),
        contexts=tuple(
            ContextBuffers(_announced(region), cache.context_bytes, cache.context_rows)
            for region in contexts.values()
        ),
        landings=landings,
        mode="+".join(sorted(modes)),
    )


def _announced(region: MemoryRegion) -> Region:
    return Region(region.descriptor, region.length)


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
