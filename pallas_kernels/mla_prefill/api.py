"""The latent prefill operation: shapes, checks, choice of back end."""

import functools

import jax

from pallas_kernels.dispatch import AUTO, INDICES, check_factor, check_latent, dispatch, operand
from pallas_kernels.mla_prefill import mosaic_gpu, reference, xla


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
    backend: str = AUTO,
) -> jax.Array:
    """Causal attention of a flat batch, over keys and values decompressed from cached latents.

    q [T, N, Hn+C], the part without position and its rotated part behind it; cache [P, Z, R+C],
    each row a normed latent and the rotated key that all heads share, the chunk's own being in the
    pages already; rows [T] i32, the row of page_table [B, W] that token t belongs to, negative for
    padding; positions [T] i32; w_uk [N, Hn, R] and w_uv [N, Hv, R]. What is not i32 is bf16, f16 or
    f32; numpy arrays are taken as JAX's. Head n reads keys [w_uk[n] . latent ; rotated key] and
    values w_uv[n] . latent (DeepSeek-V2, arXiv:2405.04434, section 2.1). Token t attends to
    positions 0..positions[t] of its row. Returns [T, N, Hv] in q's dtype; padding gives zeros. Any
    order of tokens is right; tokens of one row side by side are fast. Softmax in f32. What lies
    past the last attended position of a row, NaN included, never reaches a result. Works on local
    shards of any number of heads inside a shard_map.

    Back ends: "reference", "xla", "mosaic_gpu" (Hopper; bf16, Hn, C, Hv and R multiples of 64
    that shared memory has room for, as it has for DeepSeek-V3's 128, 64, 128 and 512; scale > 0),
    "mosaic_interpret" (that kernel on a CPU). "auto" is "mosaic_gpu" in programs for CUDA if it
    takes the operands, else "xla".

    Raises ValueError for shapes that do not fit or are empty, other dtypes (a uint8 cache is for
    decoding alone), a scale that is traced or not finite, an unknown back end, and one that does
    not take the operands.
    """
    q, cache = operand("q", q), operand("cache", cache)
    rows, positions = operand("rows", rows, INDICES), operand("positions", positions, INDICES)
    page_table = operand("page_table", page_table, INDICES)
    w_uk, w_uv = operand("w_uk", w_uk), operand("w_uv", w_uv)
    check_factor("scale", scale)
    check_latent(q, cache, page_table)
    if w_uk.ndim != 3 or w_uv.ndim != 3:
        raise ValueError(
            f"expected w_uk [N, Hn, R], w_uv [N, Hv, R]; got {w_uk.shape}, {w_uv.shape}"
        )
    heads, nope, latent = w_uk.shape
    if heads != q.shape[1] or w_uv.shape[::2] != (heads, latent):
        raise ValueError(
            f"w_uk {w_uk.shape} [N, Hn, R] and w_uv {w_uv.shape} [N, Hv, R] do not fit q {q.shape} "
            f"[T, N, Hn+C]: N and R must be equal"
        )
    rotated = q.shape[2] - nope
    if rotated < 0 or cache.shape[2] != latent + rotated:
        raise ValueError(
            f"cache {cache.shape} [P, Z, R+C] does not fit q {q.shape} [T, N, Hn+C] and w_uk "
            f"{w_uk.shape} [N, Hn, R]: its rows must be R + C = {latent} + {rotated} wide"
        )
    if rows.shape != q.shape[:1] or positions.shape != q.shape[:1]:
        raise ValueError(
            f"q {q.shape}, rows {rows.shape} and positions {positions.shape} differ in tokens"
        )
    kernel = functools.partial(mosaic_gpu.mla_prefill, scale=scale)
    backends = {
        "reference": functools.partial(reference.mla_prefill, scale=scale),
        "xla": functools.partial(xla.mla_prefill, scale=scale),
        "mosaic_gpu": kernel,
        "mosaic_interpret": functools.partial(kernel, interpret=True),
    }
    unsupported = mosaic_gpu.supports(q, cache, w_uk, w_uv, scale)
    operands = (q, cache, rows, positions, page_table, w_uk, w_uv)
    return dispatch(backend, backends, operands, unsupported)
