"""Latent prefill attention on Hopper: windows of keys are decompressed, a kernel attends to each.

The keys that the batch sees, row after row, are cut into windows of a bounded number of keys. Of
each window the latents are gathered and made into plain keys and values, once for all the tokens,
by a matmul that ends where the keys do; `window.attend` then gives what every token sees of it, and
windows are merged by their log-sum-exps. docs/adr/0013 says why decompressed and what it costs. Not
run on hardware.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul.mosaic_gpu import grouped_matmul
from pallas_kernels.mla_prefill.window import KEY_BLOCK, QUERY_BLOCK, attend, shared_bytes
from pallas_kernels.mosaic import SHARED_LIMIT
from pallas_kernels.splitting import PROCESSORS

# Keys of a window: many enough that merging windows costs little beside attending (16 KiB of
# traffic per token and window of 16 heads against 84 MFLOP), and no more than fit the bytes for
# plain keys and values.
WINDOW_KEYS, WINDOW_BYTES = 8192, 256 << 20

Parts = list[tuple[jax.Array, jax.Array]]  # outputs f32 [T, N*Hv] and log-sum-exps f32 [N, T]


def supports(
    q: jax.Array, cache: jax.Array, w_uk: jax.Array, w_uv: jax.Array, scale: float
) -> str | None:
    """Why the kernel does not take these operands of `api.mla_prefill`; None if it does."""
    for name, array in (("q", q), ("cache", cache), ("w_uk", w_uk), ("w_uv", w_uv)):
        if array.dtype != jnp.bfloat16:
            return f"{name} is {array.dtype}, not bfloat16"
    nope, v_dim = w_uk.shape[1], w_uv.shape[1]
    rotated = q.shape[2] - nope
    for name, width in (("Hn", nope), ("C", rotated), ("Hv", v_dim), ("R", w_uk.shape[2])):
        if width % 64 or not width:
            return f"{name} = {width} is not a multiple of 64"
    needed = shared_bytes(nope, rotated, v_dim) + 4096  # log-sum-exps, reductions and barriers
    if needed > SHARED_LIMIT:
        widths = f"Hn + C = {nope} + {rotated} and Hv = {v_dim}"
        return f"{widths} need {needed} bytes of shared memory, of {SHARED_LIMIT}"
    if scale <= 0:
        return f"scale {scale} is not positive"
    return None


# One trace and one function in the program for all layers of a model.
@functools.partial(jax.jit, static_argnames=("scale", "interpret", "window_keys", "splits"))
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
    interpret: bool = False,
    window_keys: int = WINDOW_KEYS,
    splits: int | None = None,
) -> jax.Array:
    """As `api.mla_prefill`, for what `supports` takes.

    Memory is twice the result in f32, and the keys and values of one window of at most
    `window_keys` keys (a multiple of 128), cut into `splits` parts, by default as many as give all
    processors work, of which each has one block at a time. Plain keys and values are rounded to
    bf16, as published.
    """
    tokens, heads, width = q.shape
    nope, latent = w_uk.shape[1:]
    v_dim, num_rows, page_size = w_uv.shape[1], page_table.shape[0], cache.shape[1]
    pad = -tokens % QUERY_BLOCK
    q = jnp.pad(q, ((0, pad), (0, 0), (0, 0))).reshape(-1, heads * width)
    positions = jnp.pad(positions, (0, pad))
    rows = jnp.pad(rows, (0, pad), constant_values=-1)

    sees = jnp.where(rows[:, None] == jnp.arange(num_rows), positions[:, None] + 1, 0)
    limits = sees.reshape(-1, QUERY_BLOCK, num_rows).max(1)  # [T/128, R]
    lengths = limits.max(0)
    ends = jnp.cumsum(-(-lengths // KEY_BLOCK))  # in blocks: every row begins a new one
    first = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])

    most = num_rows * -(-page_table.shape[1] * page_size // KEY_BLOCK)  # blocks of full rows
    per_key = heads * (nope + v_dim) * q.dtype.itemsize
    blocks = max(1, min(window_keys, WINDOW_BYTES // per_key) // KEY_BLOCK)
    blocks = min(blocks, most)
    if splits is None:
        splits = max(1, min(PROCESSORS // (heads * len(limits)), blocks))
    weights = jnp.concatenate([w_uk, w_uv], axis=1).reshape(1, -1, latent).swapaxes(1, 2)
    decompress = functools.partial(grouped_matmul, interpret=interpret)

    def window(at: jax.Array) -> Parts:
        """What the tokens see of the blocks at, at + 1, ...: outputs and log-sum-exps."""
        block = at + jnp.arange(blocks)
        row = jnp.minimum(jnp.sum(ends <= block[:, None], axis=1), num_rows - 1)
        position = (block - first[row])[:, None] * KEY_BLOCK + jnp.arange(KEY_BLOCK)
        live = (position < lengths[row][:, None]).reshape(-1)
        page = page_table.at[row[:, None], position // page_size].get(mode="clip")
        kept = cache.at[page, position % page_size].get(mode="clip").reshape(-1, cache.shape[2])
        kept = jnp.where(live[:, None], kept, 0)  # not a product with a NaN
        # Blocks past the last one keep what memory held: no token's limit reaches them.
        held = jnp.clip(ends[-1:] - at, 0, blocks) * KEY_BLOCK
        plain = decompress(kept[:, :latent], (weights,), held)  # [W, N*(Hn+Hv)]
        outs, lses = attend(
            *(q, plain, kept[:, latent:], limits, (first - at) * KEY_BLOCK, rows, positions),
            heads=heads,
            v_dim=v_dim,
            splits=splits,
            scale=scale,
            interpret=interpret,
        )
        return list(zip(outs, lses, strict=True))

    # A loop whose trip count the device knows has the host wait for it, so the first window, of
    # which there always is something, stands before the loop: one wait for most prompts.
    seen = _merged(window(jnp.int32(0)))
    if blocks < most:
        seen = lax.fori_loop(
            *(1, -(-ends[-1] // blocks)),
            lambda i, seen: _merged([seen, *window(i * blocks)]),
            seen,
        )
    out, _ = seen
    out = jnp.where(rows[:, None] >= 0, out, 0).astype(q.dtype)
    return out.reshape(len(rows), heads, -1)[:tokens]


def _merged(parts: Parts) -> tuple[jax.Array, jax.Array]:
    """One output f32 [T, N*Hv] and log-sum-exp f32 [N, T] of several, seen apart."""
    top = functools.reduce(jnp.maximum, (lse for _, lse in parts))
    shares = [jnp.exp2(lse - top) for _, lse in parts]
    total = functools.reduce(jnp.add, shares)
    scaled = (
        out.reshape(*share.T.shape, -1) * (share / total).T[..., None]
        for (out, _), share in zip(parts, shares, strict=True)
    )
    out = functools.reduce(jnp.add, scaled)
    return out.reshape(parts[0][0].shape), top + jnp.log2(total)
