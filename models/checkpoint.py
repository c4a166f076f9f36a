"""From a model folder to sharded parameters: safetensors, fp8 blocks, and the native form.

Importing it imports no orbax, which `models.weights.native` needs.
"""

from models.weights.loading import (
    Checkpoint,
    load_measured,
    load_params,
    open_checkpoint,
    shared_tensors,
    weights_fingerprint,
)
from models.weights.stats import LoadStats

__all__ = [
    "Checkpoint",
    "LoadStats",
    "load_measured",
    "load_params",
    "open_checkpoint",
    "shared_tensors",
    "weights_fingerprint",
]
