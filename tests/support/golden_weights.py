"""The random weights of the golden models, from their configs and seeds."""

from pathlib import Path

import numpy as np
from golden_cases import FEW_TOKENS, MODELS, STD
from random_checkpoint import write_checkpoint
from safetensors.numpy import load_file, save_file

HEADS = ("lm_head.weight", ".shared_head.head.weight")


def write(folder: Path, name: str) -> None:
    """Write the model `name` of golden_cases.MODELS into `folder`."""
    config, seed = MODELS[name]
    write_checkpoint(folder, config, std=STD, seed=seed)
    if name in FEW_TOKENS:
        kept, factor = FEW_TOKENS[name]
        file = folder / "model.safetensors"
        tensors = load_file(file)
        for head in (t for n, t in tensors.items() if n.endswith(HEADS)):
            head[kept:] *= np.float32(factor)
        save_file(tensors, file, {"format": "pt"})
