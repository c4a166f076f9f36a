"""Hopper's latent decode in interpret mode: numbers, poison, and seeded bugs that must be seen."""

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_checks import Race, attended, interpreted, seeded

from pallas_kernels import mosaic, mosaic_turned
from pallas_kernels.mla_decode import block, kernel, mla_decode, mosaic_gpu
from pallas_kernels.mla_decode.cost import cost
from pallas_kernels.mla_decode.merging import merge
from pallas_kernels.paging import MASKED

LATENT, ROTATED = 128, 64
SCALE = 0.2
TOLERANCE = 3e-3  # of averages, in bf16, of values of at most 1


def make_case(
    lengths,
    *,
    heads=4,
    latent=LATENT,
    rotated=ROTATED,
    page_size=16,
    dtype="bfloat16",
    poison=np.nan,
):
    """q, cache, page table, lengths, and a cache_scale for bytes; whatever no row reads: poison."""
    rng = np.random.default_rng(0)
    rows = len(lengths)
    width = max(1, -(-max(lengths) // page_size)) + 1
    q = rng.standard_normal((rows, heads, latent + rotated))
    cache = rng.uniform(-1, 1, (1 + rows * width, page_size, latent + rotated))
    table = 1 + rng.permutation(rows * width).reshape(rows, width).astype(np.int32)
    live = attended(table, lengths, page_size, len(cache))
    cache = np.where(live[..., None], cache, poison)
    for row, length in enumerate(lengths):
        table[row, -(-length // page_size) :] = 2**30
    case = [jnp.asarray(q, "bfloat16"), None, jnp.asarray(table), jnp.asarray(lengths, "int32")]
    if dtype == "bfloat16":
        case[1] = jnp.asarray(cache, dtype)
        return case
    case[1] = jax.lax.bitcast_convert_type(jnp.asarray(cache * 3, "float8_e4m3fn"), jnp.uint8)
    return [*case, jnp.asarray([0.3, 0.2], jnp.float32)]


def attend(case, backend, latent=LATENT, scale=SCALE):
    def op(q, cache, table, lengths, cache_scale=None):
        given = {"scale": scale, "latent": latent, "cache_scale": cache_scale, "backend": backend}
        return mla_decode(q, cache, table, lengths, **given)

    return interpreted(op, *case)


def truth(case, latent=LATENT):
    """The f32 reference of the same numbers."""
    q, cache, table, lengths, *cache_scale = case
    if not cache_scale:
        cache = cache.astype(jnp.float32)
    table = jnp.where(table < len(cache), table, 0)
    case = [q.astype(jnp.float32), cache, table, lengths, *cache_scale]
    return attend(case, "reference", latent)


CASES = {
    "around a page, fewer heads than columns": ([1, 15, 16, 17, 0], {"heads": 3}),
    "around a step, a long row in pieces": ([63, 64, 65, 300], {"heads": 2}),
    "DeepSeek's widths, more steps than blocks": (
        [330],
        {"heads": 16, "latent": 512, "page_size": 64},
    ),
    "no tokens": ([0], {"heads": 1}),
}
MORE = {
    "pages of two steps": ([129, 250], {"page_size": 128}),
    "nothing rotated": ([70], {"rotated": 0, "page_size": 8}),
    "a whole tile of heads": ([130], {"heads": 64, "latent": 512, "page_size": 64}),
    "three accumulators": ([150], {"latent": 384, "rotated": 192, "page_size": 32}),
}
FAST = [(name, "bfloat16") for name in CASES]
FAST.append(("around a step, a long row in pieces", "uint8"))
SLOW = [(n, d) for n in CASES | MORE for d in ("bfloat16", "uint8") if (n, d) not in FAST]


@pytest.mark.parametrize(
    ("name", "dtype"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_it_is_attention_and_nothing_unread_reaches_it(name, dtype):
    lengths, shape = (CASES | MORE)[name]
    case, latent = make_case(lengths, dtype=dtype, **shape), shape.get("latent", LATENT)
    ours = attend(case, "mosaic_interpret", latent)
    np.testing.assert_allclose(ours, truth(case, latent), atol=TOLERANCE)
    assert (ours[np.array(lengths) == 0] == 0).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "uint8"])
def test_xla_is_as_close(dtype):
    case = make_case([1, 15, 16, 17, 0, 300], dtype=dtype)
    np.testing.assert_allclose(attend(case, "xla"), truth(case), atol=TOLERANCE)


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_bytes_are_their_numbers_times_the_scales(backend):
    q, cache, table, lengths, cache_scale = make_case([40, 7, 0], dtype="uint8")
    table = jnp.where(table < len(cache), table, 0)
    numbers = jax.lax.bitcast_convert_type(cache, jnp.float8_e4m3fn).astype(jnp.float32)
    numbers *= np.where(np.arange(LATENT + ROTATED) < LATENT, *cache_scale)
    q = q.astype(jnp.float32)
    ours = attend([q, cache, table, lengths, cache_scale], backend)
    want = attend([q, jnp.nan_to_num(numbers), table, lengths], "reference")
    np.testing.assert_allclose(ours, want, atol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's inf - inf
def test_large_scores_do_not_overflow():
    q, *rest = make_case([200], poison=-np.inf)
    case = [q * 100, *rest]
    np.testing.assert_allclose(attend(case, "mosaic_interpret"), truth(case), atol=TOLERANCE)


@pytest.mark.parametrize("size", [2.0**20, 2.0**-40])
def test_queries_beside_bytes_may_be_of_any_size(size):
    """Larger ones than f16 holds, and smaller; each head's of its own size."""
    q, *rest = make_case([40, 17], dtype="uint8")
    of_head = jnp.asarray([1, 2.0**-9, 2.0**-3, 0], q.dtype)[:, None]
    ours = attend([q * of_head * size, *rest], "mosaic_interpret", scale=SCALE / size)
    np.testing.assert_allclose(ours, truth([q * of_head, *rest]), atol=TOLERANCE)


@pytest.mark.parametrize(
    ("lengths", "shape"),
    [
        ([70, 0, 130], {}),
        ([200, 1], {"heads": 100, "page_size": 24}),  # two tiles, one buffer of weights
        pytest.param([130], {"heads": 128, "latent": 512}, marks=pytest.mark.slow),
    ],
)
def test_whole_rows_need_no_merging(lengths, shape):
    """What a batch that fills the device does: one piece a row, written in bf16."""
    case, latent = make_case(lengths, **shape), shape.get("latent", LATENT)
    run = functools.partial(mosaic_gpu.mla_decode, scale=SCALE, latent=latent, interpret=True)
    whole = interpreted(functools.partial(run, cut=False), *case)
    np.testing.assert_allclose(whole, truth(case, latent), atol=TOLERANCE)


def test_pieces_are_merged_by_their_weights():
    """Rows of no piece, of one, and of more than are read at once, of which one has no weight."""
    rng = np.random.default_rng(0)
    bounds = np.array([0, 1, 1, 12], np.int32)
    parts = rng.uniform(-1, 1, (13, 8, 128)).astype(np.float32)
    lse = rng.standard_normal((13, 8)).astype(np.float32)
    lse += 0.3 * np.arange(13, dtype=np.float32)[:, None]  # the largest comes last
    lse[4] = MASKED
    parts[12] = np.nan  # unused
    op = functools.partial(merge, heads=2, interpret=True)
    ours = interpreted(op, parts, lse, bounds, np.array([0.5], np.float32))
    for row, (first, end) in enumerate(itertools.pairwise(bounds)):
        weights = np.exp2(lse[first:end].astype(np.float64))
        want = np.einsum("sn,snh->nh", weights, parts[first:end]) * 0.5
        want /= np.maximum(weights.sum(0), 1e-30)[:, None]
        np.testing.assert_allclose(ours[row], want[:2], atol=TOLERANCE)


BUGS = {
    "latents not waited for": ("        mosaic.wait(mine.filled.at[block])\n", ""),
    "a block refilled too early": (
        "            mosaic.wait(mine.emptied.at[block])\n\n        return block",
        "            pass\n\n        return block",
    ),
    "weights overwritten while summed": (
        "            mosaic.wait(mine.summed.at[buffer_of(step)])\n\n        return",
        "            pass\n\n        return",
    ),
    "one key too many": ("shape.heads, 0) < left", "shape.heads, 0) <= left"),
    "one value too many": ("shape.latent)], left)", "shape.latent)], left + 1)"),
}
MORE_BUGS = {
    "one key too few": ("shape.heads, 0) < left", "shape.heads, 0) < left - 1"),
    "weights not waited for": (
        "        mosaic.wait(mine.weighed.at[buffer])\n        shrink",
        "        shrink",
    ),
    "sums not shrunk": ("sums = [total * mosaic_turned.down(shrink, total)", "sums = [total"),
    "results staged over each other": ("        mosaic.drain_stores()", "        pass"),
}
BYTE_BUGS = {
    "bytes not waited for": ("            mosaic.wait(mine.raw_filled.at[buffer])\n", ""),
    "the wrong part refilled": (
        "                fetch_part(part + RAW_BUFFERS,",
        "                fetch_part(part + RAW_BUFFERS - 1,",
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        None,
        *BUGS,
        *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_BUGS | BYTE_BUGS),
    ],
)
def test_seeded_bugs_are_caught(monkeypatch, name):
    # One piece with more steps than there are blocks and buffers, its last step in part.
    bugs = BUGS | MORE_BUGS | BYTE_BUGS
    latent = 512 if name == "results staged over each other" else LATENT
    case = make_case([300], latent=latent, dtype="uint8" if name in BYTE_BUGS else "bfloat16")
    if name is not None:
        monkeypatch.setattr(mosaic_gpu, "kernel", seeded(kernel, *bugs[name]))
    op = mosaic_gpu.mla_decode.__wrapped__  # not the jit, which would remember the kernel
    run = functools.partial(op, scale=SCALE, latent=latent, interpret=True, cut=False)
    try:
        error = np.abs(interpreted(run, *case) - truth(case, latent)).max()
    except Race:
        error = np.inf
    except jax.errors.JaxRuntimeError as e:
        # The interpreter counts completions of barriers and of stores, too.
        if not re.search(r"[Bb]arrier|operations completed before kernel finished", str(e)):
            raise
        error = np.inf
    assert (error < TOLERANCE) == (name is None)


def uncommitted(monkeypatch, module, dtype):
    """Writes to shared memory that the module's kernel announces without having committed them.

    Interpret mode lets a matmul see them all the same, so the order of the calls has to do.
    """
    calls = []

    def record(where, name):
        original = getattr(where, name)

        def call(*args, **kwargs):
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(where, name, call)

    for name in ("commit", "arrive", "store"):
        record(mosaic, name)
    for name in ("write", "write_turned"):
        record(mosaic_turned, name)
    monkeypatch.setattr(mosaic_gpu, "kernel", module)
    op = functools.partial(mosaic_gpu.mla_decode.__wrapped__, scale=SCALE, latent=LATENT)
    jax.make_jaxpr(op)(*make_case([300], dtype=dtype))
    found, pending = 0, False
    for name in calls:
        pending = name != "commit" and (pending or "write" in name)
        found += pending and name in ("arrive", "store")
    return found


@pytest.mark.parametrize(
    ("dtype", "commit"),
    [
        ("bfloat16", "        mosaic.commit()\n        mosaic.arrive(mine.weighed"),
        ("bfloat16", "        mosaic.commit()\n        mosaic.store("),
        ("uint8", "            mosaic.commit()  # of what was written for the matmuls, and read"),
    ],
)
def test_what_is_written_is_committed_before_it_is_announced(monkeypatch, dtype, commit):
    dropped = seeded(kernel, commit, commit.replace("mosaic.commit()", "pass"))
    assert uncommitted(monkeypatch, dropped, dtype) > 0
    monkeypatch.undo()
    assert uncommitted(monkeypatch, kernel, dtype) == 0


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("heads", [1, 8, 16, 17, 32, 33, 64, 65, 100, 128])
def test_blocks_fit_shared_memory_and_registers(heads, quantized):
    tiles, per_tile = mosaic_gpu.tile_heads(heads, quantized)
    assert tiles * per_tile >= heads
    assert per_tile % 8 == 0
    assert per_tile <= 64
    assert tiles * per_tile - heads < 8 * tiles
    shape = block.Shape(
        heads=per_tile, page_size=64, latent=512, width=576, scale=1.0, dtype=jnp.dtype("float32"),
        quantized=quantized, interpret=False,
    )  # fmt: skip
    q_or_out = max(2 * per_tile * 576, 2 * per_tile * shape.chunk * 4)
    used = q_or_out + 2 * 2 * 64 * 576 + shape.buffers * per_tile * (2 * 64 + 4)
    used += block.RAW_BUFFERS * 64 * shape.raw_columns if quantized else 0
    assert used + block.REDUCTION_BYTES + 1024 <= mosaic.SHARED_LIMIT
    loader, scorer, summer = shape.registers
    assert loader + scorer + 2 * summer <= 512
    assert 512 * per_tile // 256 < summer


def lowered_for_cuda(case, backend="auto"):
    step = functools.partial(mla_decode, scale=SCALE, latent=LATENT, backend=backend)
    return jax.jit(step).trace(*case[:4]).lower(lowering_platforms=("cuda",)).as_text()


def test_auto_is_the_kernel_on_cuda_where_it_takes_the_operands():
    case = make_case([3, 40])
    assert "mosaic_gpu" in lowered_for_cuda(case)
    q, cache, *ints = case
    assert "mosaic_gpu" not in lowered_for_cuda([q, cache.astype("float32"), *ints])
    np.testing.assert_array_equal(attend(case, "auto"), attend(case, "xla"))  # on a CPU


def test_bytes_without_a_rotated_part_become_a_kernel():
    *case, cache_scale = make_case([3], rotated=0, dtype="uint8")  # a width that 128 divides
    step = functools.partial(mla_decode, scale=SCALE, latent=LATENT, backend="mosaic_gpu")
    traced = jax.jit(lambda *operands: step(*operands[:4], cache_scale=operands[4])).trace(
        *case, cache_scale
    )
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("rows", "launches"), [(2, 2), (256, 1)])
def test_a_batch_that_fills_the_device_is_not_cut(rows, launches):
    lowered = lowered_for_cuda(make_case([1] * rows), "mosaic_gpu")
    assert len(re.findall(r"custom_call @mosaic_gpu", lowered)) == launches


def test_what_it_does_not_take_is_refused_with_the_reason():
    q, cache, *ints = make_case([3, 4])
    for operands, latent, reason in [
        ((q, cache.astype("float32")), LATENT, "cache float32 are not"),
        ((q.astype("float32"), cache), LATENT, "q float32 and"),
        ((q, cache), 64, "latent 64 is not a multiple of 128 up to 512"),
        ((q[..., :160], cache[..., :160]), LATENT, "width 160 is not a multiple of 64"),
        ((q, cache[:, :12]), LATENT, "page size 12 is not a multiple of 8"),
    ]:
        with pytest.raises(ValueError, match=f"'mosaic_gpu' does not take .*: .*{reason}"):
            attend([*operands, *ints], "mosaic_gpu", latent)


def test_bytes_need_a_scale_and_nothing_else_has_one():
    *case, cache_scale = make_case([3, 4], dtype="uint8")
    with pytest.raises(ValueError, match="cache_scale: a cache of uint8 with no cache_scale"):
        attend(case, "xla")
    with pytest.raises(ValueError, match=r"float32 \(3,\) is not float32 \(2,\)"):
        attend([*case, jnp.ones(3)], "xla")
    case[1] = case[1].astype("bfloat16")
    with pytest.raises(ValueError, match="cache_scale: a cache of bfloat16 with a cache_scale"):
        attend([*case, cache_scale], "xla")


def test_cost_counts_each_operand_once():
    q, cache, _, lengths = make_case([32, 16], heads=8)
    cache = cache[: (32 + 16) // 16]
    out = math.prod((2, 8, LATENT)) * 2
    moved = q.nbytes + cache.nbytes + out + 4 * 3 + lengths.nbytes  # 3 entries of the table
    ours = cost([32, 16], num_heads=8, latent=LATENT, rotated=ROTATED, page_size=16)
    assert ours.bytes == moved
    assert ours.flops == 2 * 48 * 8 * (LATENT + ROTATED) + 2 * 48 * 8 * LATENT
