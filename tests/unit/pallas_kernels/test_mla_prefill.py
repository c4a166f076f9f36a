"""Latent prefill attention: every back end against plain loops in f64 over decompressed keys and
values, and what must never reach a result.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from pallas_kernels import paging
from pallas_kernels.mla_prefill import mla_prefill, xla

# Of values of about 1. bf16 keeps 8 bits, and keys and values are rounded after decompression.
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}
PAGE_SIZE, WIDTH, ROWS = 8, 40, 4
TOKENS = 304  # of most cases, padded: one shape, compiled once
SCALE = 0.25

run = jax.jit(mla_prefill, static_argnames=("scale", "backend"))


def make_case(
    chunks, *, tokens=TOKENS, heads=3, nope=12, rotated=6, latent=20, v_dim=10, page_size=8, seed=0
):
    """q, cache, rows, positions, table, w_uk, w_uv (numpy, f32 and i32), page 0 never used.

    Chunks are (row, first position, tokens), side by side in the batch; the rest is padding.
    """
    rng = np.random.default_rng(seed)
    pad = tokens - sum(n for *_, n in chunks)
    rows = np.concatenate([np.full(n, row) for row, _, n in chunks] + [np.full(pad, -1)])
    positions = np.concatenate([np.arange(p, p + n) for _, p, n in chunks] + [np.zeros(pad)])
    width = WIDTH * PAGE_SIZE // page_size
    q = rng.standard_normal((tokens, heads, nope + rotated), np.float32)
    cache = rng.standard_normal((1 + ROWS * width, page_size, latent + rotated), np.float32)
    table = 1 + rng.permutation(ROWS * width).reshape(ROWS, width)
    w_uk = rng.standard_normal((heads, nope, latent), np.float32) * latent**-0.5
    w_uv = rng.standard_normal((heads, v_dim, latent), np.float32) * latent**-0.5
    return q, cache, *(a.astype(np.int32) for a in (rows, positions, table)), w_uk, w_uv


def attend(q, cache, rows, positions, table, w_uk, w_uv, dtype="float32", **kwargs):
    q, cache, w_uk, w_uv = (jnp.asarray(a, dtype) for a in (q, cache, w_uk, w_uv))
    ints = (jnp.asarray(a) for a in (rows, positions, table))
    out = run(q, cache, *ints, w_uk, w_uv, scale=SCALE, **kwargs)
    assert out.dtype == dtype
    return np.asarray(out, np.float32)


def naive(q, cache, rows, positions, table, w_uk, w_uv, dtype="float32"):
    """One token and head at a time from the definition, in f64, of the inputs rounded to dtype."""
    rounded = (a.astype(jnp.dtype(dtype)) for a in (q, cache, w_uk, w_uv))
    q, cache, w_uk, w_uv = (np.asarray(a, np.float64) for a in rounded)
    latent = w_uk.shape[2]
    out = np.zeros((*q.shape[:2], w_uv.shape[1]))
    for r in {*rows.tolist()} - {-1}:
        kept = cache[table[r]].reshape(-1, cache.shape[2])  # the whole row, in the table's order
        for n in range(q.shape[1]):
            keys = np.concatenate([kept[:, :latent] @ w_uk[n].T, kept[:, latent:]], axis=1)
            values = kept[:, :latent] @ w_uv[n].T
            for t in np.flatnonzero(rows == r):
                scores = keys[: positions[t] + 1] @ q[t, n] * SCALE
                weights = np.exp(scores - scores.max())
                out[t, n] = weights @ values[: positions[t] + 1] / weights.sum()
    return out


CHUNKS = {
    "one token": [(1, 0, 1)],
    "one row from the start": [(0, 0, 20)],
    "one row, later": [(2, 250, 64)],
    "several query blocks and page blocks": [(1, 0, 300)],
    "four rows, some later": [(0, 0, 30), (1, 128, 1), (2, 127, 60), (3, 9, 40)],
    "rows out of order, one of them twice": [(3, 0, 10), (0, 5, 20), (3, 10, 7)],
    "a row before and after another's blocks": [(1, 200, 40), (2, 0, 70), (1, 240, 40)],
    "a row backwards": [(0, 200, 40), (0, 100, 100), (0, 0, 100)],
    "no padding": [(0, 16, 104), (1, 120, 200)],
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_it_is_causal_attention(chunks, dtype):
    case = make_case(chunks)
    want = naive(*case, dtype)
    for backend in "xla", "reference":
        ours = attend(*case, dtype, backend=backend)
        np.testing.assert_allclose(ours, want, atol=TOLERANCE[dtype])
        assert (ours[case[2] < 0] == 0).all()
    np.testing.assert_array_equal(attend(*case, dtype), attend(*case, dtype, backend="xla"))


SHAPES = {
    "one head": {"heads": 1},
    "seven heads, unequal widths": {"heads": 7, "nope": 5, "rotated": 3, "latent": 33, "v_dim": 9},
    "published widths": {"heads": 2, "nope": 128, "rotated": 64, "latent": 512, "v_dim": 128},
    "nothing rotated": {"rotated": 0},
    "pages of 1": {"page_size": 1},
    "pages of 16": {"page_size": 16},
    "pages of 160, more than a block": {"page_size": 160},
    "fewer tokens than a query block": {"tokens": 9},
    "one token": {"tokens": 1},
}


# The matmuls' shapes in both dtypes; the size of a page changes the reading alone.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(n, "float32") for n in SHAPES] + [(n, "bfloat16") for n in SHAPES if "pages" not in n],
)
def test_shapes_and_page_sizes(name, dtype):
    shape = SHAPES[name]
    tokens = shape.get("tokens", 75)
    chunks = [(0, 120, tokens)] if tokens < 75 else [(0, 120, 50), (2, 0, 20)]
    q, *case = make_case(chunks, **{"tokens": tokens, **shape})
    case = (q * (18 / q.shape[2]) ** 0.5, *case)  # scores of about 1 whatever the width
    want = naive(*case, dtype)
    for backend in "xla", "reference":
        ours = attend(*case, dtype, backend=backend)
        np.testing.assert_allclose(ours, want, atol=TOLERANCE[dtype])


@given(
    chunks=st.lists(
        st.tuples(st.integers(0, ROWS - 1), st.integers(0, 200), st.integers(1, 60)),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 99),
)
@settings(max_examples=15)
def test_any_chunks(chunks, seed):
    case = make_case(chunks, seed=seed)
    np.testing.assert_allclose(attend(*case, backend="xla"), naive(*case), atol=1e-5)


@given(seed=st.integers(0, 99))
@settings(max_examples=5)
def test_any_order_of_tokens(seed):
    q, cache, rows, positions, *rest = make_case(CHUNKS["four rows, some later"], seed=seed)
    order = np.random.default_rng(seed).permutation(TOKENS)
    case = (q[order], cache, rows[order], positions[order], *rest)
    np.testing.assert_allclose(attend(*case, backend="xla"), naive(*case), atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_a_prompt_in_chunks_gives_what_the_whole_gives(backend):
    q, *rest = make_case([(1, 0, 300)])
    whole = attend(q, *rest, backend=backend)[:300]
    cache, _, _, table, *weights = rest
    at = 0
    for size in 1, 31, 32, 33, 128, 75:
        _, _, rows, positions, *_ = make_case([(1, at, size)])
        part = np.pad(q[at : at + size], ((0, TOKENS - size), (0, 0), (0, 0)))
        ours = attend(part, cache, rows, positions, table, *weights, backend=backend)
        np.testing.assert_allclose(ours[:size], whole[at : at + size], atol=1e-5)
        at += size
    assert at == 300


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_attended_never_reaches_a_result(poison, backend):
    chunks = [(0, 0, 30), (1, 100, 5), (2, 127, 60)]
    q, cache, rows, positions, table, *weights = make_case(chunks)
    clean = attend(q, cache, rows, positions, table, *weights, backend=backend)
    attended = np.zeros(cache.shape[:2], bool)
    for row, start, n in chunks:
        for p in range(start + n):
            attended[table[row, p // PAGE_SIZE], p % PAGE_SIZE] = True
    cache = np.where(attended[..., None], cache, poison)
    q = np.where(rows[:, None, None] >= 0, q, poison)  # of padding
    for junk in 2**30, -(2**30):
        table[:, 30:] = junk
        ours = attend(q, cache, rows, positions, table, *weights, backend=backend)
        np.testing.assert_array_equal(ours, clean)


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_a_permuted_page_is_seen(backend):
    """By every token of the chunk that may see one of the two pages and not all of both."""
    q, cache, rows, positions, table, *weights = make_case([(0, 0, 30)])
    clean = attend(q, cache, rows, positions, table, *weights, backend=backend)
    table[0, [1, 2]] = table[0, [2, 1]]
    ours = attend(q, cache, rows, positions, table, *weights, backend=backend)
    changed = np.abs(ours - clean).max(axis=(1, 2)) > 1e-3
    assert np.flatnonzero(changed).tolist() == list(range(8, 23))
    want = naive(q, cache, rows, positions, table, *weights)
    np.testing.assert_allclose(ours, want, atol=1e-5)


def test_a_batch_of_padding_gives_zeros():
    case = make_case([])
    assert (attend(*case) == 0).all()
    assert (attend(*case, backend="reference") == 0).all()


def test_large_scores_do_not_overflow():
    q, *rest = make_case([(0, 100, 100), (1, 0, 20)])
    case = (q * 200, *rest)
    ours = attend(*case, backend="xla")
    np.testing.assert_allclose(ours, naive(*case), atol=1e-3)  # scores themselves have 24 bits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads_shard_and_the_cache_does_not(dtype):
    case = make_case([(0, 0, 30), (2, 127, 60)], heads=4)
    mesh = jax.make_mesh((4,), ("rep",), axis_types=(jax.sharding.AxisType.Auto,))
    whole, first, second = PartitionSpec(), PartitionSpec("rep"), PartitionSpec(None, "rep")
    sharded = jax.shard_map(
        lambda *args: mla_prefill(*args, scale=SCALE),
        mesh=mesh,
        in_specs=(second, whole, whole, whole, whole, first, first),
        out_specs=second,
        check_vma=False,
    )
    args = [jnp.asarray(a, dtype if a.dtype == np.float32 else None) for a in case]
    np.testing.assert_allclose(
        np.asarray(jax.jit(sharded)(*args), np.float32), naive(*case, dtype), atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize(
    ("chunks", "reads"),
    [
        ([], 0),
        ([(0, 0, 300)], 3),
        ([(0, 0, 30), (2, 127, 1), (3, 128, 1)], 1 + 1 + 2),
        ([(3, 0, 10), (0, 5, 20), (3, 10, 7)], 2),
    ],
)
def test_a_block_is_decompressed_once_per_row(chunks, reads, monkeypatch):
    """Whatever the number of query blocks; rows without tokens and later blocks cost nothing."""
    seen = []

    def counting(cache, pages, first, *rest):
        jax.debug.callback(lambda at: seen.append(int(at)), first)
        return paging.read_latent_block(cache, pages, first, *rest)

    monkeypatch.setattr(xla, "read_latent_block", counting)
    case = make_case(chunks)
    jax.block_until_ready(jax.jit(lambda *a: mla_prefill(*a, scale=SCALE, backend="xla"))(*case))
    jax.effects_barrier()
    assert len(seen) == reads


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_stays_bounded(dtype):
    """No copy of the cache, and no row decompressed whole: 8 rows over 1,024 positions each."""
    i32 = "int32"
    shapes = [((1024, 4, 192), dtype), ((1025, 16, 576), dtype), ((1024,), i32), ((1024,), i32)]
    shapes += [((8, 64), i32), ((4, 128, 512), dtype), ((4, 128, 512), dtype)]
    args = [jax.ShapeDtypeStruct(*s) for s in shapes]
    step = jax.jit(lambda *a: mla_prefill(*a, scale=1.0, backend="xla"))
    memory = step.lower(*args).compile().memory_analysis()
    # q and the result, each once or twice over; all rows decompressed take 42 MB in f32 and
    # the cache itself 38.
    assert memory.temp_size_in_bytes < 16 << 20


def test_shapes_that_do_not_fit_are_refused():
    q, cache, rows, positions, table, w_uk, w_uv = make_case([(0, 0, 4)])
    with pytest.raises(ValueError, match=r"rows \(3,\) .* differ in tokens"):
        attend(q, cache, rows[:3], positions, table, w_uk, w_uv)
    with pytest.raises(ValueError, match=r"positions \(3,\) differ in tokens"):
        attend(q, cache, rows, positions[:3], table, w_uk, w_uv)
    with pytest.raises(ValueError, match=r"w_uk \(2, 12, 20\) .* do not fit q \(304, 3, 18\)"):
        attend(q, cache, rows, positions, table, w_uk[:2], w_uv[:2])
    with pytest.raises(ValueError, match=r"w_uv \(3, 10, 19\) .* N and R must be equal"):
        attend(q, cache, rows, positions, table, w_uk, w_uv[..., :19])
    with pytest.raises(ValueError, match=r"must be R \+ C = 20 \+ 6 wide"):
        attend(q, cache[..., :25], rows, positions, table, w_uk, w_uv)
    with pytest.raises(ValueError, match=r"must be R \+ C = 20 \+ -2 wide"):
        attend(q[..., :10], cache[..., :18], rows, positions, table, w_uk, w_uv)
    with pytest.raises(ValueError, match=r"expected w_uk \[N, Hn, R\], w_uv \[N, Hv, R\]"):
        attend(q, cache, rows, positions, table, w_uk[0], w_uv)
    with pytest.raises(ValueError, match=r"expected q \[\., N, \.\], cache \[P, Z, R\+C\]"):
        attend(q, cache[0], rows, positions, table, w_uk, w_uv)


def test_an_unknown_back_end_is_refused_by_name():
    with pytest.raises(
        ValueError, match="'cudnn' is not one of auto, mosaic_gpu, mosaic_interpret, reference, xla"
    ):
        attend(*make_case([(0, 0, 3)]), backend="cudnn")
