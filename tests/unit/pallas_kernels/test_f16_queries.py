"""Queries in f16 with a power of two: the same numbers, of whatever size they were."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.f16_queries import LEAST, to_f16


def test_it_is_the_query_times_a_power_of_two():
    sizes = 2.0 ** np.array([-70, -15, 0, 3, 16, 60, 120])
    q = np.random.default_rng(0).uniform(-1, 1, (3, len(sizes), 64)) * sizes[:, None]
    q = jnp.asarray(q, jnp.bfloat16)
    values, gain = jax.jit(to_f16)(q)
    assert values.dtype == jnp.float16
    assert (np.frexp(gain)[0] == 0.5).all()
    largest = np.abs(np.asarray(values, np.float64)).max(axis=-1)
    assert (largest >= 2**14).all()
    assert (largest < 2**15).all()
    again = np.asarray(values, np.float64) * np.asarray(gain, np.float64)[..., None]
    np.testing.assert_array_equal(again, np.asarray(q, np.float64))


def test_the_ends_of_what_f32_holds():
    limits = jnp.finfo(jnp.float32)
    q = jnp.asarray([0, limits.tiny, 2.0**LEAST, limits.max, jnp.inf, jnp.nan], jnp.float32)
    values, gain = jax.jit(to_f16)(q[:, None])
    assert (np.isfinite(gain) & (np.asarray(gain) > 0)).all()
    assert values[0, 0] == 0
    np.testing.assert_array_equal(values[2:4, 0], np.array([2**14, 2**15], np.float16))
    assert np.isinf(values[4, 0])
    assert np.isnan(values[5, 0])
