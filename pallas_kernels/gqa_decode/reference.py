"""Decode attention written plainly: gather every page, mask, softmax. The truth for tests."""

import jax
import jax.numpy as jnp

from pallas_kernels.paging import MASKED, numbers


def gqa_decode(
    q: jax.Array,
    cache: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    cache_scale: jax.Array | None = None,
    *,
    scale: float,
) -> jax.Array:
    """As `api.gqa_decode`, in f32 throughout."""
    rows, num_heads, head_dim = q.shape
    _, kv_heads, _, page_size, _ = cache.shape
    tokens = page_table.shape[1] * page_size
    live = jnp.arange(tokens) < lengths[:, None]  # [B, S]
    cached = numbers(cache, jnp.float32)
    if cache_scale is not None:
        cached = cached * cache_scale[:, :, None, None]
    kv = cached[page_table].transpose(0, 2, 3, 1, 4, 5)
    kv = kv.reshape(rows, kv_heads, 2, tokens, head_dim)
    kv = jnp.where(live[:, None, None, :, None], kv, 0)
    grouped = q.astype(jnp.float32).reshape(rows, kv_heads, -1, head_dim)
    scores = jnp.einsum("bkgh,bksh->bkgs", grouped, kv[:, :, 0], precision="highest") * scale
    # MASKED, not -inf: a row of length 0 weighs its zeros evenly and gives 0, not NaN.
    weights = jax.nn.softmax(jnp.where(live[:, None, None, :], scores, MASKED))
    out = jnp.einsum("bkgs,bksh->bkgh", weights, kv[:, :, 1], precision="highest")
    return out.reshape(rows, num_heads, head_dim).astype(q.dtype)
