"""scripts/mesh_sweep.py run in the test's own process."""

from typing import Any

import pytest
import typer
from repository import load_script


def sweep(capsys: pytest.CaptureFixture[str], expected: int = 0, **options: Any) -> str:
    """Run the script's main, which must end with `expected`; what it printed, in one line."""
    script = load_script("mesh_sweep")
    try:
        script.main(**options)
        code = 0
    except typer.Exit as ended:
        code = ended.exit_code
    text = " ".join(capsys.readouterr().out.split())
    assert code == expected, text
    return text
