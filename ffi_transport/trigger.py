"""The XLA FFI call that a jitted step makes after each layer, inside shard_map."""

import functools
from typing import Protocol

import jax
import numpy as np

from ffi_transport import _native

TARGET = "jaxdisagg_layer_trigger"


class Trigger(Protocol):
    """(step, x, cache_l, layer) -> x, where cache_l is the layer's shard after its writes."""

    def __call__(self, step: jax.Array, x: jax.Array, cache_l: jax.Array, layer: int) -> jax.Array:
        """Announce that `layer` of `step` is in the cache; returns x."""
        ...


@functools.cache
def _register() -> None:
    jax.ffi.register_ffi_target(TARGET, _native.trigger_handler(), platform="cpu")
    jax.ffi.register_ffi_target(TARGET, _native.trigger_handler_cuda(), platform="CUDA")


def make_trigger(engine_index: int) -> Trigger:
    """The trigger of the engine with this `index`; call it in shard_map, after the all-reduce.

    `step` is an int32 scalar: the low half of the step's number, as an array operand, so that a new
    step compiles nothing. The call is pure and returns `x` in place, which keeps it alive and
    between the layers; the cache is only read. A step without a plan is a counted no-op.

    It is the same program for CPUs and for CUDA, where the engine's open_slots comes before its
    first run. To compile it for CUDA takes neither a device nor a driver.
    """
    _register()

    def trigger(step: jax.Array, x: jax.Array, cache_l: jax.Array, layer: int) -> jax.Array:
        call = jax.ffi.ffi_call(
            TARGET, jax.ShapeDtypeStruct(x.shape, x.dtype), input_output_aliases={1: 0}
        )
        return call(step, x, cache_l, engine=np.int32(engine_index), layer=np.int32(layer))

    return trigger
