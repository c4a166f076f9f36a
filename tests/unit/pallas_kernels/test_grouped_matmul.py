"""Grouped matmuls: every back end against plain loops, the kernel interpreted with race detection.

Depths of 6 steps fill the kernel's ring of 4 stages and begin it again.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_checks import Race, interpreted, seeded

from pallas_kernels.grouped_matmul import grouped_matmul, mosaic_gpu
from pallas_kernels.grouped_matmul.cost import cost

TOLERANCE = 3e-3  # of results of about 0.13, half a unit of bf16 in the largest


def make_case(sizes, rows, *, depth=384, width=64, matrices=1, dtype=jnp.bfloat16, seed=0):
    """x [M, K], weights of [E, K, N], sizes [E]."""
    rng = np.random.default_rng(seed)

    def normal(*shape, scale=1.0):
        return jnp.asarray(rng.standard_normal(shape, np.float32) * scale, dtype)

    x = normal(rows, depth)
    weights = tuple(
        normal(len(sizes), depth, width, scale=depth**-0.5 / 8) for _ in range(matrices)
    )
    return x, weights, jnp.asarray(sizes, jnp.int32)


def naive(x, weights, sizes):
    """Group by group in f64; rows past the last are NaN."""
    x, *weights = (np.asarray(a, np.float64) for a in (x, *weights))
    out, at = np.full((len(x), weights[0].shape[2]), np.nan), 0
    for e, size in enumerate(np.asarray(sizes)):
        mine = slice(at, at + size)
        products = [x[mine] @ w[e] for w in weights]
        if len(products) == 2:
            products[0] *= products[1] / (1 + np.exp(-products[0]))
        out[mine], at = products[0], at + size
    return out


def run(case, module=mosaic_gpu):
    return interpreted(functools.partial(module.grouped_matmul, interpret=True), *case)


def check(ours, case, atol=TOLERANCE):
    want = naive(*case)
    live = ~np.isnan(want[:, 0])
    assert live.sum() == case[2].sum()
    np.testing.assert_allclose(np.asarray(ours, np.float64)[live], want[live], atol=atol, rtol=0)


CASES = {
    "one warpgroup of rows": ([3, 0, 61, 1, 70, 0, 10], 150, {}),
    "two warpgroups of rows": ([130, 70], 220, {}),
    "gated, two columns of tiles": ([5, 100, 40], 145, {"matrices": 2, "width": 256, "depth": 128}),
    "two pieces of columns, twice": ([70, 58], 128, {"width": 512, "depth": 64}),
    "no rows at all": ([0, 0], 64, {"depth": 64}),
    "empty groups at the ends": ([0, 64, 64, 0], 128, {"depth": 64, "matrices": 2}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_kernel_is_a_grouped_matmul(case):
    sizes, rows, shape = case
    case = make_case(sizes, rows, **shape)
    check(run(case), case)


@pytest.mark.parametrize("backend", ["reference", "xla", "auto"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("matrices", [1, 2])
def test_other_back_ends_are_too(backend, dtype, matrices):
    case = make_case([3, 0, 5, 1], 12, depth=20, width=7, matrices=matrices, dtype=dtype)
    ours = jax.jit(functools.partial(grouped_matmul, backend=backend))(*case)
    assert ours.dtype == dtype
    assert ours.shape == (12, 7)
    check(ours, case, atol=1e-5 if dtype == jnp.float32 else TOLERANCE)


def test_rows_of_no_group_reach_no_result():
    x, weights, sizes = make_case([40, 0, 30], 100, depth=128)
    clean = run((x, weights, sizes))
    weights = tuple(w.at[1].set(jnp.nan) for w in weights)
    ours = run((x.at[70:].set(jnp.nan), weights, sizes))
    np.testing.assert_array_equal(ours[:70], clean[:70])


BUGS = {
    "rows and matrices not awaited": ("mosaic.wait(here.at[slot])", "None"),
    "a stage loaded while it is read": (
        "mosaic.when(i >= stages)(lambda: mosaic.wait(free.at[slot]))",
        "None",
    ),
    "results not committed": ("mosaic.commit()", "None"),
    "rows of others overwritten": ("mosaic.when(count & size != 0)", "mosaic.when(size == 64)"),
    "a step left out": (
        "lax.fori_loop(0, steps, step, None)\n                mosaic.wait",
        "lax.fori_loop(1, steps, step, None)\n                mosaic.wait",
    ),
    "the wrong group": (
        "group = jnp.minimum(jnp.sum(tile_ends <= index",
        "group = jnp.minimum(jnp.sum(tile_ends < index",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_seeded_bugs_are_caught(name):
    case = make_case([60, 70], 130)
    with pytest.raises((Race, AssertionError, jax.errors.JaxRuntimeError)):
        check(run(case, seeded(mosaic_gpu, *BUGS[name])), case)


def shapes(x=(64, 128), weights=(2, 128, 64), dtype=jnp.bfloat16):
    return (
        jax.ShapeDtypeStruct(x, dtype),
        (jax.ShapeDtypeStruct(weights, dtype),),
        jax.ShapeDtypeStruct(weights[:1], jnp.int32),
    )


def lowered(*args, **options):
    step = jax.jit(functools.partial(grouped_matmul, **options))
    return step.trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_programs_for_cuda_take_the_kernel_where_it_fits():
    assert "mosaic_gpu" in lowered(*shapes())
    for args, reason in (
        (shapes(dtype=jnp.float32), "x is float32, not bfloat16"),
        (shapes((64, 96), (2, 96, 64)), "K = 96 is not a multiple of 64"),
        (shapes((64, 64), (2, 64, 32)), "N = 32 is not a multiple of 64"),
    ):
        assert "mosaic_gpu" not in lowered(*args)
        with pytest.raises(ValueError, match=f"backend: 'mosaic_gpu' does not take .*: {reason}"):
            lowered(*args, backend="mosaic_gpu")


def test_what_does_not_fit_is_refused():
    x, weights, sizes = make_case([3, 2], 6, depth=8, width=4)
    with pytest.raises(ValueError, match="weights: 3 arrays, expected one or two"):
        grouped_matmul(x, weights * 3, sizes)
    with pytest.raises(ValueError, match=r"weights: \(2, 8, 4\) .* must be \(2, 7, 4\)"):
        grouped_matmul(x[:, :7], weights, sizes)
    with pytest.raises(ValueError, match=r"expected x \[M, K\], weights \[E, K, N\], sizes \[E\]"):
        grouped_matmul(x[0], weights, sizes)
    with pytest.raises(ValueError, match="'cudnn' is not one of auto, mosaic_gpu"):
        grouped_matmul(x, weights, sizes, backend="cudnn")


def test_cost():
    ours = cost(10, 4, 3, groups=2, matrices=2)
    assert ours.flops == 2 * 10 * 4 * 3 * 2
    assert ours.bytes == 2 * (10 * 4 + 10 * 3 + 2 * 2 * 4 * 3)
