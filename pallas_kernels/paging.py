"""Reading blocks of pages, shared by the XLA back ends."""

import jax
import jax.numpy as jnp
from jax import lax

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


def to_f32(cached: jax.Array) -> jax.Array:
    """Cached numbers in f32: bytes (uint8) are e4m3 numbers (float8_e4m3fn), exact in f32.

    A cache stays uint8 wherever it is written: XLA scatters into float8 by way of f16 copies.
    """
    if cached.dtype == jnp.uint8:
        cached = lax.bitcast_convert_type(cached, jnp.float8_e4m3fn)
    return cached.astype(jnp.float32)


def read_block(
    cache: jax.Array, pages: jax.Array, first: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """K and V of some consecutive pages of each row, and which of their tokens are live.

    cache [P, K, 2, Z, H]; pages [R, M] page ids of the pages `first`, first+1, ... of each row;
    lengths [R]. Returns (k [R, K, M*Z, H], v alike, live [R, M*Z]) in the cache's dtype. Tokens at
    or past a row's length are not live: their v is zero whatever the page holds, since a weight of
    0 would keep a NaN, and their k is arbitrary, since the caller replaces their scores. So entries
    of pages past the length may be anything, out of range included.
    """
    rows, count = pages.shape
    _, heads, _, page_size, head_dim = cache.shape
    # Gathering (page, head, K or V) slices puts a head's tokens side by side without a transpose.
    slices = cache.reshape(-1, page_size, head_dim)
    k_index = (pages[:, None, :] * heads + jnp.arange(heads)[:, None]) * 2  # [R, K, M]
    shape = (rows, heads, count * page_size, head_dim)
    k = slices.at[k_index].get(mode="clip").reshape(shape)
    v = slices.at[k_index + 1].get(mode="clip").reshape(shape)
    positions = first * page_size + jnp.arange(count * page_size)
    live = positions[None, :] < lengths[:, None]
    return k, jnp.where(live[:, None, :, None], v, 0), live


def read_latent_block(
    cache: jax.Array, pages: jax.Array, first: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Latent rows of some consecutive pages of each table row, and which of them are live.

    cache [P, Z, R+C]; pages [B, M] page ids of the pages `first`, first+1, ... of each row; lengths
    [B]. Returns (latents [B, M*Z, R+C] in the cache's dtype, live [B, M*Z]). Tokens at or past a
    row's length are not live and all zero, whatever the page holds: a product with a NaN is a NaN.
    So entries of pages past the length may be anything, out of range included.
    """
    rows, count = pages.shape
    _, page_size, width = cache.shape
    latents = cache.at[pages].get(mode="clip").reshape(rows, count * page_size, width)
    positions = first * page_size + jnp.arange(count * page_size)
    live = positions[None, :] < lengths[:, None]
    return jnp.where(live[..., None], latents, 0), live
