"""Latent decode attention: every back end against plain loops in f64, absorbed against decompressed
attention, and what must never reach a result.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from pallas_kernels import paging
from pallas_kernels.mla_decode import mla_decode, xla

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}  # of values of about 1; bf16 keeps 8 bits
LATENT, ROTATED = 24, 8
SCALE = 0.2

run = jax.jit(mla_decode, static_argnames=("scale", "latent", "backend"))


def make_case(lengths, *, heads=4, latent=LATENT, rotated=ROTATED, page_size=8, width=6, seed=0):
    """q, cache, page table, lengths (numpy, f32), pages shuffled, page 0 never used."""
    rng = np.random.default_rng(seed)
    rows = len(lengths)
    q = rng.standard_normal((rows, heads, latent + rotated), np.float32)
    cache = rng.standard_normal((1 + rows * width, page_size, latent + rotated), np.float32)
    table = 1 + rng.permutation(rows * width).reshape(rows, width).astype(np.int32)
    return q, cache, table, np.array(lengths, np.int32)


def attend(q, cache, table, lengths, dtype="float32", *, latent=LATENT, **kwargs):
    q, cache = jnp.asarray(q, dtype), jnp.asarray(cache, dtype)
    ints = jnp.asarray(table), jnp.asarray(lengths)
    out = run(q, cache, *ints, scale=SCALE, latent=latent, **kwargs)
    assert out.dtype == dtype
    return np.asarray(out, np.float32)


def naive(q, cache, table, lengths, dtype="float32", *, latent=LATENT):
    """One row, head and cached token at a time, in f64, of the inputs rounded to dtype."""
    q, cache = (np.asarray(a.astype(jnp.dtype(dtype)), np.float64) for a in (q, cache))
    page_size = cache.shape[1]
    out = np.zeros((*q.shape[:2], latent))
    for b, length in enumerate(lengths):
        for n in range(q.shape[1]):
            total = 0.0
            for p in range(length):
                kept = cache[table[b, p // page_size], p % page_size]
                weight = np.exp(SCALE * (q[b, n] @ kept))
                out[b, n] += weight * kept[:latent]
                total += weight
            out[b, n] /= total or 1.0
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["reference", "xla", "auto"])
def test_it_is_attention(backend, dtype):
    case = make_case([1, 7, 8, 9, 48])
    ours = attend(*case, dtype, backend=backend)
    np.testing.assert_allclose(ours, naive(*case, dtype), atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("heads", "latent", "rotated", "page_size"),
    [(1, 24, 8, 8), (3, 64, 16, 16), (16, 512, 64, 64), (2, 16, 0, 8), (5, 7, 3, 1)],
)
def test_shapes_and_page_sizes(heads, latent, rotated, page_size, dtype):
    width = 320 // page_size  # three blocks of 128 tokens, the last one in part
    shape = {"heads": heads, "latent": latent, "rotated": rotated}
    q, *case = make_case([320, 129, 128, 3], **shape, page_size=page_size, width=width)
    case = (q * (latent + rotated) ** -0.5 * 4, *case)  # scores of about 1 whatever the width
    want = naive(*case, dtype, latent=latent)
    for backend in "xla", "reference":
        ours = attend(*case, dtype, latent=latent, backend=backend)
        np.testing.assert_allclose(ours, want, atol=TOLERANCE[dtype])


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
def test_absorbed_equals_decompressed_attention(backend):
    """q_nope . (w_uk latent) = (q_nope w_uk) . latent, and values likewise."""
    rng = np.random.default_rng(1)
    lengths, heads, nope, v_dim = np.array([33, 8, 1], np.int32), 4, 12, 10
    _, cache, table, _ = make_case(lengths)
    q_nope = rng.standard_normal((3, heads, nope), np.float32)
    q_rope = rng.standard_normal((3, heads, ROTATED), np.float32)
    w_uk = rng.standard_normal((heads, nope, LATENT), np.float32) * LATENT**-0.5
    w_uv = rng.standard_normal((heads, LATENT, v_dim), np.float32) * LATENT**-0.5

    want = np.zeros((3, heads, v_dim))
    for b, length in enumerate(lengths):
        kept = cache[table[b]].reshape(-1, LATENT + ROTATED)[:length].astype(np.float64)
        for n in range(heads):
            k = np.concatenate([kept[:, :LATENT] @ w_uk[n].T, kept[:, LATENT:]], axis=1)
            weights = np.exp(SCALE * (k @ np.concatenate([q_nope[b, n], q_rope[b, n]])))
            want[b, n] = weights @ (kept[:, :LATENT] @ w_uv[n]) / weights.sum()

    absorbed = np.concatenate([np.einsum("bnh,nhr->bnr", q_nope, w_uk), q_rope], axis=-1)
    out = attend(absorbed, cache, table, lengths, backend=backend)
    np.testing.assert_allclose(np.einsum("bnr,nrv->bnv", out, w_uv), want, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_attended_never_reaches_a_result(poison, backend):
    q, cache, table, lengths = make_case([0, 5, 8, 17])
    clean = attend(q, cache, table, lengths, backend=backend)
    attended = np.zeros(cache.shape[:2], bool)
    for b, length in enumerate(lengths):
        for p in range(length):
            attended[table[b, p // 8], p % 8] = True
    cache = np.where(attended[..., None], cache, poison)
    np.testing.assert_array_equal(attend(q, cache, table, lengths, backend=backend), clean)


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_a_row_of_length_zero_gives_zeros(backend):
    out = attend(*make_case([0, 3, 0]), backend=backend)
    assert (out[[0, 2]] == 0).all()
    assert (out[1] != 0).all()
    assert (attend(*make_case([0, 0, 0]), backend=backend) == 0).all()


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("junk", [2**30, -(2**30)])
def test_entries_past_the_length_may_be_anything(junk, backend):
    q, cache, table, lengths = make_case([9, 16])
    clean = attend(q, cache, table, lengths, backend=backend)
    table[:, 2:] = junk
    np.testing.assert_array_equal(attend(q, cache, table, lengths, backend=backend), clean)


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_pages_are_read_in_the_tables_order(backend):
    """Only the last page is read in part, so two full pages may change places and no other two."""
    q, cache, table, lengths = make_case([20, 20])
    clean = attend(q, cache, table, lengths, backend=backend)
    full, partial = table.copy(), table.copy()
    full[0, [0, 1]] = full[0, [1, 0]]
    partial[0, [1, 2]] = partial[0, [2, 1]]
    np.testing.assert_allclose(attend(q, cache, full, lengths, backend=backend), clean, atol=1e-5)
    ours = attend(q, cache, partial, lengths, backend=backend)
    np.testing.assert_allclose(ours, naive(q, cache, partial, lengths), atol=1e-5)
    assert np.abs(ours[0] - clean[0]).max() > 1e-3


def test_a_wrong_page_is_seen():
    q, cache, table, lengths = make_case([24, 24])
    clean = attend(q, cache, table, lengths)
    table[0, 1] = table[1, 1]
    assert np.abs(attend(q, cache, table, lengths)[0] - clean[0]).max() > 1e-3


def test_large_scores_do_not_overflow():
    """Scores of several hundred, of either sign: exp needs the running maximum."""
    q, cache, table, lengths = make_case([300, 200], width=40)
    q = q * 200
    kept = cache[table].reshape(2, -1, LATENT + ROTATED).astype(np.float64)
    for b, length in enumerate(lengths):
        scores = SCALE * q[b] @ kept[b, :length].T
        assert np.abs(scores).max() > 300
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        want = weights @ kept[b, :length, :LATENT] / weights.sum(-1, keepdims=True)
        ours = attend(q, cache, table, lengths, backend="xla")[b]
        np.testing.assert_allclose(ours, want, atol=1e-3)  # scores themselves have 24 bits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads_shard_and_the_cache_does_not(dtype):
    case = make_case([40, 0, 9], heads=4)
    mesh = jax.make_mesh((4,), ("rep",), axis_types=(jax.sharding.AxisType.Auto,))
    whole, heads = PartitionSpec(), PartitionSpec(None, "rep")
    sharded = jax.shard_map(
        lambda *args: mla_decode(*args, scale=SCALE, latent=LATENT),
        mesh=mesh,
        in_specs=(heads, whole, whole, whole),
        out_specs=heads,
        check_vma=False,
    )
    q, cache, *ints = case
    out = jax.jit(sharded)(jnp.asarray(q, dtype), jnp.asarray(cache, dtype), *ints)
    np.testing.assert_allclose(
        np.asarray(out, np.float32), naive(*case, dtype), atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize(("lengths", "reads"), [([0, 0], 0), ([0, 128], 1), ([129, 3], 2)])
def test_blocks_past_the_longest_row_are_not_read(lengths, reads, monkeypatch):
    seen = []

    def counting(cache, pages, first, *rest):
        jax.debug.callback(lambda at: seen.append(int(at)), first)
        return paging.read_latent_block(cache, pages, first, *rest)

    monkeypatch.setattr(xla, "read_latent_block", counting)
    case = make_case(lengths, width=40)
    step = jax.jit(lambda *a: mla_decode(*a, scale=SCALE, latent=LATENT, backend="xla"))
    jax.block_until_ready(step(*case))
    jax.effects_barrier()
    assert len(seen) == reads


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_stays_bounded(dtype):
    """No copy of the cache (36 MiB in f32) and none of a whole row's latents (8 x 4.5 MiB)."""
    shapes = [((8, 16, 576), dtype), ((1025, 16, 576), dtype), ((8, 128), "int32"), ((8,), "int32")]
    args = [jax.ShapeDtypeStruct(*s) for s in shapes]
    step = jax.jit(lambda *a: mla_decode(*a, scale=1.0, latent=512, backend="xla"))
    memory = step.lower(*args).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 12 << 20


def test_shapes_that_do_not_fit_are_refused():
    q, cache, table, lengths = make_case([3, 4])
    with pytest.raises(ValueError, match=r"q \(2, 4, 31\) .* fit cache \(13, 8, 32\)"):
        attend(q[..., :-1], cache, table, lengths)
    for latent in 0, 33:
        with pytest.raises(ValueError, match=rf"latent {latent} do not fit cache"):
            attend(q, cache, table, lengths, latent=latent)
    with pytest.raises(ValueError, match=r"lengths \(1,\) differ in rows"):
        attend(q, cache, table, lengths[:1])
    with pytest.raises(ValueError, match=r"page_table \(1, 6\) .* differ in rows"):
        attend(q, cache, table[:1], lengths)
    with pytest.raises(ValueError, match=r"expected q \[\., N, \.\], cache \[P, Z, R\+C\]"):
        attend(q, cache[:, None], table, lengths)


def test_an_unknown_back_end_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'cudnn' is not one of auto, .*, reference, xla"):
        attend(*make_case([3]), backend="cudnn")
