"""The softmax of Hopper's kernels, which see a row's scores block by block.

What was accumulated shrinks whenever a larger score comes (Milakov and Gimelshein, 2018).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import mosaic
from pallas_kernels.paging import MASKED

# What an online softmax begins at: below any real score, and far above a masked one however scaled.
# Beginning at a masked score, a row that sees nothing yet would weigh by the exponential of how a
# masked product differs from itself rounded: 1, or infinity where the two are one multiply-add.
FLOOR = -1e20


class Softmax(NamedTuple):
    """What an online softmax has seen of each row, in base 2.

    top: f32 [M], the largest scaled score times log2(e); total: f32 [M], the sum of the weights.
    """

    top: jax.Array
    total: jax.Array


def start(rows: int) -> Softmax:
    """Nothing seen."""
    return Softmax(mosaic.per_row(FLOOR, rows), mosaic.per_row(0.0, rows))


def step(seen: Softmax, products: jax.Array, scale: float) -> tuple[Softmax, jax.Array, jax.Array]:
    """Take in a block of products q.k [M, N], the masked ones MASKED; scale > 0.

    Returns what is seen now, the block's weights f32 [M, N], and the factor f32 [M] by which
    everything accumulated before has to shrink.
    """
    factor = scale * mosaic.LOG2_E
    # Kept in scaled units, so that the scaling is one fused multiply-add with the subtraction.
    top = jnp.maximum(seen.top, products.max(axis=1) * factor)
    weights = jnp.exp2(products * factor - mosaic.across(top, products))
    decay = jnp.exp2(seen.top - top)
    return Softmax(top, seen.total * decay + weights.sum(axis=1)), weights, decay


def divide(seen: Softmax, acc: jax.Array) -> jax.Array:
    """The accumulated values [M, D] over the weights' sum; rows that saw nothing stay 0."""
    return acc * mosaic.across(1.0 / jnp.maximum(seen.total, 1e-30), acc)


def lse(seen: Softmax) -> jax.Array:
    """Log2 of the sum of all weights before shrinking, f32 [M]; MASKED where nothing was seen."""
    total = jnp.maximum(seen.total, 1e-30)
    return jnp.where(seen.total > 0, seen.top + jnp.log(total) * mosaic.LOG2_E, MASKED)
