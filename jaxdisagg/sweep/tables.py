"""The rows of a sweep for a terminal of 80 to 120 columns. No jax."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich import box
from rich.table import Table

UNITS = ("", "k", "M", "G", "T", "P")
SIDES = ("prefill", "decode")
MESH_WIDTH = 12  # characters of a mesh before a new line begins


def count(number: float) -> str:
    """Three digits and a decimal prefix; links are sold so."""
    power = 0
    while number >= 999.5 and power < len(UNITS) - 1:
        number, power = number / 1000, power + 1
    return f"{number:.3g} {UNITS[power]}".rstrip()


def milliseconds(value: float) -> str:
    """Three digits, without an exponent."""
    if value == 0:
        return "0"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.001 else "<0.001"


class _Rows:
    """A table that begins with the pair, said once, and the prompt length; no number is cut."""

    def __init__(self, title: str, columns: Sequence[str]) -> None:
        self.table = Table(title=title, box=box.SIMPLE, padding=0, title_justify="left")
        for side in SIDES:
            self.table.add_column(side, overflow="fold")
        for column in ("tokens", *columns):
            self.table.add_column(column, justify="right", no_wrap=True)
        self._pair: tuple[str, ...] = ()

    def add(self, row: dict[str, Any], *cells: str) -> None:
        """A row of a pair."""
        pair = tuple(row[side] for side in SIDES)
        shown = ("", "") if pair == self._pair else map(folded, pair)
        self._pair = pair
        self.table.add_row(*shown, f"{row['tokens']:,}", *cells)


def folded(mesh: str) -> str:
    """A mesh on as many lines as it takes, broken after commas and between NICs."""
    lines = [""]
    for item in re.findall(r"[^,+]*[,+]?", mesh):
        if lines[-1] and len(lines[-1]) + len(item.rstrip(",+")) > MESH_WIDTH:
            lines.append("")
        lines[-1] += item
    return "\n".join(lines)


def fitting(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of pairs that can be."""
    return [row for row in rows if "error" not in row]


def tables(rows: Iterable[dict[str, Any]]) -> Iterator[Table]:
    """What moves, over which NICs, how long, and what was measured, each if there is any of it."""
    rows = fitting(rows)
    if rows:
        yield _moved(rows)
        yield _nics(rows)
        yield _times(rows)
    if measured := [row for row in rows if "measured" in row]:
        yield _counted(measured)
        if any(
            sum(len(found["nics"]) for found in row["measured"]["nics"]) > len(SIDES)
            for row in measured
        ):
            yield _by_nic(measured)
        yield _took(measured)


def _moved(rows: list[dict[str, Any]]) -> Table:
    table = _Rows(
        "what one request moves (cache: bytes of a token on one device)",
        ("prefill\ncache", "decode\ncache", "page-writes", "of bytes", "bytes"),
    )
    for row in rows:
        caches = (f"{row[f'{side}_cache_bytes_per_token']:,}" for side in SIDES)
        least, most = row["unit_bytes"]
        unit = f"{most:,}" if least == most else f"{least:,}\nto {most:,}"
        table.add(row, *caches, f"{row['page_writes']:,}", unit, f"{row['bytes']:,}")
    return table.table


def _nics(rows: list[dict[str, Any]]) -> Table:
    table = _Rows(
        "the busiest NIC; max/mean of one request, of all seeds",
        ("prefill\nbusiest", "max/\none", "mean\nall", "decode\nbusiest", "max/\none",
         "mean\nall"),
    )  # fmt: skip
    for row in rows:
        cells = []
        for side in SIDES:
            cells += [
                f"{count(row[f'{side}_nic_bytes'])}B",
                f"{row[f'{side}_imbalance']:.2f}",
                f"{row[f'{side}_imbalance_all']:.2f}",
            ]
        table.add(row, *cells)
    return table.table


def _times(rows: list[dict[str, Any]]) -> Table:
    table = _Rows(
        "how long: estimates in ms, of a layer and of the whole prompt",
        ("Gb/s", "layer\nwork", "\nsend", "prompt\nwork", "\nsend", "hides", "tail"),
    )
    keys = ("layer_compute_ms", "layer_transfer_ms", "compute_ms", "transfer_ms")
    for row in rows:
        for time in row["times"]:
            table.add(
                row,
                f"{time['nic_gbps']:g}",
                *(milliseconds(time[key]) for key in keys),
                "yes" if time["hidden"] else "[red]no[/red]",
                milliseconds(time["tail_ms"]),
            )
    return table.table


def _counted(rows: list[dict[str, Any]]) -> Table:
    one = rows[0]["measured"]
    table = _Rows(
        f"counted here, {one['requests']} request(s) each over {one['provider']}: as predicted?",
        ("page-writes\npredicted", "\nposted", "\ncounted", "bytes\npredicted", "\nposted"),
    )
    for row in rows:
        found = row["measured"]
        cells = []
        for name, kinds in (("page_writes", ("posted", "counted")), ("bytes", ("posted",))):
            predicted = found["predicted"][name]
            cells.append(f"{predicted:,}")
            cells += [_told(found[f"{name}_{kind}"], predicted) for kind in kinds]
        table.add(row, *cells)
    return table.table


def _told(value: int, predicted: int) -> str:
    return f"{value:,}" if value == predicted else f"[red]{value:,}[/red]"


def _by_nic(rows: list[dict[str, Any]]) -> Table:
    table = _Rows(
        "the same by NIC: posted by the prefill node, counted by the decode node",
        ("side", "NIC", "page-writes", "bytes"),
    )
    for row in rows:
        for found in row["measured"]["nics"]:
            nics, alone = found["nics"], len(found["nics"]) == 1
            names = [nic["name"] for nic in nics] + ([] if alone else ["together"])
            cells = []
            for name in (name for name in ("page_writes", "bytes") if name in found):
                value, predicted = found[name], found[f"{name}_predicted"]
                lines = [f"{nic[name]:,}" for nic in nics] + ([] if alone else [f"{value:,}"])
                lines += [] if value == predicted else [f"[red]not {predicted:,}[/red]"]
                cells.append("\n".join(lines))
            table.add(row, found["side"], "\n".join(names), *cells)
    return table.table


def _took(rows: list[dict[str, Any]]) -> Table:
    table = _Rows("and how long it took here: medians, ms", ("TTFT", "prefill", "exposed transfer"))
    for row in rows:
        terms = ("ttft_ms", "prefill_ms", "exposed_transfer_ms")
        table.add(row, *(milliseconds(row["measured"][term]) for term in terms))
    return table.table


def mappings(rows: Iterable[dict[str, Any]]) -> list[str]:
    """A line per pair: how one side's page shards become the other's."""
    told = (f"{row['prefill']} -> {row['decode']}: {row['mapping']}" for row in fitting(rows))
    return list(dict.fromkeys(told))


def errors(rows: Iterable[dict[str, Any]]) -> list[str]:
    """A line per pair that cannot be, or that could not be run."""
    found = ((row, row[key]) for row in rows for key in ("error", "run_error") if key in row)
    return list(dict.fromkeys(f"{row['prefill']} -> {row['decode']}: {why}" for row, why in found))
