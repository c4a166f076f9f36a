"""Prefill attention written plainly: every token gathers its row's pages. The truth for tests."""

import jax
import jax.numpy as jnp

from pallas_kernels.gqa_decode import reference as decode_reference


def paged_prefill(
    q: jax.Array,
    cache: jax.Array,
    rows: jax.Array,
    positions: jax.Array,
    page_table: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """As `api.paged_prefill`: each token is a decode row of length position + 1. Small T only."""
    table = page_table[jnp.maximum(rows, 0)]
    lengths = jnp.where(rows >= 0, positions + 1, 0)
    return decode_reference.gqa_decode(q, cache, table, lengths, scale=scale)
