"""What a compiled kernel or step program must be: every failing in words, none if all is well."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from ffi_transport.trigger import TARGET
from jaxdisagg.gpu_aot import hlo
from jaxdisagg.gpu_aot.chips import Chip
from jaxdisagg.gpu_aot.dumps import KernelResources
from jaxdisagg.gpu_aot.step_cases import TP, Step
from jaxdisagg.gpu_aot.thunks import Thunks
from jaxdisagg.sampler import CANDIDATES

MOSAIC_TARGET = "mosaic_gpu_v2"
_IN_PLACE = "output_to_operand_aliasing={{}: (1, {})}"  # the call's result is its operand x
_HLO_DTYPES = {"bfloat16": "bf16", "float32": "f32"}


@dataclass(frozen=True)
class Compiled:
    """A compiled step program as it is judged: XLA's text and figures, and the kernels in it."""

    text: str
    alias_bytes: int
    temp_bytes: int
    kernels: Sequence[KernelResources]  # of each distinct Mosaic GPU kernel
    thunks: Thunks


def check_kernel(kernel: KernelResources, chip: Chip) -> list[str]:
    """Spills, more registers than the block's threads can have, more shared memory than fits."""
    failures = []
    if kernel.spill_stores or kernel.spill_loads:
        failures.append(
            f"{kernel.name}: spills {kernel.spill_stores} bytes of stores and "
            f"{kernel.spill_loads} of loads, must be 0"
        )
    most = chip.registers_per_thread(kernel.threads)
    if kernel.registers > most:
        failures.append(
            f"{kernel.name}: {kernel.registers} registers a thread, {kernel.threads} threads can "
            f"have {most}"
        )
    if kernel.smem_bytes > chip.smem_per_block:
        failures.append(
            f"{kernel.name}: {kernel.smem_bytes} bytes of shared memory, a block can have "
            f"{chip.smem_per_block}"
        )
    return failures


def kernel_calls(text: str) -> Counter[str]:
    """How often a program calls each Mosaic GPU kernel, by the name that it was launched under."""
    names = (
        call.attribute(r'op_name="[^"]*?([^"/]+)/[^"/]+"')
        for call in hlo.custom_calls(text, MOSAIC_TARGET)
    )
    return Counter(name or "?" for name in names)


def check_step(step: Step, compiled: Compiled, chip: Chip) -> list[str]:
    """All that is wrong with a step program.

    Caches and states (the context rows, the seats) are aliased; temporaries are fewer than one
    layer's cache; nothing moves a cache or a weight as a whole; per layer there are two
    all-reduces, of the residual stream in its own dtype, one more for each look-up of embeddings,
    and nothing else is sent but a decode step's candidates; a prefill step's trigger fires in place
    once per layer and once for the context, in order, each layer's from a command buffer if custom
    calls are captured at all; each layer's attention is the Mosaic GPU kernel.
    """
    return [
        *_check_memory(step, compiled),
        *_check_collectives(step, compiled.text),
        *_check_trigger(step, compiled),
        *_check_attention(step, compiled),
        *(failure for kernel in compiled.kernels for failure in check_kernel(kernel, chip)),
    ]


def _check_memory(step: Step, compiled: Compiled) -> list[str]:
    failures = []
    outputs = range(step.caches + step.states)
    lost = sorted(set(outputs) - set(hlo.aliases(compiled.text)))
    if lost:
        failures.append(f"outputs {lost} of caches and states {list(outputs)} are not aliased")
    if compiled.alias_bytes < step.caches * step.cache_bytes:
        failures.append(
            f"{compiled.alias_bytes} bytes are aliased, the caches have "
            f"{step.caches * step.cache_bytes}"
        )
    if compiled.temp_bytes >= step.cache_bytes:
        failures.append(
            f"{compiled.temp_bytes} bytes of temporaries, must be fewer than a layer's cache has, "
            f"{step.cache_bytes}"
        )
    moved = hlo.moved(compiled.text, step.cache_elements, step.weights)
    return failures + [f"moves a whole cache or weight: {line}" for line in moved]


def _check_collectives(step: Step, text: str) -> list[str]:
    failures = []
    residual = step.activations * step.config.hidden_size
    dtype = _HLO_DTYPES[step.config.dtype]
    designed = 2 * step.caches + 1 + step.case.drafts
    sent = hlo.collectives(text)
    sums = [s for s in sent if s.opcode == "all-reduce" and s.elements == residual]
    if len(sums) != designed or not all(s.in_entry and s.dtype == dtype for s in sums):
        found = dict(Counter(f"{s.dtype}{'' if s.in_entry else ' in a branch'}" for s in sums))
        failures.append(
            f"all-reduces of the residual stream: {found}, must be {designed} of {dtype}: two for "
            f"each of {step.caches} layers, one for each look-up of embeddings"
        )
    most = 0 if step.case.program == "prefill" else step.activations * CANDIDATES * TP
    others = [s for s in sent if s not in sums and s.elements > most]
    return failures + [
        f"{s.opcode} of {s.elements} {s.dtype}, a {step.case.program} step may send {most} "
        "elements at once beside the residual stream"
        for s in others
    ]


def _check_trigger(step: Step, compiled: Compiled) -> list[str]:
    calls = hlo.custom_calls(compiled.text, TARGET)
    layers = [call.attribute(r"\blayer = (\d+)") for call in calls]
    designed = list(range(step.caches + 1)) if step.case.program == "prefill" else []
    if layers != [str(layer) for layer in designed]:
        return [f"the trigger fires for layers {layers}, must fire for {designed}"]
    failures = []
    copied = [
        layer for layer, call in zip(layers, calls, strict=True) if _IN_PLACE not in call.line
    ]
    if copied:
        failures.append(f"the trigger of layers {copied} does not return x in place")
    # Few operations in a row are not captured, as those after the last layer, with the context's
    # trigger; and jax 0.11.2 captures no custom call at all, Mosaic GPU kernels included.
    thunks = compiled.thunks
    captures = jax.__version_info__ >= (0, 12) or thunks.captured_calls
    if captures and thunks.other_calls > 1:
        failures.append(
            f"the trigger is not captured into command buffers: {thunks.captured_calls} custom "
            f"calls are inside, {thunks.other_calls} outside, of which one may be"
        )
    return failures


def _check_attention(step: Step, compiled: Compiled) -> list[str]:
    calls, designed = kernel_calls(compiled.text), step.caches * step.case.calls
    failures = []
    if calls[step.case.attention] != designed:
        failures.append(
            f"{calls[step.case.attention]} calls of the kernel {step.case.attention}, must be "
            f"{designed} in {step.caches} layers; there are {dict(calls)}"
        )
    if calls and not compiled.kernels:
        failures.append("no kernel was described: the compiler has written no report")
    return failures
