"""Reading and writing safetensors with the library alone, fp8 included."""

from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import deserialize
from safetensors.numpy import save_file

__all__ = ["load_file", "save_file"]

DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}


def load_file(file: Path) -> dict[str, np.ndarray]:
    """The tensors of one file; `safetensors.numpy.load_file` knows no fp8."""
    return {
        name: np.frombuffer(t["data"], DTYPES[t["dtype"]]).reshape(t["shape"])
        for name, t in deserialize(file.read_bytes())
    }
