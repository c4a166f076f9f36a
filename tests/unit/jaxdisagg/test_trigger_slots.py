"""Which nodes open slots, and for what; the devices and the engine are stand-ins."""

from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest

from ffi_transport.engine import TransferEngine
from jaxdisagg.cache import PagedCache, Shard
from jaxdisagg.mesh import make_mesh
from jaxdisagg.trigger_slots import open_slots
from models.interface import CacheSpec


class Engine:
    """Notes what is opened."""

    def __init__(self) -> None:
        self.opened: list[tuple[list[int], int]] = []

    def open_slots(self, ordinals: list[int], layers: int) -> None:
        self.opened.append((ordinals, layers))


def opened_for(cache: Any) -> list[tuple[list[int], int]]:
    engine = Engine()
    open_slots(cast(TransferEngine, engine), cache)
    return engine.opened


@pytest.mark.parametrize("platform", ["gpu", "cuda"])
def test_a_gpu_has_a_slot_for_each_layer_and_the_context(platform):
    devices = np.array([SimpleNamespace(platform=platform)] * 4)
    # Of a node of two processes this one holds ranks 2 and 3; its devices are its 0 and 1.
    shards = [Shard(rank, rank - 2, layer, 64, 64) for rank in (2, 3) for layer in range(5)]
    cache = SimpleNamespace(mesh=SimpleNamespace(devices=devices), shards=lambda: shards)
    assert opened_for(cache) == [([0, 1], 5)]


def test_a_cpu_needs_none():
    mesh = make_mesh(devices=jax.devices()[:1], tp=1, dp=1, kv_heads=2)
    cache = PagedCache(
        CacheSpec(2, 2, 8, "float32"), mesh, pages=2, page_size=8, context_rows=1, hidden_size=4
    )
    assert opened_for(cache) == []
