"""Cutting rows of unequal length into pieces of nearly equal work, and merging what they give.

A decode kernel runs one block of threads per piece and KV head. Every piece attends to a range of
its row's tokens by itself; softmax being what it is, the pieces' results merge exactly by the
logarithms of their weights' sums (flash decoding, Dao et al., 2023).
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paging import MASKED

PROCESSORS = 132  # streaming multiprocessors of an H100 SXM or H200


def num_pieces(rows: int, heads: int, resident: int) -> int:
    """How many pieces fill the device, of which each processor holds `resident` at a time.

    At least two a row, so that a long row among short ones can be cut.
    """
    return max(PROCESSORS * resident // heads, 2 * rows)


def cut(lengths: jax.Array, block: int, count: int) -> jax.Array:
    """Cut rows into at most `count` pieces of whole blocks of `block` tokens.

    lengths [B] i32 with B < count. Returns i32 [count, 3]: row, first block, end block (past the
    last). A row's pieces lie side by side, none is longer than total / (count - B) blocks rounded
    up, and a row without tokens has none. Unused pieces come last: row B, no blocks.
    """
    rows = lengths.shape[0]
    blocks = (lengths + (block - 1)) // block
    # Rounding up per row adds less than one piece a row: with this size they fit into `count`.
    size = jnp.maximum((blocks.sum() + (count - rows - 1)) // (count - rows), 1)
    parts = (blocks + size - 1) // size
    ends = jnp.cumsum(parts)
    piece = jnp.arange(count, dtype=jnp.int32)
    row = (piece[:, None] >= ends).sum(1, dtype=jnp.int32)
    of = jnp.minimum(row, rows - 1)
    even = ((blocks + parts - 1) // jnp.maximum(parts, 1))[of]
    first = (piece - (ends - parts)[of]) * even
    end = jnp.minimum(first + even, blocks[of])
    used = row < rows
    return jnp.stack([row, jnp.where(used, first, 0), jnp.where(used, end, 0)], axis=1)


def merge(parts: jax.Array, lse: jax.Array, row: jax.Array, rows: int) -> jax.Array:
    """The rows' results [rows, ..., H] f32 from those of their pieces.

    parts [S, ..., H] f32, finite, each piece's weighted mean; lse [S, ...] f32, log2 of the sum of
    its weights, MASKED where it has none; row [S]. Rows without a piece give zeros.
    """
    mine = row == jnp.arange(rows)[:, None]
    mine = mine.reshape(mine.shape + (1,) * (lse.ndim - 1))  # [rows, S, 1...]
    top = jnp.where(mine, lse, MASKED).max(1, keepdims=True)
    weights = jnp.where(mine & (lse > MASKED), jnp.exp2(lse - top), 0)
    total = jnp.maximum(weights.sum(1), 1e-30)
    # A matmul reads each part once, and adds in the same order in every run.
    out = jnp.einsum("bs...,s...h->b...h", weights, parts, precision=lax.Precision.HIGHEST)
    return out / total[..., None]
