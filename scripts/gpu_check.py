"""One prepared run on a machine with a GPU: what works there, and how fast. See gpu_check.sh.

Every step is a program of its own with a budget of seconds, and all of them share one. What they
found so far is written after each, so that whatever ends the run leaves it: gpu_check.json and
gpu_check.md in --out. Ends with 0 if every step has passed.
"""

import json as json_module
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from made_models import MADE, model_folder
from make_checkpoint import main as make_checkpoint
from rich.console import Console

from jaxdisagg.bench.gpu import report
from jaxdisagg.bench.gpu.kernel_cases import OPS
from jaxdisagg.bench.gpu.rows import findings_in, rows_in
from jaxdisagg.bench.gpu.steps import Outcome, Step, run_steps
from jaxdisagg.bench.report import environment
from jaxdisagg.start_progress import print_error

console = Console(stderr=True)
SCRIPTS = Path(__file__).resolve().parent
CPU_PATIENCE = 5
LOG_CHARACTERS = 200_000  # of each step's
PROBE_SECONDS = 40  # of the doctor's, which answer for others within the step
PARTS = "jaxdisagg.bench.gpu"
# Two programs of one model are to multiply by the same algorithms, and not by what was fastest
# when each was compiled.
UNTUNED = "--xla_gpu_autotune_level=0"
NO_COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer="

# Heads and ranks are those of real models, so that the kernels take them; the rest is small.
MODELS: dict[str, Any] = {
    "small-qwen3": {
        "family": "qwen3", "vocab": 264, "hidden": 512, "layers": 4, "heads": 8, "ffn": 1024,
        "kv_heads": 2, "head_dim": 128, "std": 0.05,
    },
    "small-deepseek": {
        "family": "deepseek-v3", "vocab": 264, "hidden": 512, "layers": 4, "heads": 16,
        "ffn": 1024, "experts": 8, "expert_ffn": 256, "q_lora_rank": 256, "kv_lora_rank": 512,
        "nope_dim": 128, "rope_dim": 64, "value_dim": 128, "std": 0.05,
    },
    "mid-qwen3": {
        "family": "qwen3", "vocab": 264, "hidden": 2048, "layers": 16, "heads": 16, "ffn": 6144,
        "kv_heads": 8, "head_dim": 128, "std": 0.02,
    },
}  # fmt: skip
MID_ON_CPU = {"hidden": 128, "layers": 2, "heads": 4, "ffn": 256, "kv_heads": 2, "head_dim": 32}


def part(name: str, *arguments: str) -> tuple[str, ...]:
    """The command of one of our parts."""
    return (sys.executable, "-m", f"{PARTS}.{name}", *arguments)


def script(name: str, *arguments: str) -> tuple[str, ...]:
    """The command of one of our scripts."""
    return (sys.executable, str(SCRIPTS / name), *arguments)


def made(name: str, folder: Path, *, cpu: bool) -> Path:
    """A model of MODELS, written below `folder`."""
    options: dict[str, Any] = MODELS[name] | (MID_ON_CPU if cpu and name.startswith("mid") else {})
    make_checkpoint(folder / name, **options, dtype="bfloat16", tokenizer=True)
    return folder / name


def make_meanwhile(steps: Sequence[Step], work: Path, *, cpu: bool) -> list[Step]:
    """The steps, each with the model of MODELS that it serves as what it `needs`.

    The models are made by a thread, in the order of the steps: the large one takes half a minute,
    which the first steps have to themselves.
    """
    making: dict[str, Future[Path]] = {}
    waiting = []
    for step in steps:
        its = [name for name in MODELS if str(work / name) in step.command]
        for name in its:
            making.setdefault(name, Future())
            step = replace(step, needs=making[name])
        waiting.append(step)

    def make() -> None:
        for name, future in making.items():
            try:
                future.set_result(made(name, work, cpu=cpu))
            except Exception as error:  # said by the step that waits for it
                future.set_exception(error)

    threading.Thread(target=make, daemon=True).start()
    return waiting


def end_on_sigterm() -> None:
    """Let SIGTERM end this process as an exception does: with the running step and its files."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def flags(more: str) -> dict[str, str]:
    """XLA_FLAGS with one more."""
    return {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {more}".strip()}


def keep_logs(logs: Path, file: Path) -> None:
    """The end of everything that the steps printed, in one file."""
    with file.open("w") as kept:
        for log in sorted(logs.iterdir()):
            text = log.read_text(errors="replace")
            kept.write(f"==== {log.name}\n{text[-LOG_CHARACTERS:]}\n")


def steps_for(work: Path, *, cpu: bool) -> list[Step]:
    """All steps, the most telling first; on a CPU the same with small sizes and XLA's kernels."""
    small = ("--small",) if cpu else ()
    backend = ("--backend", "xla") if cpu else ()
    tuned: dict[str, str] = {} if cpu else flags(UNTUNED)
    plain: dict[str, str] = {} if cpu else flags(NO_COMMAND_BUFFERS)
    tiny = model_folder(Path(next(iter(MADE))), work)
    qwen3, deepseek, mid = (work / name for name in MODELS)
    each = str(100 * (CPU_PATIENCE if cpu else 1))  # operation of the numerics
    chunks, lengths = ("64", "49") if cpu else ("256,1024", "17,300,1500")
    step = ("--mesh", "tp=1", "--lengths", "64", "--dtype", "bfloat16", "--json")
    sizes = ("--chunks", "16", "--batch", "2", "--repeats", "3") if cpu else (
        "--chunks", "256", "--batch", "8", "--repeats", "20")  # fmt: skip

    def kernel(op: str) -> Step:  # by itself: one that hangs takes no other with it
        file = work / f"{op}.json"
        command = script("bench_kernels.py", "--ops", op, "--json", str(file), *small)
        return Step(f"kernels-{op}", command, 40, read=rows_in(file))

    def overhead(name: str, environment: dict[str, str]) -> Step:
        file = work / f"{name}.json"
        command = script("bench_step.py", "--model", str(qwen3), *step, str(file), *sizes)
        return Step(name, command, 60, environment, rows_in(file))

    steps = [
        Step("doctor", (sys.executable, "-m", "jaxdisagg.cli", "doctor", "--json", "--timeout",
                        str(PROBE_SECONDS)), 60, read=findings_in),
        Step("numerics", part("numerics", *small, *backend, "--seconds", each), 120),
        Step("serving-f32", part("serving", str(tiny), "--words", "tp=1"), 90),
        Step("transfers", part("transfers", *small), 60),
        Step("ceilings", part("ceilings", *small), 40),
        *(kernel(op) for op in OPS),
        Step(
            "serving-mid",
            part("serving", str(mid), "--dtype", "bfloat16", "--chunks", chunks,
                 "--lengths", lengths),
            120, tuned,
        ),
        Step("serving-mla", part("serving", str(deepseek), "--dtype", "bfloat16"), 90, tuned),
        overhead("trigger", {}),
        overhead("trigger-no-command-buffers", plain),
    ]  # fmt: skip
    # Two busy cores take long for what a GPU machine does at once; there a step has no more.
    return [replace(step, seconds=step.seconds * CPU_PATIENCE) for step in steps] if cpu else steps


def main(
    out: Annotated[Path, typer.Option(help="folder for gpu_check.json and gpu_check.md")],
    seconds: Annotated[float, typer.Option(min=10.0, help="for all steps together")] = 450.0,
    cpu: Annotated[bool, typer.Option("--cpu", help="small sizes, on CPU devices")] = False,
    only: Annotated[str, typer.Option(help="names of steps, a,b; all if empty")] = "",
    note: Annotated[str, typer.Option(help="put beside the figures, as how it was built")] = "",
) -> None:
    """Run the steps and write what they found."""
    begin = time.monotonic()
    end_on_sigterm()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print_error(console, f"--out: {out} cannot be a folder: {error.strerror}")
        raise typer.Exit(2) from None
    if cpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
    about: dict[str, Any] = environment(**({"note": note} if note else {}))
    # A model that is still being written when a signal ends this may be left in part.
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(work / "jax"))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
        steps = steps_for(work, cpu=cpu)
        names = [step.name for step in steps]
        if unknown := sorted(set(filter(None, only.split(","))) - set(names)):
            raise typer.BadParameter(f"{unknown[0]} is none of {', '.join(names)}")
        steps = [step for step in steps if not only or step.name in only.split(",")]
        steps = make_meanwhile(steps, work, cpu=cpu)
        logs = work / "logs"
        logs.mkdir()

        def done(outcomes: list[Outcome]) -> None:
            report.write(out, outcomes, about)
            keep_logs(logs, out / "gpu_check.log")
            last = outcomes[-1]
            console.print(
                f"{last.name}: {last.state} after {last.seconds:.0f} s, {len(last.rows)} rows",
                highlight=False,
            )
            if last.said:
                console.print(last.said, markup=False, highlight=False, soft_wrap=True)

        try:
            outcomes = run_steps(steps, logs, seconds - (time.monotonic() - begin), done)
        finally:
            keep_logs(logs, out / "gpu_check.log")
    failed = [outcome.name for outcome in outcomes if outcome.state != "passed"]
    console.print(f"not passed: {', '.join(failed)}" if failed else "all passed", highlight=False)
    typer.echo(json_module.dumps({"passed": not failed, "out": str(out)}))
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
