"""Small random models by name, written when asked for: `--model tiny-deepseek`.

They show the families whose released checkpoints fit no small machine. Their weights are random, so
their text is noise; what can be seen is that nodes agree.
"""

import contextlib
import io
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "models-data"
RECIPE = "made_with.json"  # in the model's folder: what it was made with


@dataclass(frozen=True)
class MadeModel:
    """Options of make_checkpoint.py, and the nodes to serve it with if none are asked for."""

    options: dict[str, Any]
    prefill: str
    decode: str
    devices: int = 2  # that the larger of them takes


# The vocabulary holds the tokenizer of bytes and divides by every small tp.
MADE = {
    "tiny-deepseek": MadeModel(
        {"family": "deepseek-v3", "vocab": 264, "tokenizer": True}, "tp=2", "tp=1"
    ),
    "tiny-qwen3-moe": MadeModel(
        {"family": "qwen3-moe", "vocab": 264, "tokenizer": True}, "tp=2,ep=2", "tp=2,ep=2"
    ),
}


def made(model: Path) -> MadeModel | None:
    """The made model that `model` names; a folder of that name goes before it."""
    return None if model.is_dir() else MADE.get(str(model))


def model_folder(model: Path, folder: Path = FOLDER) -> Path:
    """`model` itself, or where the made model of that name lies, written if it is not there.

    Raises OSError when it cannot be written.
    """
    recipe = made(model)
    if recipe is None:
        return model
    target, text = folder / str(model), json.dumps(recipe.options, indent=2) + "\n"
    if _made_with(target) == text:
        return target
    import make_checkpoint  # jax takes a second, which a folder that is there need not cost

    # Whole or not at all: another process may be about the same.
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / f".{model}-{os.getpid()}"
    with contextlib.redirect_stdout(io.StringIO()):  # it would name the folder that is renamed
        make_checkpoint.main(fresh, **recipe.options)
    (fresh / RECIPE).write_text(text)
    if target.exists():
        shutil.rmtree(target)
    try:
        fresh.rename(target)
    except OSError:
        shutil.rmtree(fresh)
        if _made_with(target) != text:
            raise
    return target


def default_nodes(model: Path, gpus: int = 0) -> tuple[str, str]:
    """A prefill and a decode node for a model, as `parse_node` takes them.

    `gpus` is how many there are (0: CPU devices, of which there are enough): with fewer than a made
    model's nodes take, each has one.
    """
    recipe = made(model)
    if recipe is None or 0 < gpus < recipe.devices:
        return "", ""
    return recipe.prefill, recipe.decode


def _made_with(folder: Path) -> str | None:
    file = folder / RECIPE
    return file.read_text() if file.is_file() else None
