"""The safetensors files of a model folder: where each tensor lies, and writing them one by one."""

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from models.registry import read_json_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file: its dtype as written there, and where its bytes lie."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file; for a dtype in DTYPES."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def open(self) -> np.ndarray:
        """The tensor as a read-only memory map; nothing is read until it is indexed."""
        return np.memmap(self.file, DTYPES[self.dtype], "r", self.offset, self.shape)


def list_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a model folder, from its single file or from its sharded index.

    Raises FileNotFoundError or ValueError naming the file.
    """
    if (folder / SINGLE).is_file():
        return _read_header(folder / SINGLE)
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(f"no {SINGLE} and no {INDEX} in the model folder {folder}")
    weight_map = read_json_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(f, str) and Path(f).name == f for f in weight_map.values()
    ):
        raise ValueError(f"{folder / INDEX}: weight_map: expected tensor names to file names")
    missing = sorted({f for f in weight_map.values() if not (folder / f).is_file()})
    if missing:
        raise FileNotFoundError(f"{folder / INDEX} names files that are missing: {missing}")
    files = {f: _read_header(folder / f) for f in sorted(set(weight_map.values()))}
    absent = sorted(name for name, f in weight_map.items() if name not in files[f])
    if absent:
        raise ValueError(f"{folder / INDEX}: not in the file that it names: {', '.join(absent)}")
    return {name: files[f][name] for name, f in weight_map.items()}


class TensorWriter:
    """Writes tensors into one or several safetensors files, each as it comes, in any order.

    `tensors` tells name, shape and dtype of all of them beforehand; they are dealt to the `files`
    in turn. A context manager: leaving it without an error writes the index, where there are
    several files, and raises ValueError naming the tensors that were never written. Raises
    ValueError for fewer tensors than files or a dtype that is not in DTYPES.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]],
        *,
        files: int = 1,
    ) -> None:
        if not 1 <= files <= max(len(tensors), 1):
            raise ValueError(f"files: {files} is not between 1 and the {len(tensors)} tensors")
        wrong = sorted({str(dtype) for _, dtype in tensors.values()} - {str(d) for d in _NAMES})
        if wrong:
            raise ValueError(f"dtype: {', '.join(wrong)} cannot be written")
        self._folder, self._tensors, self._single = folder, dict(tensors), files == 1
        # The other form, if it is left from before, would be read in place of this one.
        (folder / (INDEX if files == 1 else SINGLE)).unlink(missing_ok=True)
        self._left = set(tensors)
        self._places: dict[str, tuple[BinaryIO, int]] = {}
        self._weight_map: dict[str, str] = {}
        with ExitStack() as stack:
            for i in range(files):
                name = SINGLE if files == 1 else f"model-{i + 1:05}-of-{files:05}.safetensors"
                stream = stack.enter_context((folder / name).open("wb"))
                self._begin(stream, list(tensors)[i::files], name)
            self._stack = stack.pop_all()

    def _begin(self, stream: BinaryIO, names: list[str], file: str) -> None:
        """Write a file's header, and note where its tensors go."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        # Wide dtypes first, so that every tensor is aligned.
        names = sorted(names, key=lambda n: -self._tensors[n][1].itemsize)
        begin, offsets = 0, {}
        for name in names:
            shape, dtype = self._tensors[name]
            end = begin + math.prod(shape) * dtype.itemsize
            offsets[name] = begin
            header[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [begin, end],
            }
            begin = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + begin)
        self._weight_map |= dict.fromkeys(names, file)
        self._places |= {n: (stream, 8 + len(text) + at) for n, at in offsets.items()}

    def write(self, name: str, array: np.ndarray) -> None:
        """Put one tensor into its file; ValueError when it is not as announced."""
        if (array.shape, array.dtype) != self._tensors[name]:
            raise ValueError(f"{name}: {array.dtype} {array.shape}, not {self._tensors[name]}")
        stream, offset = self._places[name]
        stream.seek(offset)
        stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        self._left.discard(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
        if error is not None:
            return
        if self._left:
            raise ValueError(f"never written: {', '.join(sorted(self._left))}")
        if not self._single:
            total = sum(math.prod(s) * d.itemsize for s, d in self._tensors.values())
            index = {
                "metadata": {"total_size": total},
                "weight_map": dict(sorted(self._weight_map.items())),
            }
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, its header checked against its size."""
    try:
        with safe_open(file, framework="numpy"):
            pass  # refuses a header that is broken or does not fit the file
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{file} is not a safetensors file: {error}") from None
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(file, t["dtype"], tuple(t["shape"]), 8 + size + t["data_offsets"][0])
        for name, t in header.items()
    }
