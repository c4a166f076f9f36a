"""Latent decode attention in plain XLA operations: blocks of pages with an online softmax.

The trip count follows the longest row, so a step costs what its batch holds, not what the page
table could hold.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paging import MASKED, pad_table, pages_per_block, read_latent_block


def mla_decode(
    q: jax.Array,
    cache: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    latent: int,
) -> jax.Array:
    """As `api.mla_decode`; memory is one block of latents for all rows.

    Products are taken in the cache's dtype and summed in f32: all heads share a latent, so that
    even one row is a matrix product, which a CPU does up to four times faster in bf16.
    """
    page_size = cache.shape[1]
    block = pages_per_block(page_size, page_table.shape[1])
    table = pad_table(page_table, block)
    queries = q.astype(cache.dtype)

    def body(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, acc = carry  # f32 [B, N], [B, N], [B, N, R]
        pages = lax.dynamic_slice_in_dim(table, i * block, block, axis=1)
        rows, live = read_latent_block(cache, pages, i * block, lengths)
        scores = jnp.einsum("bnw,bsw->bns", queries, rows, preferred_element_type=jnp.float32)
        scores = jnp.where(live[:, None], scores * scale, MASKED)
        new_top = jnp.maximum(top, scores.max(-1))
        weights = jnp.exp(scores - new_top[..., None])
        decay = jnp.exp(top - new_top)
        part = jnp.einsum(
            "bns,bsr->bnr",
            weights.astype(rows.dtype),
            rows[..., :latent],
            preferred_element_type=jnp.float32,
        )
        return new_top, total * decay + weights.sum(-1), acc * decay[..., None] + part

    blocks = (lengths.max() + block * page_size - 1) // (block * page_size)
    zeros = jnp.zeros(q.shape[:2], jnp.float32)
    start = (zeros + MASKED, zeros, jnp.zeros((*q.shape[:2], latent), jnp.float32))
    _, total, acc = lax.fori_loop(0, blocks, body, start)
    # A row of length 0 has only weights of masked zeros: its acc is 0 whatever its total.
    return (acc / jnp.maximum(total, 1e-30)[..., None]).astype(q.dtype)
