"""Reading blocks of pages, shared by the XLA back ends."""

import jax
import jax.numpy as jnp

# Tokens per block of the online softmax: large enough for the matmuls, small enough for caches.
BLOCK_TOKENS = 128
# A score that no real one undercuts, finite so that (masked - masked) is not NaN.
MASKED = -1e30


def pages_per_block(page_size: int, width: int) -> int:
    """How many pages of a table of `width` are read at once."""
    return max(1, min(BLOCK_TOKENS // page_size, width))


def pad_table(page_table: jax.Array, block: int) -> jax.Array:
    """The page table, its width padded to whole blocks."""
    return jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % block)))


def read_block(
    cache: jax.Array, pages: jax.Array, first: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """K and V of some consecutive pages of each row, in f32.

    cache [P, K, 2, Z, H]; pages [R, M] page ids of the pages `first`, first+1, ... of each row;
    lengths [R]. Returns (kv [R, K, 2, M*Z, H] f32, live [R, M*Z]). Tokens at or past a row's length
    are zeros, whatever their page holds, and pages that lie wholly past it are not read.
    """
    rows, count = pages.shape
    _, heads, _, page_size, head_dim = cache.shape
    starts = (first + jnp.arange(count)) * page_size
    pages = jnp.where(starts[None, :] < lengths[:, None], pages, 0)
    kv = cache.at[pages].get(mode="clip").transpose(0, 2, 3, 1, 4, 5)
    kv = kv.reshape(rows, heads, 2, count * page_size, head_dim)
    positions = first * page_size + jnp.arange(count * page_size)
    live = positions[None, :] < lengths[:, None]
    return jnp.where(live[:, None, None, :, None], kv, 0).astype(jnp.float32), live
