"""A jitted step with triggers on four CPU devices, small enough to follow every byte."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ffi_transport.engine import TransferEngine
from ffi_transport.trigger import make_trigger

DEVICES = 4
LAYERS = 3
PAGES = 8
PAGE_FLOATS = 256
PAGE_BYTES = PAGE_FLOATS * 4
WIDTH = 16


class Program:
    """A step of three layers on four devices: each writes a page of its cache, then triggers."""

    def __init__(self, engine: TransferEngine) -> None:
        self.mesh = jax.make_mesh(
            (DEVICES,), ("kv",), axis_types=(jax.sharding.AxisType.Auto,),
            devices=jax.devices()[:DEVICES],
        )  # fmt: skip
        self.trigger = make_trigger(engine.index)
        self.sharding = NamedSharding(self.mesh, P("kv"))
        self.x = jax.device_put(jnp.ones((DEVICES, WIDTH)), self.sharding)
        self.caches = tuple(
            jax.device_put(jnp.zeros((DEVICES * PAGES, PAGE_FLOATS)), self.sharding)
            for _ in range(LAYERS)
        )
        self.step = jax.jit(self._step, donate_argnums=(2,))

    def _layer(self, step, x, cache, page, *, layer):
        value = (layer + 1) * 1000 + step
        cache = jax.lax.dynamic_update_slice(
            cache, jnp.full((1, PAGE_FLOATS), value, cache.dtype), (page, 0)
        )
        x = x + jax.lax.psum(x.sum(), "kv") * 1e-3 + cache[page, 0] * 1e-6
        return self.trigger(step, x, cache, layer), cache

    def _step(self, step, x, caches, page):
        written = []
        for layer, cache in enumerate(caches):
            x, cache = jax.shard_map(
                functools.partial(self._layer, layer=layer), mesh=self.mesh,
                in_specs=(P(), P("kv"), P("kv"), P()), out_specs=(P("kv"), P("kv")),
                check_vma=False,
            )(step, x, cache, page)  # fmt: skip
            written.append(cache)
        return x, tuple(written)

    def run(self, number: int, page: int) -> jax.Array:
        x, self.caches = self.step(np.int32(number), self.x, self.caches, np.int32(page))
        return jax.block_until_ready(x)

    def shards(self, layer: int) -> dict[int, jax.Array]:
        return {s.device.id: s.data for s in self.caches[layer].addressable_shards}


def register(engine: TransferEngine, program: Program) -> None:
    """Make every shard of the program's caches a source of planned writes."""
    for layer in range(LAYERS):
        for ordinal, shard in program.shards(layer).items():
            region = engine.register_memory(shard.unsafe_buffer_pointer(), shard.nbytes)
            engine.set_source_region(ordinal, layer, region)
