"""Mosaic GPU for kernels whose matmuls have cached tokens as rows and query heads as columns.

`wgmma` takes 64 rows and any multiple of 8 columns, so few heads cost no padding this way. Beside
`mosaic`, whose words this uses, the only module that imports the unstable library: what differs
between its releases stays here.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import Ref


def overlay(*scratch: Any) -> Any:
    """Scratch of which one kind is used at a time, in the memory of the largest.

    The body gets one reference that unpacks into those of the kinds. Nothing that was written as
    one kind is to be read as another.
    """
    return plgpu.RefUnion(*scratch)


def per_column(value: float, columns: int) -> jax.Array:
    """f32 [columns] of one value, spread as the columns of a wgmma result."""
    full = jnp.full((columns,), value, jnp.float32)
    return plgpu.layout_cast(full, plgpu.Layout.WGMMA.reduce(0))


def read_per_column(ref: Ref) -> jax.Array:
    """The contents [columns] of a memory, spread as the columns of a wgmma result."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)


def write_per_column(ref: Ref, values: jax.Array) -> None:
    """Write [columns], spread as the columns of a wgmma result, to global memory.

    Once per block, a few hundred bytes: that the lanes' writes make no whole cache lines is well.
    """
    if hasattr(plgpu, "store"):  # jax 0.12, where a plain assignment refuses such writes
        plgpu.store(ref, values, optimized=False)
    else:
        ref[...] = values


def down(values: jax.Array, like: jax.Array) -> jax.Array:
    """[columns] repeated along the rows of `like` [rows, columns]."""
    return lax.broadcast_in_dim(values, like.shape, [1])


def vector(value: float, size: int) -> jax.Array:
    """f32 [size] of one value, spread evenly over a warpgroup's threads; 128 divides size."""
    return plgpu.layout_cast(jnp.full((size,), value, jnp.float32), _even(size))


def read_vector(ref: Ref) -> jax.Array:
    """The contents [size] of global memory, spread as `vector` spreads them."""
    return plgpu.load(ref, layout=_even(ref.shape[-1]))


def _even(size: int) -> Any:
    return plgpu.Layout.WG_STRIDED((size,), vec_size=min(4, size // 128))


def write(ref: Ref, values: jax.Array) -> None:
    """Write values, spread as they were read, to memory; `commit` before a matmul reads a tile."""
    ref[...] = values


def write_turned(ref: Ref, values: jax.Array) -> None:
    """Write `values` [rows, columns], spread as a wgmma result, into a tile [columns, rows].

    16- and 32-bit values; two lanes of a warp swap halves, so that the write has no bank conflicts.
    `commit` before a matmul or a store.
    """
    ref.transpose((1, 0))[...] = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)


def accumulate_turned(
    sums: Sequence[jax.Array], values: Sequence[Ref], weights: Ref, *, interpret: bool
) -> list[jax.Array]:
    """Each of `sums` f32 [M, N] plus v.T @ weights.T, of shared tiles v [S, M] and weights [N, S].

    One v for each sum; M a multiple of 64, N of 8. All are under way together.
    """
    turned = weights.transpose((1, 0))
    if interpret:
        # Interpret mode (0.11.2, 0.12) knows no accumulators with a start value.
        def product(v: Ref) -> jax.Array:
            def multiply(ref: Ref) -> jax.Array:
                plgpu.wgmma(ref, v.transpose((1, 0)), turned)
                return ref[...]

            return pl.run_scoped(multiply, plgpu.ACC((v.shape[1], weights.shape[0]), jnp.float32))

        return [total + product(v) for total, v in zip(sums, values, strict=True)]

    def multiply(refs: Sequence[Ref]) -> None:
        for ref, v in zip(refs, values, strict=True):
            plgpu.wgmma(ref, v.transpose((1, 0)), turned)

    added: Any = pl.run_state(multiply)([plgpu.ACC.init(total) for total in sums])
    return added
