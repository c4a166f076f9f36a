"""Queries in f16, as the decode kernels take them beside an fp8 cache, whatever their size."""

import jax
import jax.numpy as jnp
from jax import lax

# Exponents of f32 are stored with this added, above 23 bits of mantissa.
BIAS, MANTISSA = 127, 23
TOP = 14  # the largest number of a query gets this exponent; f16 reaches to 2^16
# A query of smaller numbers only is multiplied as if its largest had this exponent: its scores are
# 0 in f32 anyhow, and the powers below are all normal numbers.
LEAST = -100


def to_f16(q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(f16 [..., W], f32 [...]): q [..., W] is the first times the second, a power of two.

    Along the last axis the largest number is brought to between 2^14 and 2^15 by its exponent's
    bits. So none overflows, and those that are not normal f16 numbers, which have fewer bits, are
    below 2^-28 of the largest.
    """
    q = q.astype(jnp.float32)
    bits = lax.bitcast_convert_type(jnp.abs(q).max(axis=-1), jnp.int32)
    exponent = jnp.clip((bits >> MANTISSA) - BIAS, LEAST, BIAS)  # infinity's is one more
    return (q * _power(TOP - exponent)[..., None]).astype(jnp.float16), _power(exponent - TOP)


def _power(exponent: jax.Array) -> jax.Array:
    """2^exponent in f32, exactly, which an exponential is not everywhere."""
    return lax.bitcast_convert_type((exponent + BIAS) << MANTISSA, jnp.float32)
