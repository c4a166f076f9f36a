"""`jaxdisagg doctor`: asks all probes at once, prints what they found."""

import errno
import json as json_module
import os
import signal
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxdisagg.doctor.finding import Finding, Values
from jaxdisagg.doctor.probe import PROBES, Probes, ask

SECONDS, MOST_SECONDS = 90.0, 86400.0
_MARKS = {"ok": ("ok", "green"), "absent": ("-", "yellow"), "missing": ("missing", "bold red")}


def examine(timeout: float = SECONDS) -> tuple[list[Finding], dict[str, Values]]:
    """All findings, and the values that they judge by probe; none takes longer than `timeout` s.

    Whatever interrupts it ends the probes at once.
    """
    probes = Probes()
    with ThreadPoolExecutor(len(PROBES)) as pool:
        try:
            answers = pool.map(lambda name: ask(name, timeout, probes), PROBES)
            values = dict(zip(PROBES, answers, strict=True))
        except BaseException:
            probes.end()
            raise
    found: list[Finding] = []
    for name, (_, judge) in PROBES.items():
        found += judge(values[name])
    return found, values


def fit(findings: list[Finding]) -> bool:
    """Whether nothing that every deployment needs is missing."""
    return all(finding.state != "missing" for finding in findings)


def document(findings: list[Finding], values: dict[str, Values]) -> dict[str, Any]:
    """All of it as plain values."""
    return {
        "fit": fit(findings),
        "findings": [asdict(finding) for finding in findings],
        "probes": values,
    }


def tables(findings: list[Finding]) -> list[Table]:
    """A table for each subject."""
    made: dict[str, Table] = {}
    for finding in findings:
        if finding.subject not in made:
            table = Table(
                title=finding.subject, box=box.SIMPLE, title_justify="left", title_style="bold",
                show_header=False,
            )  # fmt: skip
            for column in ("what", "state", "found", "why"):
                table.add_column(column, overflow="fold", no_wrap=column == "state")
            made[finding.subject] = table
        mark, style = _MARKS[finding.state]
        made[finding.subject].add_row(
            Text(finding.what), Text(mark, style=style), Text(finding.found), Text(finding.why)
        )
    return list(made.values())


@contextmanager
def _terminable() -> Generator[None]:
    """Let SIGTERM raise SystemExit, as Ctrl-C raises KeyboardInterrupt."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _writable() -> Generator[None]:
    """End with one line and status 2 where stdout cannot be written (a full disk)."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if error.errno == errno.EPIPE:  # a reader that has seen enough
            raise
        # What is still held back would fail again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        typer.echo(f"error: what was found cannot be written: {error.strerror}", err=True)
        raise typer.Exit(2) from None


def _seconds(value: float) -> float:
    if not 1 <= value <= MOST_SECONDS:  # also nan
        raise typer.BadParameter(f"{value:g} must be in 1..{MOST_SECONDS:g} (seconds)")
    return value


def doctor(
    json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
    timeout: Annotated[
        float,
        typer.Option(callback=_seconds, help="seconds (1..86400) after which a probe is given up"),
    ] = SECONDS,
) -> None:
    """Say what this machine can do for a deployment, and what is missing and why.

    Ends with 0 unless something is missing that a deployment on CPU devices needs, too.
    """
    with _terminable():
        findings, values = examine(timeout)
    with _writable():
        if json:
            typer.echo(json_module.dumps(document(findings, values), indent=2))
        else:
            _print(findings)
    raise typer.Exit(0 if fit(findings) else 1)


def _print(findings: list[Finding]) -> None:
    console = Console()
    for table in tables(findings):
        console.print(table)
    if fit(findings):
        console.print("A deployment can run here; '-' marks what only some need.")
    else:
        lacks = ", ".join(f.what for f in findings if f.state == "missing")
        console.print(f"[red]missing for any deployment:[/red] {lacks}", highlight=False)
