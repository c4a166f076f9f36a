"""`jaxdisagg doctor`: asks all probes at once, prints what they found."""

import json as json_module
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxdisagg.doctor.finding import Finding, Values
from jaxdisagg.doctor.probe import PROBES, ask

SECONDS = 90.0
_MARKS = {"ok": ("ok", "green"), "absent": ("-", "yellow"), "missing": ("missing", "bold red")}


def examine(timeout: float = SECONDS) -> tuple[list[Finding], dict[str, Values]]:
    """All findings, and the values that they judge by probe; none takes longer than `timeout` s."""
    with ThreadPoolExecutor(len(PROBES)) as pool:
        answers = pool.map(lambda name: ask(name, timeout), PROBES)
        values = dict(zip(PROBES, answers, strict=True))
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


def doctor(
    json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="seconds after which a probe is given up")
    ] = SECONDS,
) -> None:
    """Say what this machine can do for a deployment, and what is missing and why.

    Ends with 0 unless something is missing that a deployment on CPU devices needs, too.
    """
    findings, values = examine(timeout)
    if json:
        typer.echo(json_module.dumps(document(findings, values), indent=2))
    else:
        console = Console()
        for table in tables(findings):
            console.print(table)
        if fit(findings):
            console.print("A deployment can run here; '-' marks what only some need.")
        else:
            lacks = ", ".join(f.what for f in findings if f.state == "missing")
            console.print(f"[red]missing for any deployment:[/red] {lacks}", highlight=False)
    raise typer.Exit(0 if fit(findings) else 1)
