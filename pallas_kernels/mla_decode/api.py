"""The latent decode operation: shapes, checks, choice of back end."""

import functools

import jax

from pallas_kernels.dispatch import (
    AUTO,
    CACHED,
    INDICES,
    check_factor,
    check_latent,
    check_scale,
    dispatch,
    operand,
)
from pallas_kernels.mla_decode import mosaic_gpu, reference, xla


def mla_decode(
    q: jax.Array,
    cache: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    latent: int,
    cache_scale: jax.Array | None = None,
    backend: str = AUTO,
) -> jax.Array:
    """Absorbed attention of one token per row to its first `lengths` cached latents.

    q [B, N, R+C], the query already projected into the latent space and its rotated part behind it;
    cache [P, Z, R+C], each row a normed latent and the rotated key that all heads share; page_table
    [B, W] i32; lengths [B] i32, at most W*Z; latent is R. q and cache are bf16, f16 or f32, and
    numpy arrays are taken as JAX's. A cache of uint8 holds e4m3 numbers (float8_e4m3fn) and needs
    cache_scale f32 [2]: a number is its e4m3 value times cache_scale[0] in the latent part, times
    cache_scale[1] in the rotated part.

    Returns [B, N, R] in q's dtype: the average of the rows' first R values under softmax(scale *
    q . row), which the caller projects to the head's values; with that it equals attention over
    decompressed keys and values (DeepSeek-V2, arXiv:2405.04434, section 2.1 and appendix C). A row
    of length 0 gives zeros. Softmax in f32. What lies in pages or offsets past a row's length, NaN
    included, never reaches a result, and entries of page_table past it may be anything. Works on
    local shards of any number of heads inside a shard_map.

    Back ends: "reference", "xla", "mosaic_gpu" (Hopper; q bf16, cache bf16 or uint8, R a multiple
    of 128 up to 512, R+C one of 64 up to 576, pages of 8, 16, 24, ... 128 tokens),
    "mosaic_interpret" (that kernel on a CPU). "auto" is "mosaic_gpu" in programs for CUDA if it
    takes the operands, else "xla".

    Raises ValueError for shapes that do not fit or are empty, other dtypes, a scale that is traced
    or not finite, a cache_scale without a uint8 cache or the reverse, an unknown back end, and one
    that does not take the operands.
    """
    q, cache = operand("q", q), operand("cache", cache, CACHED)
    page_table = operand("page_table", page_table, INDICES)
    lengths = operand("lengths", lengths, INDICES)
    check_factor("scale", scale)
    check_latent(q, cache, page_table)
    if q.shape[2] != cache.shape[2] or not 0 < latent <= cache.shape[2]:
        raise ValueError(
            f"q {q.shape} and latent {latent} do not fit cache {cache.shape}: q and cache must be "
            f"equally wide, and latent between 1 and that width"
        )
    if page_table.shape[0] != q.shape[0] or lengths.shape != q.shape[:1]:
        raise ValueError(
            f"q {q.shape}, page_table {page_table.shape} and lengths {lengths.shape} differ in rows"
        )
    scales = check_scale(cache, cache_scale, (2,))
    kernel = functools.partial(mosaic_gpu.mla_decode, scale=scale, latent=latent)
    backends = {
        "reference": functools.partial(reference.mla_decode, scale=scale, latent=latent),
        "xla": functools.partial(xla.mla_decode, scale=scale, latent=latent),
        "mosaic_gpu": kernel,
        "mosaic_interpret": functools.partial(kernel, interpret=True),
    }
    operands = (q, cache, page_table, lengths, *scales)
    return dispatch(backend, backends, operands, mosaic_gpu.supports(q, cache, latent))
