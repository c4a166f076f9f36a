"""The decode operation: shapes, checks, choice of back end."""

import functools

import jax

from pallas_kernels.dispatch import AUTO, check_paged, dispatch
from pallas_kernels.gqa_decode import reference, xla


def gqa_decode(
    q: jax.Array,
    cache: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    backend: str = AUTO,
) -> jax.Array:
    """Attention of one token per row to its first `lengths` cached tokens.

    q [B, N, H]; cache [P, K, 2, Z, H] with N a multiple of K: query head n reads KV head
    n // (N/K); page_table [B, W] i32; lengths [B] i32, at most W*Z. Returns [B, N, H] in q's dtype;
    a row of length 0 gives zeros. Softmax in f32. What lies in pages or offsets past a row's
    length, NaN included, never reaches a result. Works on local shards inside a shard_map. Raises
    ValueError for shapes that do not fit and for an unknown back end.
    """
    check_paged(q, cache, page_table)
    if page_table.shape[0] != q.shape[0] or lengths.shape != q.shape[:1]:
        raise ValueError(
            f"q {q.shape}, page_table {page_table.shape} and lengths {lengths.shape} differ in rows"
        )
    backends = {
        "reference": functools.partial(reference.gqa_decode, scale=scale),
        "xla": functools.partial(xla.gqa_decode, scale=scale),
    }
    return dispatch(backend, backends, (q, cache, page_table, lengths))
