"""From a model folder to its family and config."""

import json
from pathlib import Path
from typing import Any

from models.interface import ModelConfig, ModelFamily
from models.qwen3 import LLAMA, QWEN3

FAMILIES: tuple[ModelFamily, ...] = (QWEN3, LLAMA)

# Name in config.json's `architectures` -> family.
_ARCHITECTURES = {name: family for family in FAMILIES for name in family.architectures}


def family_of(config: ModelConfig) -> ModelFamily:
    """The family that reads this config; ValueError when none does."""
    for family in FAMILIES:
        if family.name == config.family:
            return family
    raise ValueError(f"family: {config.family!r} is not one of {[f.name for f in FAMILIES]}")


def load_config(path: str | Path) -> tuple[ModelFamily, ModelConfig]:
    """Read `path`/config.json.

    Raises FileNotFoundError when the folder or the file is missing, and ValueError, naming the
    file and the field, when it is not JSON or asks for something that no family supports.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"model folder not found: {folder}")
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"no config.json in the model folder {folder}")
    hf = read_json_object(file)
    architectures = hf.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ValueError(f"{file}: architectures: expected a list of names, got {architectures!r}")
    for name in architectures:
        family = _ARCHITECTURES.get(name) if isinstance(name, str) else None
        if family is not None:
            try:
                return family, family.config_from_hf(hf)
            except ValueError as error:
                raise ValueError(f"{file}: {error}") from None
    raise ValueError(
        f"{file}: architectures: {', '.join(map(str, architectures))} is not supported "
        f"(supported: {', '.join(_ARCHITECTURES)})"
    )


def read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; ValueError naming the file when it is something else."""
    try:
        value = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(value).__name__}")
    return value
