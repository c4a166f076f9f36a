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


def numbers(cached: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """What is cached, in `dtype`; bytes (uint8) are e4m3 numbers, exact in bf16, f16 and f32.

    A cache stays uint8 wherever it is written: XLA scatters into float8 by way of f16 copies.
    """
    if cached.dtype == jnp.uint8:
        cached = lax.bitcast_convert_type(cached, jnp.float8_e4m3fn)
    return cached.astype(dtype)


def product_dtype(q: jax.Array, cache: jax.Array) -> jnp.dtype:
    """In which queries and what is cached are multiplied: the one that holds both, so 16 bits stay
    16 bits; q's for a cache of e4m3 bytes."""
    return q.dtype if cache.dtype == jnp.uint8 else jnp.promote_types(q.dtype, cache.dtype)


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
    cache: jax.Array, pages: jax.Array, first: jax.Array, lengths: jax.Array, latent: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Latents and rotated keys of some consecutive pages of each row, and which tokens are live.

    cache [P, Z, R+C] with R = `latent`; pages [B, M] page ids of the pages `first`, first+1, ... of
    each row; lengths [B]. Returns (latents [B, M*Z, R], rotated [B, M*Z, C], live [B, M*Z]), the
    former two in the cache's dtype. Tokens at or past a row's length are not live: their latent is
    zero whatever the page holds, since a weight of 0 would keep a NaN, and their rotated key is
    arbitrary, since the caller replaces their scores. So entries of pages past the length may be
    anything, out of range included.
    """
    shape = (len(pages), pages.shape[1] * cache.shape[1], -1)
    # Two gathers, not one and its slices: XLA:CPU copies then once, masking as it goes.
    latents = cache.at[pages, :, :latent].get(mode="clip").reshape(shape)
    rotated = cache.at[pages, :, latent:].get(mode="clip").reshape(shape)
    live = first * cache.shape[1] + jnp.arange(shape[1]) < lengths[:, None]
    return jnp.where(live[..., None], latents, 0), rotated, live
