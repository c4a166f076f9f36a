"""Reading the fields that Hugging Face configs share, in their old and new spellings."""

import sys
from collections.abc import Mapping
from typing import Any

_DTYPES = {"bfloat16": "bfloat16", "float32": "float32", "float16": "bfloat16"}


def integer(hf: Mapping[str, Any], name: str, default: int | None = None, *, least: int = 1) -> int:
    """A field that is an integer >= `least`; ValueError naming it when it is missing or is not."""
    value = hf.get(name)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"{name}: missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        bound = "> 0" if least == 1 else f">= {least}"
        raise ValueError(f"{name}: expected an integer {bound}, got {value!r}")
    return value


def number(
    fields: Mapping[str, Any], name: str, default: float | None = None, *, zero: bool = False
) -> float:
    """A finite number > 0, or 0 where `zero` allows it; ValueError naming the field otherwise."""
    value = fields.get(name)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"{name}: missing")
    right = isinstance(value, int | float) and not isinstance(value, bool)
    # JSON knows no infinity, but Python reads one, and an integer that no float can hold.
    right = right and abs(value) <= sys.float_info.max and (value > 0 or (zero and value == 0))
    if not right:
        raise ValueError(f"{name}: expected a number {'>=' if zero else '>'} 0, got {value!r}")
    return float(value)


def flag(fields: Mapping[str, Any], name: str, default: bool) -> bool:
    """A field that is true or false; ValueError naming it when it is something else."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected true or false, got {value!r}")
    return value


def dtype_of(hf: Mapping[str, Any]) -> str:
    """`dtype` or `torch_dtype`; float16 checkpoints run in bfloat16, none at all in float32."""
    value = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    if not isinstance(value, str) or value not in _DTYPES:
        raise ValueError(f"dtype: {value!r} is not supported (supported: {', '.join(_DTYPES)})")
    return _DTYPES[value]


def refuse(hf: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """ValueError for the first field present whose value is not among those supported."""
    for name, values in allowed.items():
        if name in hf and hf[name] not in values:
            shown = ", ".join(map(repr, values))
            raise ValueError(f"{name}: {hf[name]!r} is not supported (supported: {shown})")


def refuse_sliding_window(hf: Mapping[str, Any]) -> None:
    """ValueError when some layer would attend to a window only."""
    kinds = hf.get("layer_types") or []
    if not isinstance(kinds, list | tuple):
        raise ValueError(f"layer_types: expected a list, got {kinds!r}")
    other = sorted({str(kind) for kind in kinds} - {"full_attention"})
    if other:
        raise ValueError(f"layer_types: {', '.join(other)} is not supported (only full_attention)")
    # A config that has use_sliding_window keeps an idle sliding_window; one without means it.
    if hf.get("use_sliding_window", hf.get("sliding_window") is not None):
        name = "use_sliding_window" if "use_sliding_window" in hf else "sliding_window"
        raise ValueError(f"{name}: sliding-window attention is not supported")
