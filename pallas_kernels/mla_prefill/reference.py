"""Latent prefill attention written plainly: decompress every page, mask, softmax.

The truth for tests, of few tokens: each gathers its row's pages.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.paging import MASKED


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
) -> jax.Array:
    """As `api.mla_prefill`, in f32 throughout."""
    q, cache, w_uk, w_uv, dtype = *(a.astype(jnp.float32) for a in (q, cache, w_uk, w_uv)), q.dtype
    _, nope, latent = w_uk.shape
    lengths = jnp.where(rows >= 0, positions + 1, 0)  # [T]

    def token(q_t: jax.Array, row: jax.Array, length: jax.Array) -> jax.Array:
        kept = cache[page_table[row]].reshape(-1, cache.shape[2])  # [S, R+C]
        live = jnp.arange(len(kept)) < length
        kept = jnp.where(live[:, None], kept, 0)
        keys = jnp.einsum("sr,nhr->nsh", kept[:, :latent], w_uk, precision="highest")
        values = jnp.einsum("sr,nhr->nsh", kept[:, :latent], w_uv, precision="highest")
        scores = jnp.einsum("nh,nsh->ns", q_t[:, :nope], keys, precision="highest")
        scores += jnp.einsum("nc,sc->ns", q_t[:, nope:], kept[:, latent:], precision="highest")
        # MASKED, not -inf: padding weighs its zeros evenly and gives 0, not NaN.
        weights = jax.nn.softmax(jnp.where(live, scores * scale, MASKED))
        return jnp.einsum("ns,nsh->nh", weights, values, precision="highest")

    return jax.lax.map(lambda t: token(*t), (q, jnp.maximum(rows, 0), lengths)).astype(dtype)
