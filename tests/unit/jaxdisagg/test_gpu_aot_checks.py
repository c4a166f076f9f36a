"""What a step program or a kernel must not be is named; the programs here are made up."""

from dataclasses import replace
from typing import Any, cast

import pytest

from ffi_transport.trigger import TARGET
from jaxdisagg.gpu_aot.checks import Compiled, check_kernel, check_step
from jaxdisagg.gpu_aot.chips import H100, H200
from jaxdisagg.gpu_aot.dumps import KernelResources
from jaxdisagg.gpu_aot.step_cases import Step, StepCase
from jaxdisagg.gpu_aot.thunks import Thunks
from models.interface import ModelConfig

LAYERS, TOKENS, HIDDEN, CACHE = 2, 10, 30, 10_000
KERNEL = KernelResources("gqa_decode", 168, 0, 0, 200_000, 384)


def step(program: Any = "prefill", **more: Any) -> Step:
    case = StepCase("model", program, "attend", layers=LAYERS, **more)
    config = ModelConfig(vocab_size=9, num_layers=LAYERS, hidden_size=HIDDEN, max_position=99)
    return Step(
        case=case,
        lowered=cast(Any, None),
        config=config,
        caches=LAYERS,
        cache_elements=CACHE,
        cache_bytes=2 * CACHE,
        weights=frozenset({777}),
        activations=TOKENS,
        states=1,
    )


def call(target: str, more: str) -> str:
    shape = f"bf16[{TOKENS},{HIDDEN}]{{1,0}}"
    return f'  %c = {shape} custom-call(%x), custom_call_target="{target}"{more}'


def attend() -> str:
    return call("mosaic_gpu_v2", ', metadata={op_name="jit(f)/while/body/attend/mpmd_map"}')


def trigger(layer: int) -> str:
    alias = "output_to_operand_aliasing={{}: (1, {})}"
    return call(TARGET, f", {alias}, backend_config={{engine = 0 : i32, layer = {layer} : i32}}")


SUM = f"  %s = bf16[{TOKENS},{HIDDEN}]{{1,0}} all-reduce(%x), to_apply=%add"
HEADER = (
    "HloModule jit__prefill, input_output_alias={ {0}: (3, {}, may-alias), {1}: (4, {}, may-alias),"
    " {2}: (5, {}, may-alias) }, entry_computation_layout={}"
)


def compiled(*lines: str, header: str = HEADER, **figures: Any) -> Compiled:
    """A program that is as it must be, with these lines added."""
    body = [SUM] * (2 * LAYERS + 1)
    body += [line for layer in range(LAYERS) for line in (attend(), trigger(layer))]
    text = "\n".join([header, "ENTRY %main (p: s32[]) -> s32[] {", *body, trigger(LAYERS), *lines])
    good = Compiled(text, 2 * LAYERS * CACHE, 100, (KERNEL,), Thunks(5, 0, 0, 0))
    return replace(good, **figures)


def without(line: str, times: int = 1) -> Compiled:
    good = compiled()
    return replace(good, text=good.text.replace(line, "", times))


def test_a_program_as_designed_passes():
    assert check_step(step(), compiled(), H200) == []
    small = f"  %g = f32[{TOKENS * 512}]{{0}} all-gather(%x)"
    decode = without(trigger(0)).text.replace(trigger(1), "").replace(trigger(2), "")
    assert check_step(step("decode"), replace(compiled(), text=f"{decode}\n{small}"), H200) == []


BAD = {
    "outputs [1] of caches and states [0, 1, 2] are not aliased": compiled(
        header=HEADER.replace("{1}: (4, {}, may-alias),", "")
    ),
    "39999 bytes are aliased, the caches have 40000": compiled(alias_bytes=39_999),
    "20000 bytes of temporaries, must be fewer than a layer's cache has, 20000": compiled(
        temp_bytes=20_000
    ),
    "moves a whole cache or weight: %k = bf16[100,100]{1,0} copy(%p)": compiled(
        "  %k = bf16[100,100]{1,0} copy(%p)"
    ),
    "moves a whole cache or weight: %w = f32[777]{0} convert(%p)": compiled(
        "  %w = f32[777]{0} convert(%p)"
    ),
    "{'bf16': 4}, must be 5 of bf16": without(SUM),
    "{'bf16': 6}, must be 5 of bf16": compiled(SUM),
    "{'f32': 1, 'bf16': 4}, must be 5 of bf16": replace(
        compiled(), text=compiled().text.replace("%s = bf16", "%s = f32", 1)
    ),
    "{'bf16': 5, 'bf16 in a branch': 1}, must be 5": compiled(
        f"}}\n%branch (p: s32[]) -> s32[] {{\n{SUM}"
    ),
    "all-gather of 9999 bf16, a prefill step may send 0": compiled(
        "  %g = bf16[9999]{0} all-gather(%p)"
    ),
    "the trigger fires for layers ['0', '2'], must fire for [0, 1, 2]": without(trigger(1)),
    "the trigger of layers ['0'] does not return x in place": replace(
        compiled(), text=compiled().text.replace("{{}: (1, {})}", "{{}: (0, {})}", 1)
    ),
    "2 custom calls are inside, 3 outside": compiled(thunks=Thunks(2, 3, 0, 0)),
    "1 calls of the kernel attend, must be 2": without(attend()),
    "no kernel was described": compiled(kernels=()),
    "gqa_decode: spills 4 bytes of stores and 8 of loads": compiled(
        kernels=(replace(KERNEL, spill_stores=4, spill_loads=8),)
    ),
}


@pytest.mark.parametrize("named", BAD)
def test_what_is_wrong_with_a_step_program_is_named(named: str):
    (failure,) = check_step(step(), BAD[named], H200)
    assert named in failure


def test_a_decode_step_may_send_candidates_but_no_cache():
    decode = compiled().text
    for layer in range(LAYERS + 1):
        decode = decode.replace(trigger(layer), "")
    gathered = f"{decode}\n  %g = f32[{TOKENS * 512 + 1}]{{0}} all-gather(%x)"
    found = check_step(step("decode"), compiled(), H200)
    assert found == ["the trigger fires for layers ['0', '1', '2'], must fire for []"]
    (failure,) = check_step(step("decode"), replace(compiled(), text=gathered), H200)
    assert "all-gather of 5121 f32, a decode step may send 5120" in failure


@pytest.mark.parametrize(("inside", "outside"), [(5, 0), (4, 1)])
def test_the_last_trigger_may_be_outside(inside: int, outside: int):
    assert check_step(step(), compiled(thunks=Thunks(inside, outside, 0, 0)), H200) == []


@pytest.mark.parametrize(("release", "failures"), [((0, 11, 2), 0), ((0, 12, 0), 1)])
def test_only_the_oldest_release_may_capture_nothing(
    release: tuple[int, ...], failures: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("jax.__version_info__", release)
    found = check_step(step(), compiled(thunks=Thunks(0, 5, 0, 0)), H200)
    assert len(found) == failures


def test_drafts_add_a_look_up_of_embeddings():
    (failure,) = check_step(step("decode", drafts=True), without(trigger(0), 1), H200)[:1]
    assert "must be 6 of bf16" in failure


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"spill_loads": 4}, "spills 0 bytes of stores and 4 of loads, must be 0"),
        ({"registers": 176}, "176 registers a thread, 384 threads can have 168"),
        ({"smem_bytes": 232_449}, "232449 bytes of shared memory, a block can have 232448"),
    ],
)
def test_what_is_wrong_with_a_kernel_is_named(change: dict[str, int], named: str):
    assert check_kernel(KERNEL, H100) == []
    assert check_kernel(replace(KERNEL, **change), H100) == [f"gqa_decode: {named}"]
