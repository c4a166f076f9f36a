"""Rotary positions: both config forms, the scalings, the rotation."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from models.rope import RopeConfig, inverse_frequencies, rope_from_hf, rope_tables, rotate

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_both_forms_read_alike():
    new = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}
    old = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}
    older = {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}}
    expected = RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64)
    assert rope_from_hf(new) == rope_from_hf(old) == rope_from_hf(older) == expected


def test_no_scaling_and_no_theta():
    assert rope_from_hf({"rope_theta": 1e6, "rope_scaling": None}) == RopeConfig(1e6)
    assert rope_from_hf({}) == RopeConfig(1e4)


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        (
            {"rope_scaling": {"rope_type": "ntk", "factor": 4}},
            "rope_type: 'ntk' is not",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type: 'longrope'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type: 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "factor: missing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor: missing"),
        ({"rope_theta": "big"}, "rope_theta: expected a number > 0, got 'big'"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
        ({"rope_parameters": [1]}, "rope_parameters: expected an object"),
        ({"rope_scaling": [1]}, "rope_scaling: expected an object"),
        ({"rope_theta": 10**400}, "rope_theta: expected a number > 0, got 1000"),
        ({"rope_theta": float("inf")}, "rope_theta: expected a number > 0, got inf"),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
                "rope_scaling": {"type": "linear", "factor": 2},
            },
            "rope_scaling: type 'linear' differs from rope_parameters, which has 'default'",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"factor": 2}},
            "rope_scaling: factor 2 differs from rope_parameters, which has None",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(hf, message):
    with pytest.raises(ValueError, match=message):
        rope_from_hf(hf)


def test_both_forms_at_once_when_they_agree():
    scaling = {"rope_type": "linear", "factor": 2.0}
    hf = {"rope_parameters": {**scaling, "rope_theta": 1e4}}
    for old in (scaling, {"type": "linear", "factor": 2}):
        assert rope_from_hf({**hf, "rope_scaling": old}) == rope_from_hf(hf)


def test_linear_scaling_stretches_positions():
    plain, stretched = RopeConfig(1e4), RopeConfig(1e4, "linear", 4.0)
    positions = jnp.arange(0, 40, 4)
    cos, sin = rope_tables(plain, 16, positions // 4)
    for ours, expected in zip(rope_tables(stretched, 16, positions), (cos, sin), strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_llama3_keeps_short_waves_and_slows_long_ones():
    plain = inverse_frequencies(RopeConfig(5e5), 64)
    scaled = inverse_frequencies(RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64), 64)
    turns = 64 * plain / (2 * math.pi)
    short, long = turns > 4, turns < 1
    assert short.any()
    assert long.any()
    np.testing.assert_allclose(scaled[short], plain[short], rtol=1e-6)
    np.testing.assert_allclose(scaled[long], plain[long] / 8, rtol=1e-6)
    between = ~short & ~long
    assert between.any()
    assert ((plain / 8 < scaled) & (scaled < plain))[between].all()


def test_scores_depend_on_the_distance_alone():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 16)), jnp.float32) for _ in range(2))

    def score(at_q: int, at_k: int) -> float:
        rotated = [
            rotate(x, rope_tables(RopeConfig(1e4), 16, jnp.array([at])))
            for x, at in ((q, at_q), (k, at_k))
        ]
        return float((rotated[0] * rotated[1]).sum())

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3


def test_the_dtype_is_kept():
    x = jnp.ones((2, 3, 8), jnp.bfloat16)
    assert rotate(x, rope_tables(RopeConfig(1e4), 8, jnp.arange(2))).dtype == jnp.bfloat16
