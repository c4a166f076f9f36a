"""What tells a native model folder (`models.weights.native`) apart, without orbax."""

from dataclasses import dataclass
from pathlib import Path

from models.registry import read_json_object

NATIVE = "native.json"
VERSION = 1


@dataclass(frozen=True)
class NativeInfo:
    """What native.json says: the dtype of the weights, and the fingerprint of their content."""

    dtype: str
    weights: str


def is_native(folder: Path) -> bool:
    """Whether a model folder has the native form."""
    return (folder / NATIVE).is_file()


def read_info(folder: Path) -> NativeInfo:
    """native.json; ValueError naming it when it is damaged or of another version."""
    file = folder / NATIVE
    value = read_json_object(file)
    if value.get("version") != VERSION:
        raise ValueError(f"{file}: version: {value.get('version')!r} is not {VERSION}")
    for name in ("dtype", "weights"):
        if not isinstance(value.get(name), str):
            raise ValueError(f"{file}: {name}: expected a text, got {value.get(name)!r}")
    return NativeInfo(value["dtype"], value["weights"])
