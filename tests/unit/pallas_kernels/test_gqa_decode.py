"""Decode attention: every back end against the reference, and what must never reach a result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.gqa_decode import gqa_decode

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}  # of values of about 1; bf16 keeps 8 bits


run = jax.jit(gqa_decode, static_argnames=("scale", "backend"))


def make_case(lengths, *, heads=4, kv_heads=2, head_dim=16, page_size=8, width=6, seed=0):
    """q, cache, page table, lengths (numpy, f32), pages shuffled, page 0 never used."""
    rng = np.random.default_rng(seed)
    rows = len(lengths)
    pages = 1 + rows * width
    q = rng.standard_normal((rows, heads, head_dim), np.float32)
    cache = rng.standard_normal((pages, kv_heads, 2, page_size, head_dim), np.float32)
    table = 1 + rng.permutation(rows * width).reshape(rows, width).astype(np.int32)
    return q, cache, table, np.array(lengths, np.int32)


def attend(q, cache, table, lengths, dtype="float32", **kwargs):
    q, cache = jnp.asarray(q, dtype), jnp.asarray(cache, dtype)
    out = run(q, cache, jnp.asarray(table), jnp.asarray(lengths), scale=0.25, **kwargs)
    assert out.dtype == dtype
    return np.asarray(out, np.float32)


def naive(q, cache, table, lengths):
    """One row and head at a time, from the definition."""
    out = np.zeros(q.shape)
    group = q.shape[1] // cache.shape[1]
    page_size = cache.shape[3]
    for b, length in enumerate(lengths):
        for n in range(q.shape[1]):
            where = [(table[b, p // page_size], p % page_size) for p in range(length)]
            if where:
                k = np.array([cache[page, n // group, 0, at] for page, at in where])
                v = np.array([cache[page, n // group, 1, at] for page, at in where])
                weights = np.exp(k @ q[b, n] * 0.25)
                out[b, n] = weights @ v / weights.sum()
    return out


@pytest.mark.parametrize("backend", ["reference", "xla", "auto"])
def test_it_is_attention(backend):
    case = make_case([1, 7, 8, 9, 48])
    np.testing.assert_allclose(attend(*case, backend=backend), naive(*case), atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (8, 1)])
def test_xla_agrees_with_the_reference(heads, kv_heads, dtype):
    # 40 pages of 8 tokens: three blocks of 128, the last one in part
    case = make_case([320, 129, 128, 3], heads=heads, kv_heads=kv_heads, width=40)
    ours = attend(*case, dtype, backend="xla")
    np.testing.assert_allclose(
        ours, attend(*case, dtype, backend="reference"), atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize(
    ("q_dtype", "cache_dtype", "atol"),  # a result of its dtype's precision
    [("float32", "bfloat16", 1e-5), ("float16", "bfloat16", 1e-3), ("bfloat16", "float32", 1e-2)],
)
def test_products_keep_what_either_operand_holds(q_dtype, cache_dtype, atol):
    q, cache, table, lengths = make_case([40, 9])
    q, cache = jnp.asarray(q, q_dtype), jnp.asarray(cache, cache_dtype)
    ours = run(q, cache, table, lengths, scale=0.25, backend="xla").astype(jnp.float32)
    truth = (np.asarray(a, np.float32) for a in (q, cache))
    np.testing.assert_allclose(ours, naive(*truth, table, lengths), atol=atol)


def test_a_block_of_16_bit_numbers_takes_half_of_one_in_f32():
    def bytes_of(dtype):
        shapes = [((8, 32, 128), dtype), ((513, 8, 2, 16, 128), dtype)]
        shapes += [((8, 64), "int32"), ((8,), "int32")]
        args = [jax.ShapeDtypeStruct(*s) for s in shapes]
        step = jax.jit(lambda *a: gqa_decode(*a, scale=1.0, backend="xla"))
        return step.lower(*args).compile().memory_analysis().temp_size_in_bytes

    assert bytes_of("bfloat16") < 0.7 * bytes_of("float32")


@given(
    lengths=st.lists(st.integers(0, 48), min_size=4, max_size=4),
    page_size=st.sampled_from([1, 8, 16]),
    seed=st.integers(0, 99),
)
@settings(max_examples=15)
def test_any_lengths(lengths, page_size, seed):
    lengths = [min(n, 6 * page_size) for n in lengths]
    case = make_case(lengths, page_size=page_size, seed=seed)
    np.testing.assert_allclose(attend(*case, backend="xla"), naive(*case), atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_attended_never_reaches_a_result(poison, backend):
    q, cache, table, lengths = make_case([0, 5, 8, 17])
    clean = attend(q, cache, table, lengths, backend=backend)
    attended = np.zeros((*cache.shape[:1], cache.shape[3]), bool)
    for b, length in enumerate(lengths):
        for p in range(length):
            attended[table[b, p // 8], p % 8] = True
    cache = np.where(attended[:, None, None, :, None], cache, poison)
    np.testing.assert_array_equal(attend(q, cache, table, lengths, backend=backend), clean)


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_a_row_of_length_zero_gives_zeros(backend):
    out = attend(*make_case([0, 3, 0]), backend=backend)
    assert (out[[0, 2]] == 0).all()
    assert (out[1] != 0).all()


def test_entries_past_the_length_may_be_anything():
    q, cache, table, lengths = make_case([9, 16])
    clean = attend(q, cache, table, lengths)
    table[:, 2:] = 2**30
    np.testing.assert_array_equal(attend(q, cache, table, lengths), clean)


def test_a_wrong_page_is_seen():
    q, cache, table, lengths = make_case([24, 24])
    clean = attend(q, cache, table, lengths)
    table[0, 1] = table[1, 1]
    assert np.abs(attend(q, cache, table, lengths)[0] - clean[0]).max() > 1e-3


def test_shapes_that_do_not_fit_are_refused():
    q, cache, table, lengths = make_case([3, 4])
    with pytest.raises(ValueError, match="does not fit cache"):
        attend(q[:, :3], cache, table, lengths)
    with pytest.raises(ValueError, match="differ in rows"):
        attend(q, cache, table, lengths[:1])
    with pytest.raises(ValueError, match=r"expected q \[\., N, H\]"):
        attend(q[0], cache, table, lengths)


def test_an_unknown_back_end_is_refused_by_name():
    with pytest.raises(ValueError, match="'cudnn' is not one of auto, mosaic_gpu"):
        attend(*make_case([3]), backend="cudnn")
