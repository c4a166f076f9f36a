"""A distribution from outside the tree, put where Python finds it, as pip would do."""

import shutil
import tomllib
from pathlib import Path

from repository import REPOSITORY

PLUGINS = REPOSITORY / "tests" / "plugins"
QWEN2 = PLUGINS / "qwen2"


def install(project: Path, site: Path) -> Path:
    """Copy the project's modules into the folder `site`, with the metadata of its pyproject.toml.

    Put `site` on sys.path or in PYTHONPATH afterwards. Returns `site`.
    """
    modules = {file.name: file.read_text() for file in project.glob("*.py")}
    described = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    return write(site, described["name"], described["version"], described["entry-points"], modules)


def write(
    site: Path,
    name: str,
    version: str,
    entry_points: dict[str, dict[str, str]],
    modules: dict[str, str],
) -> Path:
    """A distribution with these entry points (group -> name -> object) and modules, in `site`."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    shutil.rmtree(info, ignore_errors=True)
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, entries in entry_points.items():
        lines += [f"[{group}]", *(f"{entry} = {value}" for entry, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for file, text in modules.items():
        (site / file).write_text(text)
    return site
