"""Cutting rows of unequal length into pieces of nearly equal work.

A decode kernel runs one block of threads per piece and KV head, or, of latents, which all heads
share, per piece and tile of heads. Every piece attends to a range of its row's tokens by itself;
softmax being what it is, the pieces' results merge exactly by the logarithms of their weights' sums
(flash decoding, Dao et al., 2023).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

PROCESSORS = 132  # streaming multiprocessors of an H100 SXM or H200
# Merging a row's pieces goes one by one; so many are enough for one row to use the whole bandwidth.
ROW_PIECES = 96


class Pieces(NamedTuple):
    """Pieces of rows: whole blocks of some number of tokens.

    ranges: i32 [S, 3], row, first block, end block (past the last); a row's pieces lie side by
    side, unused ones last, of row B and without blocks. bounds: i32 [B+1], the first piece of each
    row, and the end.
    """

    ranges: jax.Array
    bounds: jax.Array


def num_pieces(rows: int, heads: int, resident: int) -> int:
    """How many pieces fill the device, of which each processor holds `resident` at a time.

    At least two a row, so that a long row among short ones can be cut.
    """
    return max(2 * rows, min(PROCESSORS * resident // heads, ROW_PIECES * rows))


def cut(lengths: jax.Array, block: int, count: int) -> Pieces:
    """Cut rows into at most `count` pieces of whole blocks of `block` tokens.

    lengths [B] i32 with B < count. No piece is longer than total / (count - B) blocks rounded up,
    and a row without tokens has none.
    """
    rows = lengths.shape[0]
    blocks = (lengths + (block - 1)) // block
    # Rounding up per row adds less than one piece a row: with this size they fit into `count`.
    size = jnp.maximum((blocks.sum() + (count - rows - 1)) // (count - rows), 1)
    parts = (blocks + size - 1) // size
    bounds = jnp.pad(jnp.cumsum(parts, dtype=jnp.int32), (1, 0))
    piece = jnp.arange(count, dtype=jnp.int32)
    row = (piece[:, None] >= bounds[1:]).sum(1, dtype=jnp.int32)
    of = jnp.minimum(row, rows - 1)
    even = ((blocks + parts - 1) // jnp.maximum(parts, 1))[of]
    first = (piece - bounds[of]) * even
    end = jnp.minimum(first + even, blocks[of])
    used = row < rows
    ranges = jnp.stack([row, jnp.where(used, first, 0), jnp.where(used, end, 0)], axis=1)
    return Pieces(ranges, bounds)
