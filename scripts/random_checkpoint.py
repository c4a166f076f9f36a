"""Random weights for a model that a config.json describes, as Hugging Face would store them.

They come from a seed and numpy alone, so that a folder can be made again anywhere, and are written
one by one, so that a folder may be larger than memory.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from models.checkpoint import shared_tensors
from models.quantization import SCALE_SUFFIX, BlockFp8, read_quantization
from models.registry import parse_config
from models.weights.export import stored_tensors
from models.weights.files import TensorWriter
from models.weights.native_info import is_native

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E4M3_MAX = 448.0
# The matrices that DeepSeek stores in fp8; embedding, head, router and eh_proj stay.
QUANTIZED = re.compile(r"\.(self_attn|mlp)\..*_proj(_with_mqa)?\.weight$")
# Families whose goldens were made when all tensors were drawn from one generator, by sorted name.
ONE_GENERATOR = ("qwen3", "llama")

Draw = Callable[[str, tuple[int, ...], np.dtype], np.ndarray]


def write_checkpoint(
    folder: Path, config: dict[str, Any], *, std: float = 0.25, seed: int = 0, files: int = 1
) -> None:
    """Write config.json and `files` safetensors files (an index too, if several) into `folder`.

    `config` is the content of config.json; its `dtype` or `torch_dtype` is that of the weights,
    its `quantization_config` makes fp8 of the linear layers. An MTP module that it announces is
    written, too. config.json comes last: without it the folder is no model, however far the weights
    have come. Raises ValueError for a config that no model family reads and for a folder in the
    native form, which would be read in place of what is written; neither changes the folder.
    """
    family, parsed = parse_config(config)
    if is_native(folder):
        raise ValueError(f"{folder} holds a model in the native form")
    folder.mkdir(parents=True, exist_ok=True)
    parsed = replace(parsed, mtp=parsed.mtp_layers > 0)
    names = stored_tensors(family, parsed)
    copies = shared_tensors(family, parsed)
    block = read_quantization(config)
    draw = _one_generator(seed, std) if family.name in ONE_GENERATOR else _by_name(seed, std)
    tensors: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
    for name, (shape, dtype) in names.items():
        if block is not None and QUANTIZED.search(name):
            tensors[name] = (shape, E4M3)
            tensors[name + SCALE_SUFFIX] = (block.grid(shape), np.dtype(np.float32))
        else:
            tensors[name] = (shape, dtype)
    file = folder / "config.json"
    with TensorWriter(folder, tensors, files=files) as writer:
        file.unlink(missing_ok=True)
        for name, (shape, dtype) in names.items():
            values = draw(copies.get(name, name), shape, dtype)
            if block is not None and name + SCALE_SUFFIX in tensors:
                values, scales = quantize(values, block)
                writer.write(name + SCALE_SUFFIX, scales)
            writer.write(name, values)
    file.write_text(json.dumps(config, indent=2) + "\n")


def quantize(values: np.ndarray, block: BlockFp8) -> tuple[np.ndarray, np.ndarray]:
    """values [R, C] as (e4m3 [R, C], f32 scales): the largest of each block becomes 448."""
    rows, columns = values.shape
    grid = block.grid(values.shape)
    wide = np.zeros((grid[0] * block.rows, grid[1] * block.columns), np.float32)
    wide[:rows, :columns] = values
    blocks = wide.reshape(grid[0], block.rows, grid[1], block.columns)
    largest = np.abs(blocks).max(axis=(1, 3))
    scales = np.where(largest > 0, largest / np.float32(E4M3_MAX), 1).astype(np.float32)
    stored = (blocks / scales[:, None, :, None]).reshape(wide.shape)[:rows, :columns]
    return stored.astype(E4M3), scales


def _one_generator(seed: int, std: float) -> Draw:
    """Draws that depend on the order of the calls."""
    rng = np.random.default_rng(seed)
    return lambda name, shape, dtype: _values(rng, name, shape, dtype, std)


def _by_name(seed: int, std: float) -> Draw:
    """Draws that depend on the tensor's name and not on any other tensor."""

    def draw(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        digest = hashlib.sha256(name.encode()).digest()
        rng = np.random.default_rng([seed, int.from_bytes(digest[:8], "little")])
        return _values(rng, name, shape, dtype, std)

    return draw


def _values(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], dtype: np.dtype, std: float
) -> np.ndarray:
    values = rng.standard_normal(shape, dtype=np.float32)
    if "norm" in name:
        values = 1 + np.float32(0.2) * values
    elif name.endswith("e_score_correction_bias"):
        values *= np.float32(0.3)  # as wide as sigmoid scores are, so that it changes choices
    else:
        values = std * values
    return values.astype(dtype)
