"""From a model folder to its family and config.

Families are those of this package and those that other distributions name as entry points
(`models/plugins.py`). A built-in family is found without looking at a plugin, so that nothing that
is installed beside it can change or stop it; only what no built-in family reads loads the plugins.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from models.deepseek_v3 import DEEPSEEK_V3
from models.interface import ModelConfig, ModelFamily
from models.plugins import load_plugins
from models.qwen3 import LLAMA, QWEN3
from models.qwen3_moe import QWEN3_MOE

FAMILIES: tuple[ModelFamily, ...] = (QWEN3, LLAMA, QWEN3_MOE, DEEPSEEK_V3)


def family_of(config: ModelConfig) -> ModelFamily:
    """The family that reads this config; ValueError when none does."""
    return _find(f"family: {config.family!r}", lambda f: f.name == config.family)


def load_config(path: str | Path) -> tuple[ModelFamily, ModelConfig]:
    """Read `path`/config.json.

    Raises FileNotFoundError when the folder or the file is missing, and ValueError, naming the
    file and the field, when it is not JSON or asks for something that no family supports. Where no
    family supports it the error also says which plugins could not be used, and why.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"model folder not found: {folder}")
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"no config.json in the model folder {folder}")
    hf = read_json_object(file)
    try:
        return parse_config(hf)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def parse_config(hf: Mapping[str, Any]) -> tuple[ModelFamily, ModelConfig]:
    """The family that reads this content of a config.json, and what it reads.

    Raises ValueError naming the field, as `load_config`.
    """
    names = hf.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise ValueError(f"architectures: expected a list of names, got {names!r}")
    family = _find(
        f"architectures: {', '.join(names)}",
        lambda f: not set(names).isdisjoint(f.architectures),
    )
    config = family.config_from_hf(hf)
    if config.family != family.name:
        raise ValueError(f"family: {config.family!r} was read by the family {family.name!r}")
    return family, config


def _find(field: str, wanted: Callable[[ModelFamily], bool]) -> ModelFamily:
    """The family that is wanted, a built-in one first.

    Raises ValueError, beginning with `field`, when there is none, or two plugins offer one.
    """
    for family in FAMILIES:
        if wanted(family):
            return family
    plugins = load_plugins(FAMILIES)
    fitting = [(p.origin, p.family) for p in plugins if p.family and wanted(p.family)]
    if len(fitting) == 1:
        return fitting[0][1]
    if fitting:
        raise ValueError(f"{field} is offered twice: {' and '.join(o for o, _ in fitting)}")
    families = [*FAMILIES, *(p.family for p in plugins if p.family)]
    why = f"is not supported (supported: {', '.join(n for f in families for n in f.architectures)})"
    broken = "; ".join(f"{p.origin}: {p.problem}" for p in plugins if p.problem)
    raise ValueError(f"{field} {why}" + (f"; not usable: {broken}" if broken else ""))


def read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; ValueError naming the file when it is something else."""
    try:
        value = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(value).__name__}")
    return value
