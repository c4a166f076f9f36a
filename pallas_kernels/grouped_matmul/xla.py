"""The grouped matmul as XLA has it: `lax.ragged_dot`.

On GPUs it becomes one dense product over all groups (docs/adr/0014); what is not for the kernel
should be small.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax


def grouped_matmul(x: jax.Array, weights: Sequence[jax.Array], sizes: jax.Array) -> jax.Array:
    """As `api.grouped_matmul`; rows past the last group are 0."""
    products = [lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32) for w in weights]
    y = products[0] if len(products) == 1 else jax.nn.silu(products[0]) * products[1]
    return y.astype(x.dtype)
