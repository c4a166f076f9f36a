"""Latent decode attention written plainly: gather all pages, mask, softmax. The truth for tests."""

import jax
import jax.numpy as jnp

from pallas_kernels.paging import MASKED, numbers


def mla_decode(
    q: jax.Array,
    cache: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    cache_scale: jax.Array | None = None,
    *,
    scale: float,
    latent: int,
) -> jax.Array:
    """As `api.mla_decode`, in f32 throughout."""
    width = cache.shape[2]
    cached = numbers(cache, jnp.float32)
    if cache_scale is not None:
        cached = cached * jnp.where(jnp.arange(width) < latent, cache_scale[0], cache_scale[1])
    rows = cached[page_table].reshape(len(q), -1, width)  # [B, S, R+C]
    live = jnp.arange(rows.shape[1]) < lengths[:, None]  # [B, S]
    rows = jnp.where(live[..., None], rows, 0)
    scores = jnp.einsum("bnw,bsw->bns", q.astype(jnp.float32), rows, precision="highest") * scale
    # MASKED, not -inf: a row of length 0 weighs its zeros evenly and gives 0, not NaN.
    weights = jax.nn.softmax(jnp.where(live[:, None], scores, MASKED))
    out = jnp.einsum("bns,bsr->bnr", weights, rows[..., :latent], precision="highest")
    return out.astype(q.dtype)
