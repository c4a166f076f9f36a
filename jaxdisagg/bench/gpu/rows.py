"""What a part prints, and who reads it: rows of JSON on stdout, one a line."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Tell = Callable[[Row], None]


def take_stdout() -> Tell:
    """What prints a row; all else that is printed from now on goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return lambda row: print(json.dumps(row), file=out, flush=True)


def read_rows(text: str) -> list[Row]:
    """The rows in what a part printed, up to one that was cut off."""
    rows: list[Row] = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def rows_in(file: Path) -> Callable[[str], list[Row]]:
    """For a program that writes {"rows": [...]} to a file, and prints for people."""

    def read(_: str) -> list[Row]:
        try:
            return list(json.loads(file.read_text())["rows"])
        except (OSError, ValueError, KeyError, TypeError):
            return []

    return read


def findings_in(text: str) -> list[Row]:
    """What `jaxdisagg doctor --json` printed: a row a finding, passed where nothing is missing."""
    try:
        findings = json.loads(text)["findings"]
    except (ValueError, KeyError, TypeError):
        return []
    return [finding | {"passed": finding["state"] != "missing"} for finding in findings]
