"""What `make gpu-aot` must refuse, seeded: each must fail, by name. Needs the plugin it brings."""

import functools
import operator
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxdisagg.gpu_aot.chips import H200
from jaxdisagg.gpu_aot.job import run_all, run_kernel, run_step
from jaxdisagg.gpu_aot.kernel_cases import KernelCase
from jaxdisagg.gpu_aot.step_cases import STEP_CASES, Step, StepCase, lower_step
from jaxdisagg.step import StepPrograms
from pallas_kernels import mosaic
from pallas_kernels.cost import Cost

CONFIGS = Path(__file__).resolve().parents[2] / "scripts" / "model_configs"
NOTHING = Cost(0, 0)
# One layer of the real sizes: what a seed does to one it does to all.
DECODE = replace(next(case for case in STEP_CASES if case.program == "decode"), layers=1)


def products(count: int, columns: int) -> KernelCase:
    """A kernel that holds `count` products f32 [64, columns] in registers at once."""

    def body(q: Any, k: Any, out: Any, q_tile: Any, k_tile: Any, out_tile: Any, ready: Any) -> None:
        mosaic.load(q, q_tile, ready)
        mosaic.load(k, k_tile, ready)
        mosaic.wait(ready)
        held = [mosaic.scores(q_tile, k_tile.at[i]) for i in range(count)]
        for product in held:  # each is used before and after all others
            for other in held:
                product = jnp.exp2(product) * other
            out_tile[...] = product
            mosaic.commit()
            mosaic.store(out_tile, out)
            mosaic.drain_stores()

    launched = mosaic.launch(
        body,
        [jax.ShapeDtypeStruct((64, columns), jnp.float32)],
        grid={"block": 1},
        scratch=[
            mosaic.shared_tile((64, 64), jnp.bfloat16),
            mosaic.shared_tile((count, columns, 64), jnp.bfloat16),
            mosaic.shared_tile((64, columns), jnp.float32),
            mosaic.barriers(1, arrivals=2),
        ],
        name="seeded",
    )
    operands = (((64, 64), "bfloat16"), ((count, columns, 64), "bfloat16"))
    return KernelCase("seeded", f"{count} x {columns}", launched, operands, NOTHING)


def test_the_kernel_without_a_seed_passes():
    result = run_kernel(products(2, 64), H200)
    assert result.failures == []
    assert [kernel.name for kernel in result.kernels] == ["seeded"]


def test_a_kernel_that_spills_is_named():
    result = run_kernel(products(6, 128), H200)
    assert any("seeded: spills" in failure for failure in result.failures), result.failures
    assert result.kernels[0].spill_stores > 0


def test_a_kernel_with_too_large_a_tile_is_named():
    (failure,) = run_kernel(products(8, 256), H200).failures
    assert "hared memory" in failure
    assert "232448" in failure


def test_a_case_without_a_kernel_is_named():
    case = KernelCase("plain", "no kernel", jnp.sin, (((8,), "float32"),), NOTHING)
    assert run_kernel(case, H200).failures == ["no Mosaic GPU kernel in it"]


class Rewriting(StepPrograms):
    """Steps that select their caches anew as a whole: in place, and so lost to a remote writer."""

    def _decode(
        self, params: Any, caches: Any, seats: Any, context: Any, inputs: Any
    ) -> tuple[Any, Any, Any]:
        caches, *others = super()._decode(params, caches, seats, context, inputs)
        used = inputs.ints[0, 0] > 0
        return tuple(jnp.where(used, cache, 0) for cache in caches), *others


def rewriting(case: StepCase, folder: Path, devices: Sequence[jax.Device]) -> Step:
    """The step of `Rewriting`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxdisagg.gpu_aot.step_cases.StepPrograms", Rewriting)
        return lower_step(case, folder, devices)


def keeping(case: StepCase, folder: Path, devices: Sequence[jax.Device]) -> Step:
    """The decode step as it is, its caches not donated: they are copied first."""
    jit = jax.jit

    def without_donation(*arguments: Any, donate_argnames: Any, **options: Any) -> Any:
        del donate_argnames
        return jit(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxdisagg.step.jax.jit", without_donation)
        return lower_step(case, folder, devices)


def test_a_step_that_rewrites_its_cache_is_named():
    failures = run_step(DECODE, H200, CONFIGS, lower=rewriting).failures
    assert any("moves a whole cache or weight" in f and "select" in f for f in failures), failures


def test_a_step_that_copies_its_cache_is_named():
    failures = run_step(DECODE, H200, CONFIGS, lower=keeping).failures
    assert any("moves a whole cache or weight" in f and "copy" in f for f in failures), failures
    assert any("are not aliased" in f for f in failures), failures


def test_a_step_whose_kernel_is_not_there_is_named():
    case = replace(DECODE, attention="another_kernel")
    failures = run_step(case, H200, CONFIGS).failures
    assert any("0 calls of the kernel another_kernel, must be 1" in f for f in failures), failures


def test_a_compiler_that_dies_is_a_failure_of_its_case_alone():
    case = KernelCase("crash", "none", functools.partial(os._exit, 3), (), NOTHING)
    plain = KernelCase("plain", "no kernel", operator.neg, (((8,), "float32"),), NOTHING)
    before, died, after = run_all([plain, case, plain], [], [H200], CONFIGS, at_once=2)
    assert died.failures == ["its process died"]
    assert before.failures == after.failures == ["no Mosaic GPU kernel in it"]
