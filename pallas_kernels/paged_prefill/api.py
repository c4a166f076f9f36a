"""The prefill operation: shapes, checks, choice of back end."""

import functools

import jax

from pallas_kernels.dispatch import AUTO, check_paged, dispatch
from pallas_kernels.paged_prefill import reference, xla


def paged_prefill(
    q: jax.Array,
    cache: jax.Array,
    rows: jax.Array,
    positions: jax.Array,
    page_table: jax.Array,
    *,
    scale: float,
    backend: str = AUTO,
) -> jax.Array:
    """Causal attention of a flat batch of tokens, the chunk's own K/V being in the pages already.

    q [T, N, H]; cache [P, K, 2, Z, H] with N a multiple of K; rows [T] i32, the row of page_table
    [R, W] that token t belongs to, negative for padding; positions [T] i32. Token t attends to
    positions 0..positions[t] of its row. Returns [T, N, H] in q's dtype; padding gives zeros. Any
    order of tokens is right; tokens of one row side by side are fast. Softmax in f32. What lies
    past the last attended position of a row, NaN included, never reaches a result. Works on local
    shards inside a shard_map. Raises ValueError for shapes that do not fit and for an unknown back
    end.
    """
    check_paged(q, cache, page_table)
    if rows.shape != q.shape[:1] or positions.shape != q.shape[:1]:
        raise ValueError(
            f"q {q.shape}, rows {rows.shape} and positions {positions.shape} differ in tokens"
        )
    backends = {
        "reference": functools.partial(reference.paged_prefill, scale=scale),
        "xla": functools.partial(xla.paged_prefill, scale=scale),
    }
    return dispatch(backend, backends, (q, cache, rows, positions, page_table))
