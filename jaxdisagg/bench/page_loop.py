"""What the decode operations' XLA paths are compared with: a loop over page blocks, as first tried.

Both keep an online softmax (Milakov and Gimelshein, arXiv:1805.02867) and gather eight pages a
round; products are taken in the cache's dtype. They mask scores and leave what a page holds past a
row's length as it is, so unlike the product's they need finite pages.
"""

import jax
import jax.numpy as jnp
from jax import lax

PAGES = 8  # of a round
MASKED = -1e30


def gqa_decode(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """[B, N, H] of q [B, N, H], K and V apart [P, K, Z, H], page_table [B, W], lengths [B]."""
    kv_heads, page_size = k_pages.shape[1:3]
    grouped = q.reshape(q.shape[0], kv_heads, -1, q.shape[2])

    def products(pages: jax.Array) -> jax.Array:
        k = k_pages[pages]  # [B, M, K, Z, H]
        return jnp.einsum("bkgh,bmkzh->bkgmz", grouped, k, preferred_element_type=jnp.float32)

    def average(weights: jax.Array, pages: jax.Array) -> jax.Array:
        v = v_pages[pages]
        weights = weights.astype(v.dtype)
        return jnp.einsum("bkgmz,bmkzh->bkgh", weights, v, preferred_element_type=jnp.float32)

    out = _online(products, average, page_table, lengths, page_size, grouped.shape, scale)
    return out.reshape(q.shape).astype(q.dtype)


def mla_decode(
    q: jax.Array,
    cache: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    latent: int,
) -> jax.Array:
    """[B, N, R] of absorbed q [B, N, R+C] and a cache of latents [P, Z, R+C]."""
    grouped = q[:, None]

    def products(pages: jax.Array) -> jax.Array:
        kept = cache[pages]  # [B, M, Z, R+C]
        return jnp.einsum("bkgc,bmzc->bkgmz", grouped, kept, preferred_element_type=jnp.float32)

    def average(weights: jax.Array, pages: jax.Array) -> jax.Array:
        kept = cache[pages][..., :latent]
        weights = weights.astype(kept.dtype)
        return jnp.einsum("bkgmz,bmzr->bkgr", weights, kept, preferred_element_type=jnp.float32)

    shape = (*grouped.shape[:-1], latent)
    out = _online(products, average, page_table, lengths, cache.shape[1], shape, scale)
    return out[:, 0].astype(q.dtype)


def _online(products, average, page_table, lengths, page_size, shape, scale) -> jax.Array:
    """f32 of `shape` [B, K, G, .]: the loop, over the blocks of the longest row."""
    block = min(PAGES, page_table.shape[1])
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % block)))

    def round_(i: jax.Array, seen: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, acc = seen
        pages = lax.dynamic_slice_in_dim(table, i * block, block, 1)
        at = i * block * page_size + jnp.arange(block * page_size).reshape(block, page_size)
        live = at < lengths[:, None, None]  # [B, M, Z]
        scores = jnp.where(live[:, None, None], products(pages) * scale, MASKED)
        new_top = jnp.maximum(top, scores.max((-1, -2)))
        weights, decay = jnp.exp(scores - new_top[..., None, None]), jnp.exp(top - new_top)
        acc = acc * decay[..., None] + average(weights, pages)
        return new_top, total * decay + weights.sum((-1, -2)), acc

    zeros = jnp.zeros(shape[:-1], jnp.float32)
    rounds = -(-lengths.max() // (block * page_size))
    start = (zeros + MASKED, zeros, jnp.zeros(shape, jnp.float32))
    _, total, acc = lax.fori_loop(0, rounds, round_, start)
    return acc / jnp.maximum(total, 1e-30)[..., None]
