"""Prefill attention: every back end against the reference, and what must never reach a result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_prefill import paged_prefill

TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}
PAGE_SIZE, WIDTH, ROWS = 8, 40, 4
TOKENS = 304  # of most cases, padded: one shape, compiled once


run = jax.jit(paged_prefill, static_argnames=("scale", "backend"))


def make_case(chunks, *, heads=4, kv_heads=2, head_dim=16, seed=0):
    """Chunks are (row, first position, tokens), side by side in the batch; the rest is padding."""
    rng = np.random.default_rng(seed)
    pad = TOKENS - sum(n for *_, n in chunks)
    rows = np.concatenate([np.full(n, row) for row, _, n in chunks] + [np.full(pad, -1)])
    positions = np.concatenate([np.arange(p, p + n) for _, p, n in chunks] + [np.zeros(pad)])
    pages = 1 + ROWS * WIDTH
    q = rng.standard_normal((len(rows), heads, head_dim), np.float32)
    cache = rng.standard_normal((pages, kv_heads, 2, PAGE_SIZE, head_dim), np.float32)
    table = 1 + rng.permutation(ROWS * WIDTH).reshape(ROWS, WIDTH)
    return q, cache, *(a.astype(np.int32) for a in (rows, positions, table))


def attend(q, cache, rows, positions, table, dtype="float32", **kwargs):
    q, cache = jnp.asarray(q, dtype), jnp.asarray(cache, dtype)
    ints = (jnp.asarray(a) for a in (rows, positions, table))
    out = run(q, cache, *ints, scale=0.25, **kwargs)
    assert out.dtype == dtype
    return np.asarray(out, np.float32)


CHUNKS = {
    "one row from the start": [(0, 0, 20)],
    "one row, later": [(2, 250, 64)],
    "several query blocks and page blocks": [(1, 0, 300)],
    "four rows, some later": [(0, 0, 30), (1, 128, 1), (2, 127, 60), (3, 9, 40)],
    "rows out of order, one of them twice": [(3, 0, 10), (0, 5, 20), (3, 10, 7)],
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_xla_agrees_with_the_reference(chunks, dtype):
    case = make_case(chunks)
    ours = attend(*case, dtype, backend="xla")
    np.testing.assert_allclose(
        ours, attend(*case, dtype, backend="reference"), atol=TOLERANCE[dtype]
    )
    assert (ours[case[2] < 0] == 0).all()
    np.testing.assert_array_equal(ours, attend(*case, dtype))  # "auto" is xla on a CPU


def test_the_reference_is_causal_attention():
    """Against one dense softmax over a row that lies in pages 1, 2, ... in order."""
    q, cache, rows, positions, table = make_case([(0, 0, 20)])
    table[0] = np.arange(1, WIDTH + 1)
    kv = cache[1:4].transpose(1, 2, 0, 3, 4).reshape(2, 2, 24, 16)[:, :, :20]
    k, v = np.repeat(kv[:, 0], 2, 0), np.repeat(kv[:, 1], 2, 0)
    scores = np.einsum("tnh,nsh->nts", q[:20], k) * 0.25
    scores = np.where(np.tri(20, dtype=bool), scores, -np.inf)
    dense = np.einsum("nts,nsh->tnh", np.asarray(jax.nn.softmax(scores)), v)
    ours = attend(q, cache, rows, positions, table, backend="reference")[:20]
    np.testing.assert_allclose(ours, dense, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (8, 1)])
def test_head_groups(heads, kv_heads):
    case = make_case([(0, 3, 20), (1, 0, 4)], heads=heads, kv_heads=kv_heads)
    np.testing.assert_allclose(
        attend(*case, backend="xla"), attend(*case, backend="reference"), atol=1e-5
    )


@given(
    chunks=st.lists(
        st.tuples(st.integers(0, ROWS - 1), st.integers(0, 200), st.integers(1, 60)),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 99),
)
@settings(max_examples=10)
def test_any_chunks(chunks, seed):
    case = make_case(chunks, seed=seed)
    np.testing.assert_allclose(
        attend(*case, backend="xla"), attend(*case, backend="reference"), atol=1e-5
    )


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_is_not_attended_never_reaches_a_result(poison, backend):
    chunks = [(0, 0, 30), (1, 100, 5), (2, 127, 60)]
    q, cache, rows, positions, table = make_case(chunks)
    clean = attend(q, cache, rows, positions, table, backend=backend)
    attended = np.zeros((len(cache), PAGE_SIZE), bool)
    for row, start, n in chunks:
        for p in range(start + n):
            attended[table[row, p // PAGE_SIZE], p % PAGE_SIZE] = True
    cache = np.where(attended[:, None, None, :, None], cache, poison)
    table[:, 30:] = 2**30
    ours = attend(q, cache, rows, positions, table, backend=backend)
    np.testing.assert_array_equal(ours, clean)


def test_a_batch_of_padding_gives_zeros():
    assert (attend(*make_case([])) == 0).all()


def test_memory_stays_bounded():
    """No copy of K/V per token: 8 rows of 128 tokens over tables of 1,024 positions each."""
    f32, i32 = jnp.float32, jnp.int32
    shapes = [((1024, 8, 64), f32), ((1025, 4, 2, 8, 64), f32), ((1024,), i32), ((1024,), i32)]
    args = [jax.ShapeDtypeStruct(*s) for s in (*shapes, ((8, 128), i32))]
    step = jax.jit(lambda *a: paged_prefill(*a, scale=1.0, backend="xla"))
    memory = step.lower(*args).compile().memory_analysis()
    # q, the result and a block of scores; gathered per token, K/V alone would take 2 GB.
    assert memory.temp_size_in_bytes < 16 << 20


def test_shapes_that_do_not_fit_are_refused():
    q, cache, rows, positions, table = make_case([(0, 0, 4)])
    with pytest.raises(ValueError, match="differ in tokens"):
        attend(q, cache, rows[:3], positions, table)
    with pytest.raises(ValueError, match="does not fit cache"):
        attend(q[..., :8], cache, rows, positions, table)
