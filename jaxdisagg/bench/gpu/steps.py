"""Runs the parts of a check one after another, each with a budget, all within one."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jaxdisagg.bench.gpu.rows import Row, read_rows

LEAST_SECONDS = 5.0  # with less than that left, a step is not begun
SAID_LINES = 12
GONE_SECONDS = 3.0  # for what was killed to be gone, and its memory on the GPU with it


@dataclass(frozen=True)
class Step:
    """A program, and the seconds that it may take. `environment` is added to this process's.

    `read` finds its rows in what it printed. `needs` is made meanwhile, and waited for within
    these seconds.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[str], list[Row]] = read_rows
    needs: Future[Any] | None = None


@dataclass(frozen=True)
class Outcome:
    """How a step ended: `failed` by itself, `timeout` in its budget, `skipped` for want of time.

    `rows` are those that it printed, whatever its end; `said`, unless it passed, how that was and
    the last lines of its stderr.
    """

    name: str
    state: Literal["passed", "failed", "timeout", "skipped"]
    seconds: float
    rows: list[Row]
    said: str = ""


def run_step(step: Step, logs: Path, seconds: float) -> Outcome:
    """Run one step for at most `seconds`; it is ended with all that it started.

    What it prints is in `logs`. A row with "passed": false fails the step, and so does no row: a
    program that measured nothing has shown nothing.
    """
    begin = time.monotonic()
    if step.needs is not None:
        try:
            step.needs.result(timeout=seconds)
        except Exception as error:
            # Whatever kept it from being made: the steps that do not need it go on.
            said = f"what it needs was not made: {type(error).__name__}: {error}"
            return Outcome(step.name, "failed", time.monotonic() - begin, [], said)
        seconds -= time.monotonic() - begin
    out, err = logs / f"{step.name}.out", logs / f"{step.name}.err"
    with out.open("w") as stdout, err.open("w") as stderr:
        try:
            process = subprocess.Popen(
                step.command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                env=os.environ | dict(step.environment), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return Outcome(step.name, "failed", 0.0, [], str(error))
        try:
            status = process.wait(timeout=max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            # What it started and left behind would hold the GPU's memory.
            _end_group(process)
    rows = step.read(out.read_text(errors="replace"))
    said = "\n".join(err.read_text(errors="replace").splitlines()[-SAID_LINES:])
    took = time.monotonic() - begin
    if status is None:
        said = f"it had not ended after {took:.0f} s\n{said}".strip()
        return Outcome(step.name, "timeout", took, rows, said)
    if status:
        said = f"it ended with status {status}\n{said}".strip()
    elif not rows:
        said = f"it ended without a row\n{said}".strip()
    good = status == 0 and bool(rows) and all(row.get("passed", True) for row in rows)
    return Outcome(step.name, "passed" if good else "failed", took, rows, "" if good else said)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + GONE_SECONDS
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.05)
    process.wait()


def run_steps(
    steps: Sequence[Step],
    logs: Path,
    seconds: float,
    done: Callable[[list[Outcome]], Any] = lambda _: None,
) -> list[Outcome]:
    """Run all steps within `seconds`; `done` is called with the outcomes so far after each."""
    deadline = time.monotonic() + seconds
    outcomes: list[Outcome] = []
    for step in steps:
        left = deadline - time.monotonic()
        if left < LEAST_SECONDS:
            outcomes.append(Outcome(step.name, "skipped", 0.0, [], "no time was left"))
        else:
            outcomes.append(run_step(step, logs, min(step.seconds, left)))
        done(outcomes)
    return outcomes
