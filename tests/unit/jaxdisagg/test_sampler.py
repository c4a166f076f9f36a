"""Sampling in the step: against numpy, over meshes, and independent of the batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdisagg.mesh import make_mesh
from jaxdisagg.sampler import MAX_LOGPROBS, most_likely, sample

ROWS, VOCABULARY = 8, 1024


@functools.cache
def sampler(tp: int):
    return jax.jit(functools.partial(sample, mesh=make_mesh(tp=tp, dp=1, kv_heads=2)))


@functools.cache
def drafter(tp: int):
    return jax.jit(functools.partial(most_likely, mesh=make_mesh(tp=tp, dp=1, kv_heads=2)))


def logits(seed: int = 0, spread: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(ROWS, VOCABULARY)) * spread).astype(np.float32)


def draw(values, *, tp=1, temperature=1.0, top_k=0, top_p=1.0, position=0, seed=0):
    def full(x, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(x, dtype), (ROWS,)))

    return sampler(tp)(
        jnp.asarray(values),
        full(position, np.int32),
        full(seed, np.uint32),
        full(temperature, np.float32),
        full(top_k, np.int32),
        full(top_p, np.float32),
    )


def log_softmax(values: np.ndarray) -> np.ndarray:
    shifted = values - values.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_without_finite_logits_draws_nothing(bad, temperature):
    values = logits()
    values[2, 700] = bad
    values[3, 700] = -np.inf  # a masked token is no fault
    token, *_ = draw(values, tp=2, temperature=temperature)
    assert (np.asarray(token) < 0).tolist() == [row == 2 for row in range(ROWS)]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_greedy_is_argmax_with_exact_logprobs(tp):
    values = logits()
    token, logprob, top_ids, top_logprobs = draw(values, tp=tp, temperature=0.0)
    np.testing.assert_array_equal(token, values.argmax(-1))
    exact = log_softmax(values)
    np.testing.assert_allclose(logprob, exact.max(-1), atol=1e-5)
    order = np.argsort(-values, axis=-1)[:, :MAX_LOGPROBS]
    np.testing.assert_array_equal(top_ids, order)
    np.testing.assert_allclose(top_logprobs, np.take_along_axis(exact, order, 1), atol=1e-5)


@pytest.mark.parametrize("tp", [1, 4])
def test_of_equal_logits_the_first_wins(tp):
    values = np.zeros((ROWS, VOCABULARY), np.float32)
    values[:, [300, 700, 900]] = 5.0
    assert set(np.asarray(draw(values, tp=tp, temperature=0.0)[0])) == {300}
    assert set(np.asarray(drafter(tp)(jnp.asarray(values)))) == {300}


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_most_likely_token_is_argmax_over_all_shards(tp):
    values = logits(seed=3)
    found = np.asarray(drafter(tp)(jnp.asarray(values)))
    np.testing.assert_array_equal(found, values.argmax(-1))
    assert len(set(found // (VOCABULARY // 4))) > 1, "one shard alone proves nothing"


def kept_by(values: np.ndarray, top_k: int, top_p: float) -> set[int]:
    """The textbook: sort, keep the first k, then the smallest prefix whose mass reaches p."""
    order = np.argsort(-values)
    probabilities = np.exp(log_softmax(values))[order]
    if top_k:
        probabilities = probabilities[:top_k] / probabilities[:top_k].sum()
    before = np.cumsum(probabilities) - probabilities
    n = max(int((before < top_p).sum()), 1)
    return set(order[:n].tolist())


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("top_k", "top_p"),
    # candidates, full vocabulary, and the mass beyond the candidates
    [(1, 1.0), (5, 1.0), (200, 1.0), (0, 0.3), (0, 0.97), (300, 0.9), (20, 0.5)],
)
def test_only_kept_tokens_are_drawn_and_all_of_few(tp, top_k, top_p):
    values = np.repeat(logits(spread=1.0)[:1], ROWS, axis=0)
    kept = kept_by(values[0], top_k, top_p)
    seen: set[int] = set()
    for position in range(40):
        seeds = np.arange(ROWS) + 1000 * position
        tokens = draw(values, tp=tp, top_k=top_k, top_p=top_p, position=position, seed=seeds)[0]
        seen |= set(np.asarray(tokens).tolist())
    assert seen <= kept
    if len(kept) <= 5:
        assert seen == kept


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (8, 1.0), (0, 0.9999)])
def test_frequencies_follow_the_distribution(top_k, top_p):
    values = np.full((ROWS, VOCABULARY), -20.0, np.float32)
    wanted = np.array([0.5, 0.3, 0.15, 0.05])
    values[:, [3, 99, 512, 1023]] = np.log(wanted)
    counts = np.zeros(VOCABULARY)
    draws = 250
    for position in range(draws):
        tokens = draw(values, top_k=top_k, top_p=top_p, position=position, seed=np.arange(ROWS))[0]
        np.add.at(counts, np.asarray(tokens), 1)
    np.testing.assert_allclose(counts[[3, 99, 512, 1023]] / (draws * ROWS), wanted, atol=0.04)


def test_temperature_scales_and_logprobs_stay_those_of_the_model():
    values = logits()
    token, logprob, *_ = draw(values, temperature=5.0, seed=np.arange(ROWS))
    exact = log_softmax(values)[np.arange(ROWS), np.asarray(token)]
    np.testing.assert_allclose(logprob, exact, atol=1e-4)


def test_a_rows_token_depends_on_its_seed_and_position_alone():
    values = logits()
    alone = draw(values, seed=7, position=3)[0]
    mixed = draw(
        values,
        seed=[7, 1, 2, 3, 4, 5, 6, 8],
        position=[3, 9, 9, 9, 9, 9, 9, 9],
        temperature=[1.0, 0.0, 2.0, 1.0, 1.0, 0.5, 1.0, 1.0],
        top_k=[0, 0, 5, 0, 400, 0, 0, 0],
        top_p=[1.0, 1.0, 1.0, 0.1, 1.0, 0.99, 1.0, 1.0],
    )[0]
    assert int(alone[0]) == int(mixed[0])
    other = draw(values, seed=7, position=4)[0]
    assert (np.asarray(other) != np.asarray(alone)).any()


def test_equal_seeds_draw_equally_on_every_mesh():
    values = logits()
    drawn = [
        np.asarray(draw(values, tp=tp, seed=np.arange(ROWS), top_p=0.95)[0]) for tp in (1, 2, 4)
    ]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    np.testing.assert_array_equal(drawn[0], drawn[2])
