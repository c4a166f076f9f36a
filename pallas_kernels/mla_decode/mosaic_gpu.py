"""Latent decode attention on Hopper: rows cut into pieces, one block of threads each, then merged.

Not run on hardware.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import mosaic, splitting
from pallas_kernels.f16_queries import to_f16
from pallas_kernels.mla_decode import block, kernel
from pallas_kernels.mla_decode.merging import merge

# So many blocks keep the processors evenly busy without cutting rows: two waves of them.
UNCUT_BLOCKS = 256
WIDEST = 576  # of latent and rotated part: shared memory holds 64 queries and 128 latents so wide
MOST_LATENT = 512  # f32 sums of 64 heads that the registers of two warpgroups hold


def supports(q: jax.Array, cache: jax.Array, latent: int) -> str | None:
    """Why the kernel does not take these operands of `api.mla_decode`; None if it does."""
    if q.dtype != jnp.bfloat16 or cache.dtype not in (jnp.bfloat16, jnp.uint8):
        return f"q {q.dtype} and cache {cache.dtype} are not bfloat16 and bfloat16 or uint8"
    _, page_size, width = cache.shape
    if latent % 128 or latent > MOST_LATENT:
        return f"latent {latent} is not a multiple of 128 up to {MOST_LATENT}"
    if width % 64 or width > WIDEST:
        return f"width {width} is not a multiple of 64 up to {WIDEST}"
    return mosaic.refuse_page(page_size)


def tile_heads(heads: int, quantized: bool) -> tuple[int, int]:
    """Into how many tiles the heads go, and how many heads each has, padding included.

    A block of threads takes one tile. The blocks of a piece's tiles are neighbours in the grid, so
    they run together, and all but the first find the latents in L2.
    """
    # Beside the bytes of an fp8 cache, shared memory has room for the queries of 32 heads.
    tiles = -(-heads // (block.FEW_HEADS if quantized else mosaic.TILE_ROWS))
    return tiles, -(-heads // (8 * tiles)) * 8


@functools.partial(jax.jit, static_argnames=("scale", "latent", "interpret", "cut"))
def mla_decode(
    q: jax.Array,
    cache: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    cache_scale: jax.Array | None = None,
    *,
    scale: float,
    latent: int,
    interpret: bool = False,
    cut: bool | None = None,
) -> jax.Array:
    """As `api.mla_decode`, of operands that `supports` takes.

    cut: whether rows may be cut into several pieces; None: unless the batch fills the device
    without. Beside what `cost` counts, cut rows (and those of an fp8 cache) move a result in f32 of
    [N, R] per piece, out and in again: some 6% of the bytes of a piece of 1024 tokens and 16 heads.
    """
    rows, heads, width = q.shape
    quantized = cache_scale is not None
    tiles, per_tile = tile_heads(heads, quantized)
    if cut is None:
        cut = rows * tiles < UNCUT_BLOCKS
    if cut:
        # A piece takes long in interpret mode, and there are no processors to fill.
        count = rows + 2 if interpret else splitting.num_pieces(rows, tiles, resident=1)
        pieces = splitting.cut(lengths, block.STEP, count)
    else:
        steps = (lengths + (block.STEP - 1)) // block.STEP
        each = jnp.arange(rows + 1, dtype=jnp.int32)
        whole = jnp.stack([each[:-1], jnp.zeros_like(steps), steps], axis=1)
        pieces = splitting.Pieces(whole, each)
    gains = jnp.ones((1, 1), jnp.float32)  # not read unless the cache is of bytes
    if cache_scale is not None:  # of keys here and of values in the result, not of all that is read
        scales = jnp.where(jnp.arange(width) < latent, cache_scale[0], cache_scale[1])
        q, gains = to_f16(q.astype(jnp.float32) * scales)
        gains = jnp.pad(gains, ((0, 0), (0, tiles * per_tile - heads)))
    shape = block.Shape(
        heads=per_tile,
        page_size=cache.shape[1],
        latent=latent,
        width=width,
        scale=scale,
        dtype=jnp.dtype(jnp.float32 if cut or quantized else jnp.bfloat16),
        quantized=quantized,
        interpret=interpret,
    )
    padded = jnp.pad(q.astype(shape.matmul_dtype), ((0, 0), (0, tiles * per_tile - heads), (0, 0)))
    count = len(pieces.ranges)
    parts, lse = mosaic.launch(
        functools.partial(kernel.body, shape),
        [
            jax.ShapeDtypeStruct((count, tiles * per_tile, latent), shape.dtype),
            jax.ShapeDtypeStruct((count, tiles * per_tile), jnp.float32),
        ],
        grid={"tile": tiles, "piece": count},
        scratch=block.scratch(shape),
        warpgroups=block.WARPGROUPS,
        reduction_bytes=block.REDUCTION_BYTES,
        name="mla_decode",
        interpret=interpret,
    )(padded, cache, page_table, lengths, pieces.ranges, gains)
    if cut or cache_scale is not None:
        gain = jnp.ones(1, jnp.float32) if cache_scale is None else cache_scale[:1]
        return merge(parts, lse, pieces.bounds, gain, heads=heads, interpret=interpret)
    return parts[:, :heads]
