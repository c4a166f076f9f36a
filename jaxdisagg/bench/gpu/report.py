"""The outcomes of a check as JSON and as a page of tables."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxdisagg.bench.gpu.rows import Row
from jaxdisagg.bench.gpu.steps import Outcome

LONGEST_CELL = 120


def document(outcomes: Sequence[Outcome], about: dict[str, Any]) -> dict[str, Any]:
    """All of it as plain values; `passed` if every step has."""
    return {
        "about": about,
        "passed": bool(outcomes) and all(outcome.state == "passed" for outcome in outcomes),
        "steps": [asdict(outcome) for outcome in outcomes],
    }


def markdown(outcomes: Sequence[Outcome], about: dict[str, Any]) -> str:
    """A table of the steps, and one of each step's rows; dicts in rows are in the JSON alone."""
    text = ["# GPU check", "", ", ".join(f"{name} {value}" for name, value in about.items()), ""]
    text += _table(
        [
            {
                "step": o.name,
                "state": o.state,
                "seconds": o.seconds,
                "rows passed": f"{sum(row.get('passed', True) for row in o.rows)}/{len(o.rows)}",
            }
            for o in outcomes
        ]
    )
    for outcome in outcomes:
        text += [f"## {outcome.name}", ""]
        # Rows of one form follow each other, so that a step may have several tables.
        for rows in _runs(outcome.rows):
            text += _table(rows)
        if outcome.said:
            text += ["```", outcome.said.replace("```", "'''"), "```", ""]
    return "\n".join(text)


def _runs(rows: Sequence[Row]) -> list[list[Row]]:
    runs: list[list[Row]] = []
    for row in rows:
        ours, theirs = set(_columns([row])), set(_columns(runs[-1])) if runs else set()
        if runs and (ours <= theirs or theirs <= ours):  # what some have more leaves cells empty
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


def _columns(rows: Sequence[Row]) -> list[str]:
    names: dict[str, None] = {}
    for row in rows:
        names |= {name: None for name, value in row.items() if not isinstance(value, dict)}
    return list(names)


def _table(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return ["no rows", ""]
    columns = _columns(rows)
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        lines.append("| " + " | ".join(_cell(row.get(name)) for name in columns) + " |")
    return [*lines, ""]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list) and value:
        return "..".join(map(_cell, value))
    text = " ".join(str(value).replace("|", "/").split())
    return text if len(text) <= LONGEST_CELL else text[:LONGEST_CELL] + "..."


def write(folder: Path, outcomes: Sequence[Outcome], about: dict[str, Any]) -> None:
    """Write gpu_check.json and gpu_check.md, each whole or not at all."""
    for name, text in (
        ("gpu_check.json", json.dumps(document(outcomes, about), indent=1) + "\n"),
        ("gpu_check.md", markdown(outcomes, about)),
    ):
        fresh = folder / f".{name}"
        fresh.write_text(text)
        fresh.replace(folder / name)
