"""Latent decode attention in plain XLA operations: blocks of pages with an online softmax.

The trip count follows the longest row, so a step costs what its batch holds, not what the page
table could hold.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paging import (
    MASKED,
    numbers,
    pad_table,
    pages_per_block,
    product_dtype,
    read_latent_block,
)


def mla_decode(
    q: jax.Array,
    cache: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    cache_scale: jax.Array | None = None,
    *,
    scale: float,
    latent: int,
) -> jax.Array:
    """As `api.mla_decode`; memory is one block of latents for all rows.

    Products are taken in `product_dtype` and summed in f32: all heads share a latent, so that even
    one row is a matrix product, which a CPU does up to four times faster in bf16.
    """
    page_size = cache.shape[1]
    block = pages_per_block(page_size, page_table.shape[1])
    table = pad_table(page_table, block)
    dtype = product_dtype(q, cache)
    queries = q.astype(dtype)

    def body(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, acc = carry  # f32 [B, N], [B, N], [B, N, R]
        pages = lax.dynamic_slice_in_dim(table, i * block, block, axis=1)
        latents, rotated, live = read_latent_block(cache, pages, i * block, lengths, latent)
        latents, rotated = numbers(latents, dtype), numbers(rotated, dtype)
        of_latents = dots(queries[..., :latent], latents)
        of_rotated = dots(queries[..., latent:], rotated)
        if cache_scale is not None:  # of sums: a scaled query would no longer be a 16-bit number
            of_latents, of_rotated = of_latents * cache_scale[0], of_rotated * cache_scale[1]
        scores = jnp.where(live[:, None], (of_latents + of_rotated) * scale, MASKED)
        new_top = jnp.maximum(top, scores.max(-1))
        weights = jnp.exp(scores - new_top[..., None])
        decay = jnp.exp(top - new_top)
        part = jnp.einsum(
            "bns,bsr->bnr", weights.astype(dtype), latents, preferred_element_type=jnp.float32
        )
        return new_top, total * decay + weights.sum(-1), acc * decay[..., None] + part

    blocks = (lengths.max() + block * page_size - 1) // (block * page_size)
    zeros = jnp.zeros(q.shape[:2], jnp.float32)
    start = (zeros + MASKED, zeros, jnp.zeros((*q.shape[:2], latent), jnp.float32))
    _, total, acc = lax.fori_loop(0, blocks, body, start)
    # A row of length 0 has only weights of masked zeros: its acc is 0 whatever its total.
    out = acc / jnp.maximum(total, 1e-30)[..., None]
    if cache_scale is not None:
        out = out * cache_scale[0]
    return out.astype(q.dtype)


def dots(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """f32 [B, N, S], the products of queries [B, N, W] with keys [B, S, W]."""
    return jnp.einsum("bnw,bsw->bns", queries, keys, preferred_element_type=jnp.float32)
