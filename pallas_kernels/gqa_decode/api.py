"""The decode operation: shapes, checks, choice of back end."""

import functools

import jax

from pallas_kernels.dispatch import (
    AUTO,
    CACHED,
    INDICES,
    check_factor,
    check_paged,
    check_scale,
    dispatch,
    operand,
)
from pallas_kernels.gqa_decode import mosaic_gpu, reference, xla


def gqa_decode(
    q: jax.Array,
    cache: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    cache_scale: jax.Array | None = None,
    backend: str = AUTO,
) -> jax.Array:
    """Attention of one token per row to its first `lengths` cached tokens.

    q [B, N, H]; cache [P, K, 2, Z, H] with N a multiple of K: query head n reads KV head
    n // (N/K); page_table [B, W] i32; lengths [B] i32, at most W*Z. q and cache are bf16, f16 or
    f32, and numpy arrays are taken as JAX's. A cache of uint8 holds e4m3 numbers (float8_e4m3fn)
    and needs cache_scale f32 [K, 2]: a number of KV head k is its e4m3 value times
    cache_scale[k, 0] in K, cache_scale[k, 1] in V.

    Returns [B, N, H] in q's dtype; a row of length 0 gives zeros. Softmax in f32. What lies in
    pages or offsets past a row's length, NaN included, never reaches a result, and entries of
    page_table past it may be anything. Works on local shards inside a shard_map.

    Back ends: "reference", "xla", "mosaic_gpu" (Hopper; q bf16, cache bf16 or uint8, head dims 64
    and 128, pages of 8, 16, 24, ... 128 tokens), "mosaic_interpret" (that kernel on a CPU). "auto"
    is "mosaic_gpu" in programs for CUDA if it takes the operands, else "xla".

    Raises ValueError for shapes that do not fit or are empty, other dtypes, a scale that is traced
    or not finite, a cache_scale without a uint8 cache or the reverse, an unknown back end, and one
    that does not take the operands.
    """
    q, cache = operand("q", q), operand("cache", cache, CACHED)
    page_table = operand("page_table", page_table, INDICES)
    lengths = operand("lengths", lengths, INDICES)
    check_factor("scale", scale)
    check_paged(q, cache, page_table)
    if page_table.shape[0] != q.shape[0] or lengths.shape != q.shape[:1]:
        raise ValueError(
            f"q {q.shape}, page_table {page_table.shape} and lengths {lengths.shape} differ in rows"
        )
    scales = check_scale(cache, cache_scale, (cache.shape[1], 2))
    backends = {
        "reference": functools.partial(reference.gqa_decode, scale=scale),
        "xla": functools.partial(xla.gqa_decode, scale=scale),
        "mosaic_gpu": functools.partial(mosaic_gpu.gqa_decode, scale=scale),
        "mosaic_interpret": functools.partial(mosaic_gpu.gqa_decode, scale=scale, interpret=True),
    }
    operands = (q, cache, page_table, lengths, *scales)
    return dispatch(backend, backends, operands, mosaic_gpu.supports(q, cache, scale))
