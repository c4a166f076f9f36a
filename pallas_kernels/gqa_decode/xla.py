"""Decode attention in plain XLA operations: a loop over blocks of pages with an online softmax.

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
    read_block,
)


def gqa_decode(
    q: jax.Array,
    cache: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    cache_scale: jax.Array | None = None,
    *,
    scale: float,
) -> jax.Array:
    """As `api.gqa_decode`; memory is one block of K/V for all rows.

    Products are taken in `product_dtype` and summed in f32: a block of 16-bit numbers is half of
    one in f32 to copy and to read, even where so few rows gain nothing in the products themselves.
    """
    rows, num_heads, head_dim = q.shape
    _, kv_heads, _, page_size, _ = cache.shape
    block = pages_per_block(page_size, page_table.shape[1])
    table = pad_table(page_table, block)
    dtype = product_dtype(q, cache)
    grouped = q.astype(dtype).reshape(rows, kv_heads, num_heads // kv_heads, head_dim)
    factor = scale  # of the scores: a scaled query would no longer be a 16-bit number
    if cache_scale is not None:  # K's here and V's in the result, not every number's that is read
        factor = scale * cache_scale[:, 0, None, None]

    def body(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, acc = carry  # [B, K, G], [B, K, G], [B, K, G, H]
        pages = lax.dynamic_slice_in_dim(table, i * block, block, axis=1)
        k, v, live = read_block(cache, pages, i * block, lengths)
        k, v = numbers(k, dtype), numbers(v, dtype)
        scores = jnp.einsum("bkgh,bksh->bkgs", grouped, k, preferred_element_type=jnp.float32)
        scores = jnp.where(live[:, None, None, :], scores * factor, MASKED)
        new_top = jnp.maximum(top, scores.max(-1))
        weights = jnp.exp(scores - new_top[..., None])
        decay = jnp.exp(top - new_top)
        part = jnp.einsum(
            "bkgs,bksh->bkgh", weights.astype(dtype), v, preferred_element_type=jnp.float32
        )
        return new_top, total * decay + weights.sum(-1), acc * decay[..., None] + part

    blocks = (lengths.max() + block * page_size - 1) // (block * page_size)
    zeros = jnp.zeros(grouped.shape[:-1], jnp.float32)
    start = (zeros + MASKED, zeros, jnp.zeros(grouped.shape, jnp.float32))
    _, total, acc = lax.fori_loop(0, blocks, body, start)
    # A row of length 0 has only weights of masked zeros: its acc is 0 whatever its total.
    out = acc / jnp.maximum(total, 1e-30)[..., None]
    if cache_scale is not None:
        out = out * cache_scale[:, 1, None, None]
    return out.reshape(rows, num_heads, head_dim).astype(q.dtype)
