"""Hopper's prefill kernel in interpret mode: numbers, poison, and seeded bugs that must be seen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import Race, attended, interpreted, seeded

from pallas_kernels.paged_prefill import mosaic_gpu, paged_prefill, tiles
from pallas_kernels.paged_prefill.cost import cost

SCALE = 0.3
TOLERANCE = 3e-3  # of averages, in bf16, of values of at most 1
ROWS = 3


def make_case(chunks, *, tokens, heads=8, kv_heads=1, head_dim=64, page_size=16):
    """q, cache, rows, positions, table; whatever no row reads is NaN.

    Chunks are (row, first position, tokens), side by side in the batch; the rest is padding.
    """
    rng = np.random.default_rng(0)
    pad = tokens - sum(n for *_, n in chunks)
    rows = np.concatenate([np.full(n, row) for row, _, n in chunks] + [np.full(pad, -1)])
    positions = np.concatenate([np.arange(p, p + n) for _, p, n in chunks] + [np.zeros(pad)])
    lengths = [max([p + n for r, p, n in chunks if r == row], default=0) for row in range(ROWS)]
    width = max(-(-n // page_size) for n in lengths) + 1
    q = rng.standard_normal((tokens, heads, head_dim))
    cache = rng.uniform(-1, 1, (1 + ROWS * width, kv_heads, 2, page_size, head_dim))
    table = 1 + rng.permutation(ROWS * width).reshape(ROWS, width)
    live = attended(table, lengths, page_size, len(cache))
    cache = np.where(live[:, None, None, :, None], cache, np.nan)
    for row, length in enumerate(lengths):
        table[row, -(-length // page_size) :] = 2**30
    ints = (jnp.asarray(a, jnp.int32) for a in (rows, positions, table))
    return jnp.asarray(q, "bfloat16"), jnp.asarray(cache, "bfloat16"), *ints


def attend(case, backend):
    return interpreted(functools.partial(paged_prefill, scale=SCALE, backend=backend), *case)


def truth(case):
    """The f32 reference of the same numbers, and zeros for padding."""
    q, cache, rows, positions, table = case
    table = jnp.where(table < len(cache), table, 0)
    case = q.astype(jnp.float32), cache.astype(jnp.float32), rows, positions, table
    return np.where(np.asarray(rows)[:, None, None] < 0, 0, attend(case, "reference"))


CASES = {
    "rows out of order, one of them twice": ([(2, 0, 9), (0, 15, 18), (2, 9, 7)], {"tokens": 40}),
    "later than a ring of blocks": (
        [(1, 640, 20)],
        {"tokens": 20, "heads": 2, "head_dim": 128, "page_size": 64},
    ),
    "pages that do not fill a block, heads that do not fill a tile": (
        [(0, 120, 3), (1, 0, 1)],
        {"tokens": 8, "heads": 6, "kv_heads": 2, "page_size": 24},
    ),
}
MORE = {
    "padding alone": ([], {"tokens": 4}),
    "tokens of two rows in turns, one of them backwards": (
        [c for i in range(12) for c in ((0, 130 + i, 1), (1, 40 - i, 1))],
        {"tokens": 24},
    ),
    "pages of a block": (
        [(0, 0, 130), (1, 255, 2)],
        {"tokens": 140, "heads": 2, "kv_heads": 2, "head_dim": 128, "page_size": 128},
    ),
    "small pages, one head a group": ([(0, 5, 70)], {"tokens": 70, "heads": 1, "page_size": 8}),
}


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)
def test_it_is_causal_attention_and_nothing_unread_reaches_it(name):
    chunks, shape = (CASES | MORE)[name]
    case = make_case(chunks, **shape)
    ours = attend(case, "mosaic_interpret")
    np.testing.assert_allclose(ours, truth(case), atol=TOLERANCE)
    assert (ours[np.asarray(case[2]) < 0] == 0).all()


def test_xla_is_as_close():
    case = make_case([(2, 0, 9), (0, 15, 18), (2, 9, 7)], tokens=40)
    np.testing.assert_allclose(attend(case, "xla"), truth(case), atol=TOLERANCE)


BUGS = {
    "keys not waited for": (
        "await_keys = functools.partial(mosaic.wait, key_here)",
        "await_keys = lambda: None",
    ),
    "a slot overwritten while in use": (
        "mosaic.when(block >= STAGES)(functools.partial(mosaic.wait, free.at[slot]))",
        "pass",
    ),
    "result not committed": ("mosaic.commit()\n            mosaic.store", "mosaic.store"),
    "one key too many": ("visible = at < mosaic", "visible = at <= mosaic"),
    "one value too many": ("live - part * TILE_ROWS)", "live - part * TILE_ROWS + 1)"),
}
MORE_BUGS = {
    "values not waited for": (
        "                else:\n                    mosaic.wait(v_here.at[slot])\n",
        "",
    ),
    "values of no token kept": (
        "mosaic.clear_rows(v_ring.at[slot, mine], live - part * TILE_ROWS)",
        "pass",
    ),
    "one key too few": ("visible = at < mosaic", "visible = at + 1 < mosaic"),
    "a block too many without a mask": (
        "full = lax.div(shortest_ref[tile], jnp.int32(keys))",
        "full = blocks",
    ),
    "the wrong pages": ("following = page_ids(block + 1)", "following = page_ids(block)"),
}


@pytest.mark.parametrize(
    "name", [None, *BUGS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_BUGS)]
)
def test_seeded_bugs_are_caught(name):
    # Six blocks in a ring of three stages: five in full, and one in part.
    case = make_case([(0, 700, 8)], tokens=8, heads=16, page_size=64)
    kernel = mosaic_gpu if name is None else seeded(mosaic_gpu, *(BUGS | MORE_BUGS)[name])
    run = functools.partial(kernel.paged_prefill, scale=SCALE, interpret=True)
    try:
        error = np.abs(interpreted(run, *case) - truth(case)).max()
    except Race:
        error = np.inf
    assert (error < TOLERANCE) == (name is None)


sort = jax.jit(tiles.sort, static_argnums=(2, 3))


@given(rows=st.lists(st.integers(-1, ROWS - 1), min_size=40, max_size=40), seed=st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_tiles_hold_each_token_once_with_its_own_row_and_limit(rows, seed):
    rows = np.array(rows)
    positions = np.random.default_rng(seed).integers(0, 500, 40)
    order = sort(*(jnp.asarray(a, jnp.int32) for a in (rows, positions)), ROWS, 8)
    token, place, limits, row, longest, shortest = (np.asarray(a) for a in order)
    (live,) = np.nonzero(rows >= 0)
    assert sorted(token[token < 40]) == live.tolist()
    np.testing.assert_array_equal(token[place[live]], live)
    assert (place[rows < 0] == token.size).all()
    for tile, tokens in enumerate(token.reshape(-1, 8)):
        mine = tokens[tokens < 40]
        np.testing.assert_array_equal(rows[mine], row[tile] if mine.size else [])
        assert (np.diff(mine) > 0).all()  # a row's tokens keep their order
        wanted = np.where(tokens < 40, positions[np.minimum(tokens, 39)] + 1, 0)
        np.testing.assert_array_equal(limits[tile], wanted)
        seen = wanted[wanted > 0]
        assert (longest[tile], shortest[tile]) == (max(seen, default=0), min(seen, default=0))
    used = [-(-(rows == row).sum() // 8) for row in range(ROWS)]
    assert (longest > 0).sum() == sum(used)
    assert (longest[: sum(used)] > 0).all()


def test_auto_is_the_kernel_on_cuda_where_it_takes_the_operands():
    q, cache, *ints = make_case([(0, 0, 4)], tokens=8)
    step = jax.jit(functools.partial(paged_prefill, scale=SCALE))
    for dtype, kernel in (("bfloat16", True), ("float32", False)):
        traced = step.trace(q, cache.astype(dtype), *ints)
        assert ("mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()) == kernel


def test_what_it_does_not_take_is_refused_with_the_reason():
    q, cache, *ints = make_case([(0, 0, 4)], tokens=8)
    for operands, reason in [
        ((q, cache.astype("float32")), "cache float32 are not"),
        ((q[..., :32], cache[..., :32]), "head dim 32 is not one of 64, 128"),
        ((q, cache[:, :, :, :12]), "page size 12 is not a multiple of 8"),
        ((jnp.tile(q, (1, 17, 1)), cache), "136 query heads per KV head are more than 128"),
    ]:
        with pytest.raises(ValueError, match=f"'mosaic_gpu' does not take .*: .*{reason}"):
            attend((*operands, *ints), "mosaic_gpu")
    with pytest.raises(ValueError, match="cache: uint8"):
        attend((q, cache.astype("uint8"), *ints), "xla")


def test_cost_counts_each_operand_once_and_the_pairs_of_the_mask():
    q, cache, *_ = make_case([(0, 13, 3), (1, 0, 16)], tokens=19)
    ours = cost([(13, 3), (0, 16)], num_heads=8, kv_heads=1, head_dim=64)
    assert ours.bytes == 2 * q.nbytes + cache[:2].nbytes
    assert ours.flops == 2 * 2 * 8 * 64 * (14 + 15 + 16 + sum(range(1, 17)))
