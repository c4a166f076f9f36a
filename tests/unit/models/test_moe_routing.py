"""Both routers against loops written from their formulas."""

import expert_reference as reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.moe import route_sigmoid_grouped, route_softmax

TOKENS, HIDDEN, EXPERTS = 50, 24, 16
GROUPED = {"groups": 4, "top_groups": 2, "normalise": True, "scale": 2.5}


@pytest.fixture
def data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x [T, D], router [D, E], bias [E]; the bias is as large as the scores are apart."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((TOKENS, HIDDEN), dtype=np.float32)
    router = rng.standard_normal((HIDDEN, EXPERTS), dtype=np.float32) * 0.3
    return x, router, rng.standard_normal(EXPERTS).astype(np.float32) * 0.3


def check(found: tuple[jax.Array, jax.Array], expected: list[dict[int, float]]) -> None:
    ids, weights = map(np.asarray, found)
    assert ids.dtype == np.int32
    assert weights.dtype == np.float32
    for t, route in enumerate(expected):
        assert set(ids[t].tolist()) == set(route)
        assert len(ids[t]) == len(route)
        np.testing.assert_allclose(weights[t], [route[e] for e in ids[t].tolist()], rtol=1e-5)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("k", [1, 4])
def test_softmax(k: int, normalise: bool, data):
    x, router, _ = data
    found = jax.jit(route_softmax, static_argnames=("k", "normalise"))(
        x, router, k, normalise=normalise
    )
    check(found, reference.route_softmax(x @ router, k, normalise=normalise))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"normalise": False},
        {"groups": 1, "top_groups": 1},
        {"groups": 8, "top_groups": 3},  # groups of two: the sum is over all of a group
        {"groups": 4, "top_groups": 4},
        {"scale": 1.0},
    ],
    ids=str,
)
def test_sigmoid_in_groups(changes: dict, data):
    x, router, bias = data
    options = GROUPED | changes
    run = jax.jit(lambda x, router, bias: route_sigmoid_grouped(x, router, bias, 4, **options))
    check(run(x, router, bias), reference.route_sigmoid_grouped(x @ router, bias, 4, **options))


def test_the_bias_chooses_but_does_not_weigh(data):
    x, router, bias = data
    plain = reference.route_sigmoid_grouped(x @ router, 0 * bias, 4, **GROUPED)
    biased = reference.route_sigmoid_grouped(x @ router, bias, 4, **GROUPED)
    assert any(set(a) != set(b) for a, b in zip(plain, biased, strict=True))
    # Far below every score: an expert of another group would be taken if it were masked with 0.
    ids, weights = route_sigmoid_grouped(x, router, bias - 3, 4, **GROUPED)
    check((ids, weights), biased)


def test_groups_go_by_their_best_two():
    """A group with the one best expert loses to a group with two good ones."""
    logits = np.full((1, 8), -2.0, np.float32)
    logits[0, [0, 4, 5]] = [3.0, 1.0, 1.0]
    options = {"groups": 2, "top_groups": 1, "normalise": True, "scale": 1.0}
    eye, bias = np.eye(8, dtype=np.float32), np.zeros(8, np.float32)
    ids, weights = route_sigmoid_grouped(logits, eye, bias, 2, **options)
    assert sorted(np.asarray(ids)[0].tolist()) == [4, 5]
    np.testing.assert_allclose(np.asarray(weights), 0.5, rtol=1e-6)


@pytest.mark.parametrize("route", ["softmax", "grouped"])
def test_bf16_is_routed_in_f32(route: str, data):
    """Weights differ from those of the same bf16 numbers in f64 by f32's rounding alone."""
    x, router, bias = data
    x, router = (jnp.asarray(a, jnp.bfloat16) for a in (x, router))
    logits = np.asarray(x, np.float64) @ np.asarray(router, np.float64)
    if route == "softmax":
        found = route_softmax(x, router, 4, normalise=True)
        expected = reference.route_softmax(logits, 4, normalise=True)
    else:
        found = route_sigmoid_grouped(x, router, bias, 4, **GROUPED)
        expected = reference.route_sigmoid_grouped(logits, bias, 4, **GROUPED)
    check(found, expected)
