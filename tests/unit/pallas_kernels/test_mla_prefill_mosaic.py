"""Latent prefill on Hopper, interpreted on a CPU with race detection: numbers, poison, seeded bugs.

Every case has several windows or several key blocks per slot of the ring.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_checks import Race, attended, interpreted, seeded

from pallas_kernels.mla_prefill import mla_prefill, mosaic_gpu, reference, window
from pallas_kernels.mla_prefill.cost import cost

TOKENS, ROWS, WIDTH, PAGE_SIZE = 128, 3, 44, 16  # rows of up to 704 positions, 5.5 key blocks
SCALE = 192**-0.5
TOLERANCE = 3e-3  # of averages of values of about 0.25, so that bf16 itself rounds by less


def make_case(
    chunks, *, tokens=TOKENS, heads=1, page_size=PAGE_SIZE, latent=64, seed=0, order=None
):
    """bf16 q [T, N, 192], cache, rows, positions, table, w_uk, w_uv; page 0 is never used."""
    rng = np.random.default_rng(seed)
    pad = tokens - sum(n for *_, n in chunks)
    rows = np.concatenate([np.full(n, row) for row, _, n in chunks] + [np.full(pad, -1)])
    positions = np.concatenate([np.arange(p, p + n) for _, p, n in chunks] + [np.zeros(pad)])
    if order is not None:
        shuffled = np.random.default_rng(order).permutation(tokens)
        rows, positions = rows[shuffled], positions[shuffled]
    width = WIDTH * PAGE_SIZE // page_size
    table = 1 + rng.permutation(ROWS * width).reshape(ROWS, width)

    def normal(*shape, scale=1.0):
        return jnp.asarray(rng.standard_normal(shape, np.float32) * scale, jnp.bfloat16)

    q = normal(tokens, heads, 192)
    cache = normal(1 + ROWS * width, page_size, latent + 64)
    weights = [normal(heads, 128, latent, scale=s * latent**-0.5) for s in (1, 0.25)]
    return q, cache, *(a.astype(np.int32) for a in (rows, positions, table)), *weights


def run(case, module=mosaic_gpu, **options):
    return interpreted(
        functools.partial(module.mla_prefill, scale=SCALE, interpret=True, **options), *case
    )


def truth(case):
    """Of the same bf16 inputs, in f32."""
    case = [a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else jnp.asarray(a) for a in case]
    return np.asarray(jax.jit(functools.partial(reference.mla_prefill, scale=SCALE))(*case))


def check(case, **options):
    ours, want = run(case, **options), truth(case)
    np.testing.assert_allclose(ours, want, atol=TOLERANCE, rtol=0)
    assert (ours[case[2] < 0] == 0).all()


@pytest.mark.parametrize(
    ("chunks", "options"),
    [
        ([(0, 0, 1), (1, 14, 1), (2, 15, 1), (0, 16, 2)], {"splits": 1}),
        pytest.param([(1, 576, 128)], {"splits": 1}, marks=pytest.mark.slow),
        ([(1, 576, 128)], {"splits": 3}),  # five key blocks and a half, one window
        pytest.param([(1, 576, 128)], {"window_keys": 256}, marks=pytest.mark.slow),
        ([(2, 570, 70), (0, 0, 20), (1, 255, 30)], {"window_keys": 384, "splits": 1}),
    ],
    ids=["around a page", "one row", "in three parts", "in windows", "three rows in windows"],
)
def test_it_is_causal_attention(chunks, options):
    check(make_case(chunks), **options)


def test_heads_blocks_and_any_order_of_tokens():
    chunks = [(2, 100, 60), (0, 0, 40), (1, 127, 50)]
    check(make_case(chunks, tokens=150, heads=2, page_size=8, order=1), splits=1)


def test_a_batch_of_padding_gives_zeros():
    q, *rest = make_case([])
    case = (q * jnp.nan, *rest)
    assert (run(case, splits=1) == 0).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's own matmul
def test_what_is_not_attended_never_reaches_a_result():
    q, cache, rows, positions, table, *weights = make_case([(0, 260, 40), (2, 100, 30)])
    options = {"window_keys": 256, "splits": 1}
    clean = run((q, cache, rows, positions, table, *weights), **options)
    live = attended(table, [300, 0, 130], PAGE_SIZE, len(cache))
    poison = np.where(np.arange(len(cache)) % 2, np.nan, np.inf)[:, None, None]
    cache = jnp.where(live[..., None], cache, poison).astype(cache.dtype)
    q = jnp.where(rows[:, None, None] >= 0, q, jnp.nan)
    table = table.copy()
    table[0, 19:], table[1], table[2, 9:] = 2**30, -(2**30), -1
    ours = run((q, cache, rows, positions, table, *weights), **options)
    np.testing.assert_array_equal(ours, clean)


# A missing wait for the queries is not among them: one warpgroup loads them and then the keys, and
# interpret mode has its loads arrive in order, which the hardware does not promise.
BUGS = {
    "keys not awaited": ("mosaic.wait(key_here.at[slot])", "None"),
    "values not awaited": ("mosaic.wait(value_here.at[slot])", "None"),
    "keys overwritten early": (
        "mosaic.when(n >= STAGES)(lambda: mosaic.wait(key_free.at[slot]))",
        "None",
    ),
    "values overwritten early": (
        "mosaic.when(n >= STAGES)(lambda: mosaic.wait(value_free.at[slot]))",
        "None",
    ),
    "sums not committed": ("mosaic.commit()", "None"),
    "a token sees the next": ("position + (start_ref[r] + 1)", "position + (start_ref[r] + 2)"),
    "a token does not see itself": ("position + (start_ref[r] + 1)", "position + start_ref[r]"),
    "rows see each other": ("jnp.where(row_of == r, ", "jnp.where(row_of >= 0, "),
    "the last key block left out": ("end + (KEY_BLOCK - 1), 0)", "end, 0)"),
    "nothing shrinks": ("acc *= mosaic.across(decay, acc)", "acc *= 1.0"),
}


ALWAYS = (
    "keys not awaited", "keys overwritten early", "sums not committed", "a token sees the next",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ALWAYS else pytest.mark.slow) for n in BUGS]
)
def test_seeded_bugs_are_caught(name):
    case = make_case([(1, 540, 90), (0, 3, 30)])
    broken = seeded(mosaic_gpu, "256 << 20", "256 << 20  # a copy")
    broken.attend = seeded(window, *BUGS[name]).attend
    with pytest.raises((Race, AssertionError, jax.errors.JaxRuntimeError)):
        np.testing.assert_allclose(run(case, broken, splits=1), truth(case), atol=TOLERANCE)


def test_a_copy_without_a_bug_passes():
    """What the seeded bugs are compared with."""
    case = make_case([(1, 540, 90), (0, 3, 30)])
    copy = seeded(mosaic_gpu, "256 << 20", "256 << 20  # a copy")
    copy.attend = seeded(window, "STAGES = 2", "STAGES = 2  # a copy").attend
    ours = run(case, copy, splits=1)
    np.testing.assert_allclose(ours, truth(case), atol=TOLERANCE, rtol=0)


def operands(**changes):
    """Shapes of DeepSeek-R1's attention, 16 heads, 8 rows of up to 131,072 positions."""
    bf16, i32 = jnp.bfloat16, jnp.int32
    shapes = {
        "q": ((2048, 16, 192), bf16),
        "cache": ((4096, 64, 576), bf16),
        "rows": ((2048,), i32),
        "positions": ((2048,), i32),
        "page_table": ((8, 2048), i32),
        "w_uk": ((16, 128, 512), bf16),
        "w_uv": ((16, 128, 512), bf16),
    } | changes
    return [jax.ShapeDtypeStruct(*s) for s in shapes.values()]


def lowered(*args, backend="auto", scale=SCALE):
    step = jax.jit(functools.partial(mla_prefill, scale=scale, backend=backend))
    return step.trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_programs_for_cuda_take_the_kernel_where_it_fits():
    assert "mosaic_gpu" in lowered(*operands())
    f32 = {
        name: (shape, jnp.float32)
        for name, shape in {
            "q": (2048, 16, 192), "cache": (4096, 64, 576),
            "w_uk": (16, 128, 512), "w_uv": (16, 128, 512),
        }.items()
    }  # fmt: skip
    assert "mosaic_gpu" not in lowered(*operands(**f32))


def test_no_array_holds_all_plain_keys():
    """8 rows of 131,072 positions would be 4,194,304 keys and values of heads in 8 GiB."""
    sizes = [
        int(np.prod([int(n) for n in dims.split("x") if n]))
        for dims in re.findall(r"tensor<((?:\d+x)+)(?:bf16|f32)>", lowered(*operands()))
    ]
    assert max(sizes) == 4096 * 64 * 576  # the cache itself
    assert max(n for n in sizes if n != max(sizes)) == mosaic_gpu.WINDOW_KEYS * 16 * 256


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"q": ((2048, 16, 192), jnp.float32)}, "q is float32, not bfloat16"),
        ({"cache": ((4096, 64, 576), jnp.float16)}, "cache is float16, not bfloat16"),
        (
            {"q": ((2048, 16, 160), jnp.bfloat16), "cache": ((4096, 64, 544), jnp.bfloat16)},
            "C = 32 is not a multiple of 64",
        ),
        (
            {"q": ((2048, 16, 128), jnp.bfloat16), "cache": ((4096, 64, 512), jnp.bfloat16)},
            "C = 0 is not a multiple of 64",
        ),
        (
            {"w_uv": ((16, 256, 512), jnp.bfloat16)},
            r"Hn \+ C = 128 \+ 64 and Hv = 256 need \d+ bytes of shared memory, of 232448",
        ),
        (
            {
                "q": ((2048, 16, 256), jnp.bfloat16),
                "w_uk": ((16, 192, 512), jnp.bfloat16),
                "w_uv": ((16, 64, 512), jnp.bfloat16),
            },
            r"Hn \+ C = 192 \+ 64 and Hv = 64 need \d+ bytes of shared memory, of 232448",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name_and_left_to_xla(changes, reason):
    args = operands(**changes)
    with pytest.raises(ValueError, match=f"backend: 'mosaic_gpu' does not take .*: {reason}"):
        lowered(*args, backend="mosaic_gpu")
    assert "mosaic_gpu" not in lowered(*args)


@pytest.mark.parametrize("scale", [0.0, -0.07])
def test_a_scale_that_is_not_positive_is_left_to_xla(scale):
    """The kernel's softmax takes a row's largest product for its largest score."""
    with pytest.raises(
        ValueError, match=f"backend: 'mosaic_gpu' .*: scale {scale} is not positive"
    ):
        lowered(*operands(), backend="mosaic_gpu", scale=scale)
    assert "mosaic_gpu" not in lowered(*operands(), scale=scale)


def test_cost():
    """One row of 3 tokens behind 2: 3 + 4 + 5 pairs, 5 keys, two heads of 128 + 64 and 128."""
    ours = cost([(2, 3)], heads=2, nope=128, rotated=64, latent=512, v_dim=128)
    assert ours.flops == 2 * 2 * (12 * 320 + 5 * 512 * 256)
    assert ours.bytes == 2 * (3 * 2 * 192 + 3 * 2 * 128 + 5 * 576 + 2 * 256 * 512)
