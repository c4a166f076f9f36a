"""Prefill attention in plain XLA operations: query blocks, their rows, and each row's page blocks.

Three nested loops with dynamic trip counts: a block of tokens visits only the rows that it may
hold, and of each row only the pages up to the last position that the block attends to. No copy of
K/V is larger than one block of one row.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paging import MASKED, pad_table, pages_per_block, read_block

QUERY_BLOCK = 128  # tokens


def paged_prefill(
    q: jax.Array,
    cache: jax.Array,
    rows: jax.Array,
    positions: jax.Array,
    page_table: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """As `api.paged_prefill`; memory is [N, QUERY_BLOCK, block] scores and one block of K/V.

    Products are taken in the cache's dtype and summed in f32.
    """
    tokens, num_heads, head_dim = q.shape
    _, kv_heads, _, page_size, _ = cache.shape
    group = num_heads // kv_heads
    block = pages_per_block(page_size, page_table.shape[1])
    table = pad_table(page_table, block)
    queries = min(QUERY_BLOCK, tokens)
    pad = -tokens % queries
    rows = jnp.pad(rows, (0, pad), constant_values=-1)
    positions = jnp.pad(positions, (0, pad))
    grouped = jnp.pad(q.astype(cache.dtype), ((0, pad), (0, 0), (0, 0)))
    grouped = grouped.reshape(-1, kv_heads, group, head_dim).transpose(1, 2, 0, 3)  # [K, G, T, H]

    def query_block(i: jax.Array, out: jax.Array) -> jax.Array:
        at = i * queries
        q_i = lax.dynamic_slice_in_dim(grouped, at, queries, axis=2)
        q_i = q_i.reshape(kv_heads, group * queries, head_dim)  # Q below is G * queries
        rows_i = lax.dynamic_slice_in_dim(rows, at, queries)
        positions_i = lax.dynamic_slice_in_dim(positions, at, queries)

        def row(r: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            limits = jnp.where(rows_i == r, positions_i + 1, 0)  # what each token may see
            length = limits.max()
            limits = jnp.tile(limits, group)  # [Q]
            table_r = lax.dynamic_slice_in_dim(table, r, 1)

            def pages(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                top, total, acc = carry  # f32 [K, Q], [K, Q], [K, Q, H]
                ids = lax.dynamic_slice_in_dim(table_r, j * block, block, axis=1)
                k, v, _ = read_block(cache, ids, j * block, length[None])
                keys = j * block * page_size + jnp.arange(block * page_size)
                scores = jnp.einsum("kqh,ksh->kqs", q_i, k[0], preferred_element_type=jnp.float32)
                scores = jnp.where(keys < limits[:, None], scores * scale, MASKED)
                new_top = jnp.maximum(top, scores.max(-1))
                # A token that has seen nothing yet weighs masked keys by 1; what they add is
                # wiped by `decay` at its first real score.
                weights = jnp.exp(scores - new_top[..., None])
                decay = jnp.exp(top - new_top)
                part = jnp.einsum(
                    "kqs,ksh->kqh",
                    weights.astype(v.dtype),
                    v[0],
                    preferred_element_type=jnp.float32,
                )
                return new_top, total * decay + weights.sum(-1), acc * decay[..., None] + part

            blocks = (length + block * page_size - 1) // (block * page_size)
            return lax.fori_loop(0, blocks, pages, carry)

        live = rows_i >= 0
        first = jnp.where(live, rows_i, page_table.shape[0]).min()
        last = jnp.where(live, rows_i, -1).max()
        zeros = jnp.zeros(q_i.shape[:2], jnp.float32)
        start = (zeros + MASKED, zeros, jnp.zeros(q_i.shape, jnp.float32))
        _, total, acc = lax.fori_loop(first, last + 1, row, start)
        done = acc / jnp.maximum(total, 1e-30)[..., None]
        done = done.reshape(kv_heads, group, queries, head_dim).astype(out.dtype)
        done = jnp.where(live[:, None], done, 0)
        return lax.dynamic_update_slice_in_dim(out, done, at, axis=2)

    out = jnp.zeros(grouped.shape, q.dtype)
    out = lax.fori_loop(0, (tokens + pad) // queries, query_block, out)
    return out.transpose(2, 0, 1, 3).reshape(tokens + pad, num_heads, head_dim)[:tokens]
