"""Latent prefill attention in plain XLA operations: rows, each row's page blocks, its query blocks.

A page block is decompressed once per row and step, and every token of the row that may see it reads
it then; the online softmax of all tokens is therefore the carry. All trip counts are dynamic: a row
without tokens costs nothing, a row with few of them costs their query blocks alone, and no block
lies wholly past what is attended to.

Why decompressed and not absorbed: per head and pair of a query and a key, decompressed attention
multiplies Hn + C + Hv values, absorbed attention 2R + C; decompression adds R * (Hn + Hv) per key
and head, shared by the Q tokens of the row. For Hn = Hv = 128, C = 64, R = 512 that is
320 + 131072/Q against 1088 (+ 131072 per query, shared by its keys): decompression wins from
Q = 171 tokens per row and step on, and whenever most of a row's keys are the chunk's own; it loses
for short chunks far into a prompt. Being three quarters of the work at Q = 128, it must not be done
again for every query block. It is also the published form, so that bf16 rounds as it does there.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paging import MASKED, pad_table, pages_per_block, read_latent_block

# Tokens of one row that are taken together, from the row's own first token on, so that a batch of
# short rows wastes little. On a CPU, 64 took up to 1.6 times as long for eight rows of 8 to 32
# tokens, and 0.7 to 0.9 times as long for one row of 1,024.
QUERY_BLOCK = 32


def mla_prefill(
    q: jax.Array,
    cache: jax.Array,
    rows: jax.Array,
    positions: jax.Array,
    page_table: jax.Array,
    w_uk: jax.Array,
    w_uv: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """As `api.mla_prefill`; memory is the result in f32 and one block of keys and values.

    Products are taken in the cache's dtype and summed in f32.
    """
    tokens, heads, _ = q.shape
    page_size, width = cache.shape[1:]
    v_dim, latent = w_uv.shape[1:]
    block = pages_per_block(page_size, page_table.shape[1])
    table = pad_table(page_table, block)
    span = block * page_size  # keys per block
    queries = min(QUERY_BLOCK, tokens)
    # Both as [N*H, R]: then a block is decompressed by one plain matmul, heads first, keys last.
    w_k = w_uk.astype(cache.dtype).reshape(-1, latent)
    w_v = w_uv.astype(cache.dtype).reshape(-1, latent)
    # A query block may begin at any token, so it may reach past the end.
    rows = jnp.pad(rows, (0, queries), constant_values=-1)
    positions = jnp.pad(positions, (0, queries))
    q_heads = jnp.pad(q.astype(cache.dtype), ((0, queries), (0, 0), (0, 0))).transpose(1, 0, 2)
    padded = tokens + queries

    def decompress(w: jax.Array, latents: jax.Array) -> jax.Array:  # [N*H, R], [S, R] -> [N, H, S]
        out = jnp.einsum("xr,sr->xs", w, latents, preferred_element_type=jnp.float32)
        return out.astype(cache.dtype).reshape(heads, -1, span)

    def row(r: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        limits = jnp.where(rows == r, positions + 1, 0)  # what each token may see of this row
        length = limits.max()
        end = jnp.where(limits > 0, jnp.arange(padded) + 1, 0).max()
        table_r = lax.dynamic_slice_in_dim(table, r, 1)

        def pages(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            ids = lax.dynamic_slice_in_dim(table_r, j * block, block, axis=1)
            (latents,), (rotated,), _ = read_latent_block(
                cache, ids, j * block, length[None], latent
            )
            shared = jnp.broadcast_to(rotated.T, (heads, width - latent, span))
            k = jnp.concatenate([decompress(w_k, latents), shared], axis=1)
            v = decompress(w_v, latents)
            keys = j * span + jnp.arange(span)
            first = jnp.argmax(limits > j * span)  # the first token that sees any of these keys

            def query_block(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                at = first + i * queries
                q_i = lax.dynamic_slice_in_dim(q_heads, at, queries, axis=1)
                limits_i = lax.dynamic_slice_in_dim(limits, at, queries)
                top, total, acc = (lax.dynamic_slice_in_dim(a, at, queries, 1) for a in carry)
                scores = jnp.einsum("nqh,nhs->nqs", q_i, k, preferred_element_type=jnp.float32)
                scores = jnp.where(keys < limits_i[:, None], scores * scale, MASKED)
                new_top = jnp.maximum(top, scores.max(-1))
                # A token that has seen nothing yet weighs masked keys by 1; what they add is
                # wiped by `decay` at its first real score.
                weights = jnp.exp(scores - new_top[..., None])
                decay = jnp.exp(top - new_top)
                part = jnp.einsum(
                    "nqs,nhs->nqh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
                )
                done = (new_top, total * decay + weights.sum(-1), acc * decay[..., None] + part)
                pairs = zip(carry, done, strict=True)
                return tuple(lax.dynamic_update_slice_in_dim(a, b, at, 1) for a, b in pairs)

            return lax.fori_loop(0, (end - first + queries - 1) // queries, query_block, carry)

        return lax.fori_loop(0, (length + span - 1) // span, pages, carry)

    live = rows >= 0
    first = jnp.where(live, rows, page_table.shape[0]).min()
    zeros = jnp.zeros((heads, padded), jnp.float32)  # the softmax's top and total, [N, T]
    start = (zeros + MASKED, zeros, jnp.zeros((heads, padded, v_dim), jnp.float32))
    _, total, acc = lax.fori_loop(first, rows.max() + 1, row, start)
    out = acc / jnp.maximum(total, 1e-30)[..., None]
    out = jnp.where(live[:, None], out, 0).astype(q.dtype)
    return out.transpose(1, 0, 2)[:tokens]
