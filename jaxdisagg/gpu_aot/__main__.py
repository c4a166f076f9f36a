"""Compile all kernels and step programs for GPUs that are not there; fail naming what is wrong.

Needs jax's CUDA plugin, which scripts/gpu_aot.py brings: start it through that.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import jax
import typer
from rich.console import Console

from jaxdisagg.bench.report import environment, write_json
from jaxdisagg.gpu_aot import report
from jaxdisagg.gpu_aot.chips import CHIPS
from jaxdisagg.gpu_aot.job import Result, run_all
from jaxdisagg.gpu_aot.kernel_cases import kernel_cases
from jaxdisagg.gpu_aot.step_cases import STEP_CASES

CHIP_NAMES = ",".join(chip.name for chip in CHIPS)


def main(
    configs: Annotated[Path, typer.Option(help="folder of the models' config.json files")],
    chips: Annotated[str, typer.Option(help="which chips to compile for")] = CHIP_NAMES,
    only: Annotated[str, typer.Option(help="only cases whose name holds this")] = "",
    json: Annotated[Path | None, typer.Option(help="write all figures here")] = None,
    markdown: Annotated[Path | None, typer.Option(help="write the tables here")] = None,
) -> None:
    """Compile, check, print tables; ends with 1 where a check failed, 2 for a wrong option."""
    wanted = [chip for chip in CHIPS if chip.name in chips.split(",")]
    if len(wanted) != len(chips.split(",")):
        raise typer.BadParameter(f"chips: {chips!r}, must be some of {CHIP_NAMES}")
    for name, file in (("json", json), ("markdown", markdown)):
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise typer.BadParameter(f"{name}: {file} is a folder or in none")
    console = Console(width=150 if not sys.stdout.isatty() else None)
    kernels = [case for case in kernel_cases() if only in case.name]
    steps = [case for case in STEP_CASES if only in case.name]
    if not kernels and not steps:
        raise typer.BadParameter(f"only: no case has {only!r} in its name")
    console.print(f"jax {jax.__version__}, compiled for {chips}; nothing of this ran on a GPU")
    results: list[Result] = []
    for result in run_all(kernels, steps, wanted, configs, at_once=len(os.sched_getaffinity(0))):
        results.append(result)
        state = "FAILED" if result.failures else "ok"
        console.print(f"{state:6} {result.chip.name} {result.case.name} ({result.seconds:.1f} s)")
        for failure in result.failures:
            console.print(f"       {failure}", style="red", markup=False, highlight=False)
    tables = [
        (report.KERNEL_COLUMNS, report.kernel_lines),
        (report.STEP_COLUMNS, report.step_lines),
    ]
    text = ""
    for chip in wanted:
        mine = [result for result in results if result.chip == chip]
        for columns, lines_of in tables:
            lines = lines_of(mine)
            console.print(report.table(chip.name, columns, lines))
            text += f"{chip.name}, jax {jax.__version__}:\n\n{report.markdown(columns, lines)}\n"
    if markdown is not None:
        markdown.write_text(text)
    if json is not None:
        write_json(json, environment(), report.rows_of(results))
    failed = [f"{r.chip.name} {r.case.name}" for r in results if r.failures]
    if failed:
        console.print(f"failed: {'; '.join(failed)}", style="red", markup=False)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
