"""Block-quantised fp8 weights, as DeepSeek publishes them: what a config asks for, and undoing it.

A matrix [rows, columns] is stored as float8 e4m3 beside a matrix of f32 scales, one per block of
(usually) 128 x 128 elements; the last block of a row or a column may be partial. An element is its
stored value times its block's scale (DeepSeek-V3 technical report, section 3.3.2).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FIELD = "quantization_config"
SCALE_SUFFIX = "_scale_inv"  # after the name of the quantised tensor

# What a config may say besides the block size. Weights are dequantised at loading and activations
# are never quantised, so that what is said here about activations and about layers left alone does
# not matter; whatever is not known to be so is refused.
_ALLOWED: dict[str, tuple[Any, ...] | None] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3",),
    "activation_scheme": ("dynamic",),
    "scale_fmt": ("ue8m0", None),  # powers of two, and still stored as f32
    "weight_block_size": None,
    "modules_to_not_convert": None,
    "ignored_layers": None,
}


@dataclass(frozen=True)
class BlockFp8:
    """The blocks, in elements, of which each has its scale."""

    rows: int
    columns: int

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The shape of the scales of a matrix of this shape."""
        return -(-shape[0] // self.rows), -(-shape[1] // self.columns)


def read_quantization(hf: Mapping[str, Any]) -> BlockFp8 | None:
    """The quantisation that a Hugging Face config.json asks for; None without one.

    Raises ValueError naming the field for anything but fp8 e4m3 weights in blocks.
    """
    fields = hf.get(FIELD)
    if fields is None:
        return None
    if not isinstance(fields, Mapping):
        raise ValueError(f"{FIELD}: expected an object, got {fields!r}")
    for name, value in fields.items():
        if name not in _ALLOWED:
            raise ValueError(f"{FIELD}.{name}: {value!r} is not supported (unknown field)")
        allowed = _ALLOWED[name]
        if allowed is not None and value not in allowed:
            shown = ", ".join(map(repr, allowed))
            raise ValueError(f"{FIELD}.{name}: {value!r} is not supported (supported: {shown})")
    for name in ("quant_method", "weight_block_size"):
        if name not in fields:
            raise ValueError(f"{FIELD}.{name}: missing")
    block = fields["weight_block_size"]
    if (
        not isinstance(block, list | tuple)
        or len(block) != 2
        or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in block)
    ):
        raise ValueError(f"{FIELD}.weight_block_size: expected two integers > 0, got {block!r}")
    return BlockFp8(*block)
