"""Times of the operations of pallas_kernels, their back ends side by side, taken in turns.

On a CPU that is the XLA path, and for the decode operations beside it a plain loop over page blocks
(`jaxdisagg/bench/page_loop.py`), which it should not be slower than. On a GPU it is the Mosaic
kernel beside the XLA path, each against what the device does at best: its copy bandwidth and its
rate of bf16 matrix products, measured in the same run. Trust the ratios.
"""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from jaxdisagg.bench.report import check_json, environment, write_json
from jaxdisagg.bench.timing import interleaved, median_ci
from jaxdisagg.gpu_setup import default_platform
from jaxdisagg.start_progress import print_error

if TYPE_CHECKING:
    from jaxdisagg.bench.kernels import Case

console = Console()
# Calls between two looks at the clock: a GPU's are enqueued ahead, so that none waits for the host.
# Fewer of those that take long, which the host is ahead of anyway.
MOST_CALLS = {"gpu": 20, "cpu": 1}
LOOK_SECONDS = 0.02
ON_GPU = ("mosaic_gpu", "xla")


def calls_of(seconds: float, platform: str) -> int:
    """How many calls, of `seconds` each, to time as one."""
    return max(1, min(MOST_CALLS.get(platform, 1), int(LOOK_SECONDS / seconds)))


def measure(
    case: "Case", platform: str, repeats: int, ceilings: tuple[float, float] | None
) -> list[dict[str, Any]]:
    """A row for each way to run the case.

    ceilings: bytes per second of a copy and operations per second of a matmul; None: no shares.
    """
    import jax
    import numpy as np

    if platform == "gpu":  # without the loop, which is for a CPU
        made = case.ways(ON_GPU)
        ways = {name: made[name] for name in ON_GPU}
    else:
        ways = case.ways(("xla",))
    runs: list[Callable[[], object]] = []
    results, counts = [], []
    for function, operands in ways.values():
        program = jax.jit(function).lower(*operands).compile()
        results.append(np.asarray(program(*operands), np.float32))

        start = time.perf_counter()
        jax.block_until_ready(program(*operands))
        taken = time.perf_counter() - start
        counts.append(calls_of(taken, platform))

        def run(program: Any = program, operands: Any = operands, calls: int = counts[-1]) -> None:
            for _ in range(calls - 1):
                program(*operands)
            jax.block_until_ready(program(*operands))

        runs.append(run)
    interleaved(runs, 2)  # warm
    times = interleaved(runs, repeats)
    rows = []
    each = [[t / calls for t in taken] for taken, calls in zip(times, counts, strict=True)]
    for name, taken, result in zip(ways, each, results, strict=True):
        seconds, low, high = median_ci(taken)
        row: dict[str, Any] = {
            "op": case.op,
            "shape": case.shape,
            "dtype": case.dtype,
            "backend": name,
            "us": seconds * 1e6,
            "us_ci95": [low * 1e6, high * 1e6],
            "gbytes_per_s": case.cost.bytes / seconds / 1e9,
            "tflops_per_s": case.cost.flops / seconds / 1e12,
            "largest_difference": float(np.abs(result - results[0]).max()),
        }
        if ceilings is not None:
            least = case.cost.seconds(*ceilings)
            row |= {"us_roofline": least * 1e6, "share_of_roofline": least / seconds}
        if name == list(ways)[-1] and len(ways) > 1:
            pairs = [ours / theirs for ours, theirs in zip(each[0], taken, strict=True)]
            row |= {"ratio": statistics.median(pairs), "ratio_ci95": list(median_ci(pairs)[1:])}
        rows.append(row)
    return rows


def table_of(rows: list[dict[str, Any]]) -> Table:
    """The rows for a terminal."""
    title = "operations; ratio: the first way's time over the last one's"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("operation", overflow="fold")
    for column in "by", "us", "95 %", "GB/s", "TFLOP/s", "share", "ratio":
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        if "error" in row:
            continue
        low, high = row["us_ci95"]
        table.add_row(
            f"{row['op']} {row['dtype']} {row['shape']}",
            row["backend"],
            f"{row['us']:.0f}",
            f"{low:.0f}..{high:.0f}",
            f"{row['gbytes_per_s']:.1f}",
            f"{row['tflops_per_s']:.3f}",
            f"{row['share_of_roofline']:.0%}" if "share_of_roofline" in row else "",
            f"{row['ratio']:.2f}" if "ratio" in row else "",
        )
    return table


def main(
    ops: Annotated[str, typer.Option(help="a,b; all if empty")] = "",
    repeats: Annotated[int, typer.Option(min=1)] = 21,
    small: Annotated[bool, typer.Option("--small", help="tiny sizes, to try the script")] = False,
    json: Annotated[Path | None, typer.Option(help="write the rows here, after each case")] = None,
) -> None:
    """Time every operation, back ends in turns; on a GPU against its copy bandwidth and matmuls."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        check_json(json)
        import jax

        from jaxdisagg.bench.gpu.ceilings import copy_bandwidth, matmul_rate
        from jaxdisagg.bench.kernels import cases

        platform = default_platform()
        chosen = list(cases(platform, small))
        known = {case.op for case in chosen}
        wanted = {name.strip() for name in ops.split(",")} if ops else known
        if unknown := wanted - known:
            names = ", ".join(map(repr, sorted(unknown)))
            raise ValueError(f"--ops={ops!r}: {names} not among {', '.join(sorted(known))}")
    except ValueError as error:
        print_error(console, str(error))
        raise typer.Exit(2) from None
    chosen = [case for case in chosen if case.op in wanted]
    facts: dict[str, Any] = {"device": jax.devices()[0].device_kind, "platform": platform}
    ceilings = None
    if platform == "gpu":
        size = 1024 if small else 8192
        ceilings = copy_bandwidth((16 if small else 1024) << 20), matmul_rate(size)
        facts |= {"copy_bytes_per_s": ceilings[0], "matmul_flops_per_s": ceilings[1]}
    found: list[dict[str, Any]] = []
    with Progress(console=console) as progress:
        task = progress.add_task("", total=len(chosen))
        for case in chosen:
            progress.update(task, description=case.op)
            try:
                found += measure(case, platform, repeats, ceilings)
            except Exception as error:
                # Whatever a kernel's compiler or the device says is this case's alone to tell.
                row = {"op": case.op, "shape": case.shape, "dtype": case.dtype, "passed": False}
                found.append(row | {"error": f"{type(error).__name__}: {error}"[:2000]})
                print_error(console, f"{case.op} {case.dtype} {case.shape}: {error}")
            progress.advance(task)
            if json is not None:
                write_json(json, environment(**facts), found)
    console.print(table_of(found))
    if ceilings is not None:
        copied, multiplied = ceilings[0] / 1e9, ceilings[1] / 1e12
        console.print(
            f"share: of a copy's {copied:.0f} GB/s or a matmul's {multiplied:.0f} TFLOP/s"
        )
    if any("error" in row for row in found):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
