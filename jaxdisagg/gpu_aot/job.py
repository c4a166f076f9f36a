"""Compiling all cases, each in a process of its own, and judging each."""

import functools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ffi_transport.trigger import TARGET
from jaxdisagg.gpu_aot import hlo
from jaxdisagg.gpu_aot.checks import Compiled, check_kernel, check_step, kernel_calls
from jaxdisagg.gpu_aot.chips import Chip, devices
from jaxdisagg.gpu_aot.dumps import KernelResources, dumping, read_dumps
from jaxdisagg.gpu_aot.kernel_cases import KernelCase, operands_of
from jaxdisagg.gpu_aot.step_cases import TP, Step, StepCase, lower_step
from jaxdisagg.gpu_aot.thunks import DUMP_OPTION, read_thunks


@dataclass(frozen=True)
class KernelResult:
    """A kernel case on one chip: the kernels that it became, and what is wrong with them."""

    case: KernelCase
    chip: Chip
    seconds: float
    kernels: list[KernelResources] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class StepResult:
    """A step program on one chip, its `figures` by name, and what is wrong with it."""

    case: StepCase
    chip: Chip
    seconds: float
    kernels: list[KernelResources] = field(default_factory=list)
    figures: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


Result = KernelResult | StepResult


def run_kernel(case: KernelCase, chip: Chip) -> KernelResult:
    """Compile one kernel for the chip and check it; a compiler's refusal is a failure."""
    begin = time.monotonic()
    mesh = Mesh(np.array(devices(chip, 1)), ("x",))
    kernels, failures = [], []
    with _workspace() as folder:
        try:
            operands = operands_of(case, NamedSharding(mesh, P()))
            with dumping(folder):
                jax.jit(case.run).lower(*operands).compile()
            kernels = read_dumps(folder)
            failures = [f for kernel in kernels for f in check_kernel(kernel, chip)]
            if not kernels:
                failures.append("no Mosaic GPU kernel in it")
        except Exception as error:
            failures.append(_brief(error))
    return KernelResult(case, chip, time.monotonic() - begin, kernels, failures)


def run_step(
    case: StepCase,
    chip: Chip,
    configs: Path,
    lower: Callable[[StepCase, Path, Sequence[jax.Device]], Step] = lower_step,
) -> StepResult:
    """Compile one step program for the chip and check it; a compiler's refusal is a failure."""
    begin = time.monotonic()
    with _workspace() as folder:
        try:
            with dumping(folder):
                step = lower(case, configs, devices(chip, TP))
                program = step.lowered.compile(compiler_options={DUMP_OPTION: str(folder)})
            memory: Any = program.memory_analysis()
            compiled = Compiled(
                text=program.as_text() or "",
                alias_bytes=memory.alias_size_in_bytes,
                temp_bytes=memory.temp_size_in_bytes,
                kernels=tuple(read_dumps(folder)),
                thunks=read_thunks(folder),
            )
            found = (
                list(compiled.kernels),
                figures_of(step, compiled),
                check_step(step, compiled, chip),
            )
        except Exception as error:
            found = ([], {}, [_brief(error)])
    return StepResult(case, chip, time.monotonic() - begin, *found)


def figures_of(step: Step, compiled: Compiled) -> dict[str, int]:
    """What the table says of a step program."""
    sent = hlo.collectives(compiled.text)
    residual = step.activations * step.config.hidden_size
    return {
        "layers": step.caches,
        "kernel_calls": sum(kernel_calls(compiled.text).values()),
        "triggers": len(hlo.custom_calls(compiled.text, TARGET)),
        "all_reduces": sum(s.elements == residual for s in sent),
        "other_collectives": sum(s.elements != residual for s in sent),
        "alias_bytes": compiled.alias_bytes,
        "temp_bytes": compiled.temp_bytes,
        "captured_calls": compiled.thunks.captured_calls,
        "host_waits": compiled.thunks.host_waits,
    }


def run_all(
    kernels: Sequence[KernelCase],
    steps: Sequence[StepCase],
    chips: Sequence[Chip],
    configs: Path,
    *,
    at_once: int,
) -> Iterator[Result]:
    """Every case on every chip, in order, `at_once` of them at once, each in a fresh process.

    A process that has compiled a kernel would not report on it again. One that dies takes the pool
    with it, so what was under way or waiting then runs again, each in a pool of its own.
    """
    jobs: list[tuple[Callable[[], Result], Result]] = []  # each with what it is if it dies
    for chip in chips:
        for case in steps:
            lost = StepResult(case, chip, 0.0, failures=["its process died"])
            jobs.append((functools.partial(run_step, case, chip, configs), lost))
        for case in kernels:
            lost = KernelResult(case, chip, 0.0, failures=["its process died"])
            jobs.append((functools.partial(run_kernel, case, chip), lost))
    with _processes(at_once) as pool:
        tasks = [pool.submit(job) for job, _ in jobs]
        for task, (job, lost) in zip(tasks, jobs, strict=True):
            try:
                yield task.result()
            except BrokenProcessPool:
                yield _alone(job, lost)


def _processes(at_once: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return ProcessPoolExecutor(at_once, context, max_tasks_per_child=1)


def _alone(job: Callable[[], Result], lost: Result) -> Result:
    with _processes(1) as pool:
        try:
            return pool.submit(job).result()
        except BrokenProcessPool:
            return lost


def _brief(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:600]


@contextmanager
def _workspace() -> Generator[Path]:
    """A folder for dumps; the compiler's own chatter goes into it, not to the terminal."""
    with tempfile.TemporaryDirectory() as name:
        sys.stderr.flush()
        terminal = os.dup(2)
        chatter = os.open(os.path.join(name, "stderr"), os.O_WRONLY | os.O_CREAT)
        os.dup2(chatter, 2)
        os.close(chatter)
        try:
            yield Path(name)
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)
