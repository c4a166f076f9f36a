"""Sorting a flat batch of tokens into tiles of one row each, and back.

A kernel's block of threads takes one tile: so many tokens of one row of the page table. The tokens
of a row keep their order in the batch, so chunks that lie side by side give tiles of neighbouring
positions, which see nearly the same keys; any other order is right too.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Tiles(NamedTuple):
    """Where tokens go. With S tiles of M tokens each:

    token: i32 [S*M], the token in each place, T (past the last) where there is none;
    place: i32 [T], where each token went, S*M if it is padding;
    limits: i32 [S, M], how many positions of the row the token sees, 0 where there is none;
    row, longest, shortest: i32 [S], the tile's row, and the largest and smallest limit of its
    tokens. Unused tiles come last: row 0, both 0.
    """

    token: jax.Array
    place: jax.Array
    limits: jax.Array
    row: jax.Array
    longest: jax.Array
    shortest: jax.Array


def num_tiles(tokens: int, rows: int, per_tile: int) -> int:
    """Tiles that any batch of these sizes fits into: rows do not share one."""
    return tokens // per_tile + min(rows, tokens)


def sort(rows: jax.Array, positions: jax.Array, num_rows: int, per_tile: int) -> Tiles:
    """Sort tokens of rows [T] i32 (negative for padding) and positions [T] i32 into tiles.

    Plain XLA operations of a few passes over [T, num_rows]; equal for all layers of a step, so XLA
    computes them once.
    """
    tokens = rows.shape[0]
    tiles = num_tiles(tokens, num_rows, per_tile)
    mine = rows[:, None] == jnp.arange(num_rows)
    before = jnp.cumsum(mine, axis=0, dtype=jnp.int32)  # of the row's tokens, the token included
    used = (before[-1] + per_tile - 1) // per_tile
    ends = jnp.cumsum(used)
    in_row = jnp.where(mine, before - 1 + (ends - used) * per_tile, 0).sum(1, dtype=jnp.int32)
    place = jnp.where((rows >= 0) & (rows < num_rows), in_row, tiles * per_tile)
    token = jnp.full((tiles * per_tile,), tokens, jnp.int32)
    token = token.at[place].set(jnp.arange(tokens, dtype=jnp.int32), mode="drop")
    limits = (positions + 1).at[token].get(mode="fill", fill_value=0).reshape(tiles, per_tile)
    longest = limits.max(1)
    shortest = jnp.where(limits > 0, limits, jnp.iinfo(jnp.int32).max).min(1)
    row = (jnp.arange(tiles)[:, None] >= ends).sum(1, dtype=jnp.int32)
    row = jnp.where(longest > 0, row, 0)
    return Tiles(token, place, limits, row, longest, jnp.minimum(shortest, longest))
