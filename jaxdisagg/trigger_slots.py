"""The slots through which the triggers of a GPU's steps come (M8)."""

from ffi_transport.engine import TransferEngine
from jaxdisagg.cache import PagedCache
from jaxdisagg.mesh import is_gpu, rank_devices


def open_slots(engine: TransferEngine, cache: PagedCache) -> None:
    """Open slots for every shard of a cache on GPUs; before the first step, warm-up too.

    On CPUs nothing is needed. Raises FabricUnavailable when CUDA's driver refuses.
    """
    if not is_gpu(rank_devices(cache.mesh)[0]):
        return
    shards = cache.shards()
    ordinals = sorted({shard.ordinal for shard in shards})
    engine.open_slots(ordinals, 1 + max(shard.layer for shard in shards))
