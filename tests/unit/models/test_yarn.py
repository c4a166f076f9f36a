"""Yarn: its fields, its frequencies against published values and formula, its two mscales."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from models.rope import RopeConfig, inverse_frequencies, rope_from_hf, rope_tables, rotate

# As DeepSeek-V3 and R1 are released.
DEEPSEEK = {
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}
# As the Qwen3 model cards say for long contexts: all else by default.
QWEN3 = {
    "rope_theta": 1e6,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
}
# Bounds that are not rounded, and two mscales.
OTHER = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 8.0,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "truncate": False,
        "original_max_position_embeddings": 320,
    }
}
# (config, head dim, what cos and sin are multiplied by, {pair: radians per position}), from
# transformers 5.24.
PUBLISHED = [
    (
        DEEPSEEK,
        64,
        1.0,
        {
            0: 1.0,
            9: 0.07498941570520401,
            10: 0.05623412877321243,
            12: 0.026879360899329185,
            16: 0.005500000435858965,
            20: 0.0007905694073997438,
            22: 0.00017782794020604342,
            23: 3.333803397254087e-05,
            31: 3.3338035336782923e-06,
        },
    ),
    (
        QWEN3,
        128,
        1.138629436111989,
        {
            0: 1.0,
            23: 0.006978305988013744,
            24: 0.005375321488827467,
            30: 0.0010643609566614032,
            39: 6.490394298452884e-05,
            40: 4.4456985051510856e-05,
            63: 3.102344408034696e-07,
        },
    ),
    (
        OTHER,
        16,
        0.9017839869787123,
        {
            1: 0.3162277638912201,
            2: 0.051831360906362534,
            3: 0.0039528473280370235,
            7: 3.9528473280370235e-05,
        },
    ),
]


@pytest.mark.parametrize(("hf", "dim", "factor", "expected"), PUBLISHED)
def test_published_values(hf: dict, dim: int, factor: float, expected: dict[int, float]):
    config = rope_from_hf(hf)
    assert config.attention_factor == pytest.approx(factor, rel=1e-12)
    freqs = inverse_frequencies(config, dim)
    assert freqs.dtype == np.float32
    for pair, value in expected.items():
        assert freqs[pair] == pytest.approx(value, rel=5e-7)


@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("theta", "factor", "context"), [(1e4, 40.0, 4096), (5e5, 3.0, 300)])
def test_the_formula_of_the_paper(
    dim: int, truncate: bool, theta: float, factor: float, context: int
):
    """Arxiv 2309.00071, section 3.2, pair by pair in f64, from each wave's turns over the context.

    The released code puts the ramp over pairs; the bounds are the pairs of beta turns.
    """
    turns = [context * theta ** (-2 * i / dim) / (2 * math.pi) for i in range(dim // 2)]

    def pair_of(beta: float) -> float:  # by bisection over a real-valued pair number
        low, high = -float(dim), 2.0 * dim
        for _ in range(200):
            middle = (low + high) / 2
            more = context * theta ** (-2 * middle / dim) / (2 * math.pi) > beta
            low, high = (middle, high) if more else (low, middle)
        return low

    first, last = pair_of(32), pair_of(1)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    expected = []
    for i, t in enumerate(turns):
        slowed = min(max((i - first) / (last - first), 0.0), 1.0)
        wave = t * 2 * math.pi / context
        expected.append(wave * ((1 - slowed) + slowed / factor))
    config = RopeConfig(
        theta, "yarn", factor=factor, original_max_position=context, truncate=truncate
    )
    np.testing.assert_allclose(inverse_frequencies(config, dim), expected, rtol=3e-6)


def test_both_spellings_read_alike():
    old = rope_from_hf(DEEPSEEK)
    fields = {k: v for k, v in DEEPSEEK["rope_scaling"].items() if k != "type"}
    new = {"rope_parameters": {**fields, "rope_type": "yarn", "rope_theta": 10000.0}}
    assert rope_from_hf(new) == old
    assert (old.beta_fast, old.beta_slow, old.original_max_position) == (32, 1, 4096)


def test_the_two_mscales():
    """cos and sin by the ratio, the softmax scale by the square of mscale_all_dim's."""
    config = rope_from_hf(OTHER)
    fast, wide = 0.1 * 0.7 * math.log(8) + 1, 0.1 * 1.3 * math.log(8) + 1
    assert config.attention_factor == pytest.approx(fast / wide)
    assert config.softmax_factor == pytest.approx(wide**2)
    cos, sin = rope_tables(config, 16, jnp.arange(5))
    length = np.asarray(cos) ** 2 + np.asarray(sin) ** 2
    np.testing.assert_allclose(length, (fast / wide) ** 2, rtol=1e-5)
    # DeepSeek-V3: 192^-0.5 * 1.3689^2 is the scale that its inference code uses
    assert rope_from_hf(DEEPSEEK).softmax_factor == pytest.approx(1.3688879454113936**2)
    assert rope_from_hf(QWEN3).softmax_factor == 1
    assert RopeConfig(1e4, "linear", 4.0).softmax_factor == 1


def test_a_given_attention_factor_wins():
    scaling = {**DEEPSEEK["rope_scaling"], "attention_factor": 1.5}
    assert rope_from_hf({**DEEPSEEK, "rope_scaling": scaling}).attention_factor == 1.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"factor": None}, "factor: missing"),
        ({"original_max_position_embeddings": None}, "original_max_position_embeddings: missing"),
        ({"beta_fast": -1}, "beta_fast: expected a number > 0, got -1"),
        ({"beta_fast": 1, "beta_slow": 2}, r"beta_fast: 1.0 must be at least beta_slow 2\.0"),
        ({"truncate": "no"}, "truncate: expected true or false, got 'no'"),
        ({"mscale": -0.5}, "mscale: expected a number >= 0, got -0.5"),
        ({"mscale": None}, r"mscale: missing, but mscale_all_dim is 1\.0"),
        ({"mscale": 0.7, "mscale_all_dim": 0}, r"mscale_all_dim: missing, but mscale is 0\.7"),
        ({"attention_factor": 0}, "attention_factor: expected a number > 0, got 0"),
    ],
)
def test_what_is_malformed_is_refused_by_name(change: dict, message: str):
    hf = {**DEEPSEEK, "rope_scaling": {**DEEPSEEK["rope_scaling"], **change}}
    with pytest.raises(ValueError, match=message):
        rope_from_hf(hf)


def test_kinds_can_be_narrowed():
    hf = {"rope_parameters": {"rope_type": "llama3", "factor": 8}}
    with pytest.raises(ValueError, match=r"'llama3' is not supported \(supported: default, yarn\)"):
        rope_from_hf(hf, ("default", "yarn"))


def test_interleaved_pairs():
    """Pairs (2i, 2i + 1) as complex numbers: a turn by position times the pair's frequency."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 2, 16)).astype(np.float32)
    positions = np.array([0, 1, 5, 40, 300, 7])
    config = RopeConfig(1e4)
    turns = positions[:, None, None] * inverse_frequencies(config, 16).astype(np.float64)
    expected = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * turns)
    tables = rope_tables(config, 16, jnp.asarray(positions))
    ours = np.asarray(rotate(jnp.asarray(x), tables, interleaved=True))
    np.testing.assert_allclose(ours[..., :8], expected.real, atol=1e-4)
    np.testing.assert_allclose(ours[..., 8:], expected.imag, atol=1e-4)
