"""Results as rows, as tables for a terminal, and as Markdown."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.table import Table

from jaxdisagg.gpu_aot.chips import H200
from jaxdisagg.gpu_aot.job import KernelResult, Result, StepResult

KERNEL_COLUMNS = ("kernel", "shape", "registers", "spills", "SMEM", "bytes", "FLOPs", "roofline")
STEP_COLUMNS = (
    "step program",
    "layers",
    "kernels",
    "triggers",
    "captured",
    "all-reduces",
    "others",
    "aliased",
    "temporaries",
    "host waits",
)


def rows_of(results: Iterable[Result]) -> list[dict[str, Any]]:
    """One JSON object for each kernel of each case, and for each step program."""
    rows = []
    for result in results:
        common: dict[str, Any] = {
            "case": result.case.name,
            "chip": result.chip.name,
            "failures": result.failures,
        }
        common["compile_s"] = round(result.seconds, 2)
        if isinstance(result, StepResult):
            rows.append({"kind": "step"} | common | result.figures)
            continue
        cost = result.case.cost
        common |= {"bytes": cost.bytes, "flops": cost.flops}
        common["h200_roofline_us"] = _roofline_us(result)
        rows += [{"kind": "kernel"} | common | vars(kernel) for kernel in result.kernels] or [
            {"kind": "kernel"} | common
        ]
    return rows


def kernel_lines(results: Iterable[Result]) -> list[tuple[str, ...]]:
    """The cells of KERNEL_COLUMNS; a case of several kernels has a line for each."""
    lines: list[tuple[str, ...]] = []
    for result in results:
        if not isinstance(result, KernelResult):
            continue
        cost = result.case.cost
        whole = (_bytes(cost.bytes), _si(cost.flops), f"{_roofline_us(result):.1f} us")
        own_first = sorted(result.kernels, key=lambda kernel: kernel.name != result.case.op)
        for i, kernel in enumerate(own_first):
            first = i == 0
            lines.append(
                (
                    kernel.name,
                    result.case.shape if first else "",
                    str(kernel.registers),
                    f"{kernel.spill_stores + kernel.spill_loads} B",
                    f"{kernel.smem_bytes:,} B",
                    *(whole if first else ("", "", "")),
                )
            )
    return lines


def step_lines(results: Iterable[Result]) -> list[tuple[str, ...]]:
    """The cells of STEP_COLUMNS."""
    lines: list[tuple[str, ...]] = []
    for result in results:
        if isinstance(result, StepResult) and result.figures:
            f = result.figures
            counts = [f[n] for n in ("kernel_calls", "triggers", "captured_calls", "all_reduces")]
            lines.append(
                (
                    result.case.name,
                    str(f["layers"]),
                    *map(str, counts),
                    str(f["other_collectives"]),
                    _bytes(f["alias_bytes"]),
                    _bytes(f["temp_bytes"]),
                    str(f["host_waits"]),
                )
            )
    return lines


def table(title: str, columns: Sequence[str], lines: Iterable[Sequence[str]]) -> Table:
    """For a terminal; all but the first two columns to the right."""
    made = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0), title_justify="left")
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i < 2 else "right")
    for line in lines:
        made.add_row(*line)
    return made


def markdown(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """The same as Markdown."""
    rows = [columns, ["---"] * len(columns), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _roofline_us(result: KernelResult) -> float:
    return result.case.cost.seconds(H200.memory_bandwidth, H200.matmul_rate) * 1e6


def _bytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def _si(count: float) -> str:
    return f"{count / 1e9:,.1f} G"
