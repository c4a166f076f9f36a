"""What every benchmark writes beside its rows: where and with what it ran."""

import json
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any


def environment(**more: Any) -> dict[str, Any]:
    """Processor, cores, versions; no host name and no path."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "kernel": platform.release(),
        **{name: metadata.version(name) for name in ("jaxdisagg", "jax", "jaxlib")},
        **more,
    }


def check_json(path: Path | None) -> None:
    """Raise ValueError if rows could not be written there in the end; None is nowhere."""
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"--json: no folder {path.parent}")
    if path is not None and path.is_dir():
        raise ValueError(f"--json: {path} is a folder")


def write_json(path: Path, environment: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Write {"environment": ..., "rows": [...]} to `path`."""
    document = {"environment": environment, "rows": list(rows)}
    path.write_text(json.dumps(document, indent=2) + "\n")
