"""The prefill operation: shapes, checks, choice of back end."""

import functools

import jax

from pallas_kernels.dispatch import AUTO, INDICES, check_factor, check_paged, dispatch, operand
from pallas_kernels.paged_prefill import mosaic_gpu, reference, xla


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
    [R, W] that token t belongs to, negative for padding; positions [T] i32. q and cache are bf16,
    f16 or f32; numpy arrays are taken as JAX's. Token t attends to positions 0..positions[t] of its
    row. Returns [T, N, H] in q's dtype; padding gives zeros. Any order of tokens is right; tokens
    of one row side by side are fast, and fastest in the order of their positions. Softmax in f32.
    What lies past the last attended position of a row, NaN included, never reaches a result, and
    entries of page_table past it may be anything. Works on local shards inside a shard_map.

    Back ends: "reference", "xla", "mosaic_gpu" (Hopper; bf16, head dims 64 and 128, pages of 8, 16,
    24, ... 128 tokens, up to 128 query heads per KV head), "mosaic_interpret" (that kernel on a
    CPU). "auto" is "mosaic_gpu" in programs for CUDA if it takes the operands, else "xla".

    Raises ValueError for shapes that do not fit or are empty, other dtypes (a uint8 cache is for
    decoding alone), a scale that is traced or not finite, an unknown back end, and one that does
    not take the operands.
    """
    q, cache = operand("q", q), operand("cache", cache)
    rows, positions = operand("rows", rows, INDICES), operand("positions", positions, INDICES)
    page_table = operand("page_table", page_table, INDICES)
    check_factor("scale", scale)
    check_paged(q, cache, page_table)
    if rows.shape != q.shape[:1] or positions.shape != q.shape[:1]:
        raise ValueError(
            f"q {q.shape}, rows {rows.shape} and positions {positions.shape} differ in tokens"
        )
    backends = {
        "reference": functools.partial(reference.paged_prefill, scale=scale),
        "xla": functools.partial(xla.paged_prefill, scale=scale),
        "mosaic_gpu": functools.partial(mosaic_gpu.paged_prefill, scale=scale),
        "mosaic_interpret": functools.partial(
            mosaic_gpu.paged_prefill, scale=scale, interpret=True
        ),
    }
    operands = (q, cache, rows, positions, page_table)
    return dispatch(backend, backends, operands, mosaic_gpu.supports(q, cache, scale))
