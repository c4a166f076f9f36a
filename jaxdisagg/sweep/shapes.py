"""The model of a sweep: shapes from a config.json of any name, no weights."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from models.interface import ModelConfig, ModelFamily
from models.registry import parse_config, read_json_object


@dataclass(frozen=True)
class ModelShapes:
    """A family and the config that it read, with the dtype and `mtp` that the nodes would have."""

    name: str
    family: ModelFamily
    config: ModelConfig


def known_names(folder: Path) -> list[str]:
    """The names of the configs that are kept in `folder`."""
    return sorted(file.stem for file in folder.glob("*.json"))


def find_config(text: str, folder: Path) -> Path:
    """The config.json that `text` means: a file, a model folder, or a name of one in `folder`.

    Raises ValueError, naming the option and what there is, when it means none.
    """
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ValueError(f"config: no config.json in the model folder {text}")
        return path
    if path.is_file():
        return path
    names = known_names(folder)
    if text in names:
        return folder / f"{text}.json"
    raise ValueError(f"config: {text!r} is no file, no model folder and none of {', '.join(names)}")


def read_shapes(path: Path, *, dtype: str | None = None, mtp: bool = False) -> ModelShapes:
    """The model of a config.json; `dtype` None is the config's own.

    Raises ValueError naming the file and the field for what no family supports.
    """
    try:
        family, config = parse_config(read_json_object(path))
        chosen: dict[str, Any] = {"mtp": mtp} | ({} if dtype is None else {"dtype": dtype})
        config = replace(config, **chosen)
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(str(path)) else f"{path}: {text}") from None
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return ModelShapes(name, family, config)
