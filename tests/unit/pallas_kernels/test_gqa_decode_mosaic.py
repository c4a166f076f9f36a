"""Hopper's decode kernel in interpret mode: numbers, poison, and seeded bugs that must be seen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_checks import Race, attended, interpreted, seeded

from pallas_kernels.gqa_decode import gqa_decode, merging, mosaic_gpu
from pallas_kernels.gqa_decode.cost import cost

SCALE = 0.3
TOLERANCE = 3e-3  # of averages, in bf16, of values of at most 1


def make_case(lengths, *, heads=4, kv_heads=1, head_dim=64, page_size=16, dtype="bfloat16"):
    """q, cache, page table, lengths, and a cache_scale for bytes; whatever no row reads is NaN."""
    rng = np.random.default_rng(0)
    rows = len(lengths)
    width = max(1, -(-max(lengths) // page_size)) + 1
    q = rng.standard_normal((rows, heads, head_dim))
    cache = rng.uniform(-1, 1, (1 + rows * width, kv_heads, 2, page_size, head_dim))
    table = 1 + rng.permutation(rows * width).reshape(rows, width).astype(np.int32)
    live = attended(table, lengths, page_size, len(cache))
    cache = np.where(live[:, None, None, :, None], cache, np.nan)
    for row, length in enumerate(lengths):
        table[row, -(-length // page_size) :] = 2**30
    case = [jnp.asarray(q, "bfloat16"), None, jnp.asarray(table), jnp.asarray(lengths, "int32")]
    if dtype == "bfloat16":
        case[1] = jnp.asarray(cache, dtype)
        return case
    case[1] = jax.lax.bitcast_convert_type(jnp.asarray(cache * 2, "float8_e4m3fn"), jnp.uint8)
    return [*case, jnp.asarray(rng.uniform(0.2, 0.5, (kv_heads, 2)), jnp.float32)]


def attend(case, backend, scale=SCALE):
    def op(q, cache, table, lengths, cache_scale=None):
        return gqa_decode(
            q, cache, table, lengths, scale=scale, cache_scale=cache_scale, backend=backend
        )

    return interpreted(op, *case)


def truth(case):
    """The f32 reference of the same numbers."""
    q, cache, table, lengths, *cache_scale = case
    if not cache_scale:
        cache = cache.astype(jnp.float32)
    table = jnp.where(table < len(cache), table, 0)
    return attend([q.astype(jnp.float32), cache, table, lengths, *cache_scale], "reference")


CASES = {
    "around a page": ([1, 15, 16, 17, 0], {}),
    "around a block, a long row, several KV heads": ([63, 65, 300], {"kv_heads": 2}),
    "more blocks than stages, pages of a block": (
        [400, 64],
        {"heads": 8, "head_dim": 128, "page_size": 64},
    ),
    "pages that do not fill a tile": ([49, 260], {"page_size": 24}),
    "no tokens": ([0], {}),
}
MORE = {
    "pages of two blocks": ([129, 250], {"head_dim": 128, "page_size": 128}),
    "small pages, one head a group": ([9, 100], {"heads": 2, "kv_heads": 2, "page_size": 8}),
    "a group of several tiles": ([70], {"heads": 72}),
}
FAST = [(name, "bfloat16") for name in CASES]
FAST.append(("more blocks than stages, pages of a block", "uint8"))
SLOW = [(n, d) for n in CASES | MORE for d in ("bfloat16", "uint8") if (n, d) not in FAST]


@pytest.mark.parametrize(
    ("name", "dtype"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_it_is_attention_and_nothing_unread_reaches_it(name, dtype):
    lengths, shape = (CASES | MORE)[name]
    case = make_case(lengths, dtype=dtype, **shape)
    ours = attend(case, "mosaic_interpret")
    np.testing.assert_allclose(ours, truth(case), atol=TOLERANCE)
    assert (ours[np.array(lengths) == 0] == 0).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "uint8"])
def test_xla_is_as_close(dtype):
    case = make_case([1, 15, 16, 17, 0, 300], dtype=dtype, kv_heads=2)
    np.testing.assert_allclose(attend(case, "xla"), truth(case), atol=TOLERANCE)


@pytest.mark.parametrize("size", [2.0**20, 2.0**-40])
def test_queries_beside_bytes_may_be_of_any_size(size):
    """Larger ones than f16 holds, and smaller; each head's of its own size."""
    q, *rest = make_case([40, 17], dtype="uint8", kv_heads=2)
    of_head = jnp.asarray([1, 2.0**-9, 2.0**-3, 0], q.dtype)[:, None]
    ours = attend([q * of_head * size, *rest], "mosaic_interpret", SCALE / size)
    np.testing.assert_allclose(ours, truth([q * of_head, *rest]), atol=TOLERANCE)


REFILL = "            if not quantized:\n                mosaic.when(more)(refill)\n"
PRODUCTS = "            products = mosaic.scores(q_tile, k)\n"
BUGS = {
    "pages not waited for": ("            mosaic.wait(here.at[slot])\n", ""),
    "a slot overwritten before its matmuls": (PRODUCTS, REFILL + PRODUCTS),
    "result not committed": ("        mosaic.commit()\n        for i, part", "        for i, part"),
    "one key too many": ("axis=1) < live", "axis=1) <= live"),
    "one value too many": ("clear_rows, v, live)", "clear_rows, v, live + 1)"),
    "widened bytes not committed": (
        "                mosaic.commit()\n                mosaic.when",
        "                mosaic.when",
    ),
}
MORE_BUGS = {
    "one key too few": ("axis=1) < live", "axis=1) < live - 1"),
    "the wrong block prefetched": ("page_ids(block + stages + 1)", "page_ids(block + stages)"),
    "a widened value too many": ("of_bytes=True) + at < live", "of_bytes=True) + at <= live"),
}


@pytest.mark.parametrize(
    "name", [None, *BUGS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_BUGS)]
)
def test_seeded_bugs_are_caught(name):
    # Two pieces, each of more blocks than its ring has stages (three, or four of bytes).
    of_bytes = name is not None and "widened" in name
    dtype = "uint8" if of_bytes else "bfloat16"
    case = make_case([600], head_dim=128, page_size=64, dtype=dtype)
    kernel = mosaic_gpu if name is None else seeded(mosaic_gpu, *(BUGS | MORE_BUGS)[name])
    run = functools.partial(kernel.gqa_decode, scale=SCALE, interpret=True)
    try:
        error = np.abs(interpreted(run, *case) - truth(case)).max()
    except Race:
        error = np.inf
    assert (error < TOLERANCE) == (name is None)


MERGING_BUGS = {
    "halves not waited for": ("            mosaic.wait(here.at[slot])\n", ""),
    "a slot overwritten before it was read": (
        "            mosaic.wait(here.at[slot])\n",
        "            mosaic.wait(here.at[slot])\n"
        "            mosaic.when(piece + STAGES < end)(lambda: fetch(piece + STAGES, slot))\n",
    ),
    "the low halves forgotten": ("+ low.astype(jnp.float32)", ""),
    "result not committed": ("mosaic.commit()\n        mosaic.store", "mosaic.store"),
}


def merged(module):
    """What it makes of 5 pieces of three rows, the second of which has none, and the truth."""
    rng = np.random.default_rng(0)
    parts, lse = rng.standard_normal((5, 2, 8, 64)), rng.standard_normal((5, 2, 8)) * 4
    high = np.asarray(jnp.asarray(parts, jnp.bfloat16), np.float64)
    halves = jnp.asarray(np.stack([high, parts - high], axis=2), jnp.bfloat16)
    bounds, scale = jnp.array([0, 4, 4, 5], jnp.int32), jnp.array([0.5, 2], jnp.float32)
    padded = jnp.asarray(np.pad(lse, ((0, 0), (0, 0), (0, 56))), jnp.float32)
    run = functools.partial(module.merge, dtype=jnp.float32, interpret=True)
    ours = interpreted(run, halves, padded, bounds, scale)
    weights = np.exp2(lse)[..., None]
    want = np.zeros((3, 2, 8, 64))
    for row, mine in ((0, slice(4)), (2, slice(4, 5))):
        want[row] = (weights * parts)[mine].sum(0) / weights[mine].sum(0)
    return ours, want * np.asarray(scale)[:, None, None]


def test_merged_pieces_are_one_softmax():
    ours, want = merged(merging)
    np.testing.assert_allclose(ours, want, atol=2e-4)  # two halves keep 16 bits
    assert (ours[1] == 0).all()


@pytest.mark.parametrize("name", MERGING_BUGS)
def test_seeded_bugs_of_merging_are_caught(name):
    try:
        ours, want = merged(seeded(merging, *MERGING_BUGS[name]))
    except Race:
        return
    assert np.abs(ours - want).max() > 2e-4


def lowered_for_cuda(case, backend="auto"):
    step = jax.jit(functools.partial(gqa_decode, scale=SCALE, backend=backend))
    return step.trace(*case[:4]).lower(lowering_platforms=("cuda",)).as_text()


def test_auto_is_the_kernel_on_cuda_where_it_takes_the_operands():
    case = make_case([3, 40])
    assert "mosaic_gpu" in lowered_for_cuda(case)
    q, cache, *ints = case
    assert "mosaic_gpu" not in lowered_for_cuda([q, cache.astype("float32"), *ints])
    np.testing.assert_array_equal(attend(case, "auto"), attend(case, "xla"))  # on a CPU


def test_what_it_does_not_take_is_refused_with_the_reason():
    q, cache, *ints = make_case([3, 4])
    for operands, reason in [
        ((q, cache.astype("float32")), "cache float32 are not"),
        ((q.astype("float32"), cache), "q float32 and"),
        ((q[..., :32], cache[..., :32]), "head dim 32 is not one of 64, 128"),
        ((q, cache[:, :, :, :12]), "page size 12 is not a multiple of 8"),
    ]:
        with pytest.raises(ValueError, match=f"'mosaic_gpu' does not take .*: .*{reason}"):
            attend([*operands, *ints], "mosaic_gpu")


def test_bytes_need_a_scale_and_nothing_else_has_one():
    *case, cache_scale = make_case([3, 4], dtype="uint8", kv_heads=2)
    with pytest.raises(ValueError, match="cache_scale: a cache of uint8 with no cache_scale"):
        attend(case, "xla")
    with pytest.raises(ValueError, match=r"float32 \(2,\) is not float32 \(2, 2\)"):
        attend([*case, cache_scale[0]], "xla")
    case[1] = case[1].astype("bfloat16")
    with pytest.raises(ValueError, match="cache_scale: a cache of bfloat16 with a cache_scale"):
        attend([*case, cache_scale], "xla")


def test_cost_counts_each_operand_once():
    q, cache, _, lengths = make_case([32, 16], heads=8, kv_heads=2)
    cache = cache[: (32 + 16) // 16]
    moved = 2 * q.nbytes + cache.nbytes + 4 * 3 + lengths.nbytes  # 3 entries of the table
    ours = cost([32, 16], num_heads=8, kv_heads=2, head_dim=64, page_size=16)
    assert ours.bytes == moved
    assert ours.flops == 2 * 2 * 48 * 8 * 64
