"""Stored tensors as parameters see them: any slice is read, dequantised and converted by itself."""

import math
from typing import Protocol

import numpy as np

from models.interface import HFSource
from models.quantization import BlockFp8
from models.weights.files import DTYPES

# Elements handled at a time: a transposed copy goes through memory in tiles, and dequantising
# holds f32 values and scales of one piece alone.
_PIECE = 1 << 18

_E4M3 = DTYPES["F8_E4M3"]
# Looking values up is five times faster than converting them.
_E4M3_VALUES = np.arange(256, dtype=np.uint8).view(_E4M3).astype(np.float32)


class TensorView(Protocol):
    """What a parameter reads of one stored tensor, in the parameter's order of dimensions."""

    def read(self, index: tuple[slice, ...], out: np.ndarray) -> None:
        """Put the slice `index` of the view into `out`, converted to its dtype."""
        ...


class _Slices:
    """From a slice of the parameter to the source's, reshaped: by its order and take."""

    def __init__(self, source: HFSource) -> None:
        self.view, self.order = source.view, source.order
        self.axis, self.begin, end = source.take or (0, 0, source.view[0])
        taken = (*source.view[: self.axis], end - self.begin, *source.view[self.axis + 1 :])
        self.shape = tuple(taken[axis] for axis in source.order)

    def __call__(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        slices = [slice(None)] * len(self.view)
        for axis, size, part in zip(self.order, self.shape, index, strict=True):
            begin, end, _ = part.indices(size)
            offset = self.begin if axis == self.axis else 0
            slices[axis] = slice(begin + offset, end + offset)
        return tuple(slices)


class PlainView:
    """A tensor stored in a dtype that numpy converts."""

    def __init__(self, stored: np.ndarray, source: HFSource) -> None:
        self._values = stored.reshape(source.view)
        self._slices = _Slices(source)

    def read(self, index: tuple[slice, ...], out: np.ndarray) -> None:
        """See TensorView."""
        values = self._values[self._slices(index)]
        target = out.transpose(np.argsort(self._slices.order))
        step = _rows_per_piece(values)
        for i in range(0, len(values), step):
            _put(target[i : i + step], values[i : i + step])


class BlockFp8View:
    """A matrix stored as e4m3 with a scale per block; read as values times scales, in f32.

    `stored` is e4m3 [R, C], `scales` f32 of the shape `block.grid`. Raises ValueError when the
    source's view does not keep rows and columns apart.
    """

    def __init__(
        self, stored: np.ndarray, scales: np.ndarray, block: BlockFp8, source: HFSource
    ) -> None:
        rows, columns = stored.shape
        self._scales = scales
        self._values = stored.view(np.uint8).reshape(source.view)
        self._slices = _Slices(source)
        self._split = _split(source.view, rows)
        # Which row and which column of the scales, for each row and column of the matrix.
        self._rows = (np.arange(rows) // block.rows).reshape(source.view[: self._split])
        self._columns = (np.arange(columns) // block.columns).reshape(source.view[self._split :])

    def read(self, index: tuple[slice, ...], out: np.ndarray) -> None:
        """See TensorView."""
        slices = self._slices(index)
        values = self._values[slices]
        rows, columns = self._rows[slices[: self._split]], self._columns[slices[self._split :]]
        of_columns = self._scales.take(columns.reshape(-1), axis=1)
        target = out.transpose(np.argsort(self._slices.order))
        step = _rows_per_piece(values)
        for i in range(0, len(values), step):
            piece = values[i : i + step]
            scales = of_columns.take(rows[i : i + step].reshape(-1), axis=0)
            scales = scales.reshape(piece.shape)
            scales *= np.take(_E4M3_VALUES, piece, mode="clip")
            _put(target[i : i + step], scales)


def _put(out: np.ndarray, piece: np.ndarray) -> None:
    """out[...] = piece; converting first, since converting and transposing at once is slow."""
    out[...] = piece.astype(out.dtype, copy=False)


def _rows_per_piece(values: np.ndarray) -> int:
    return max(1, _PIECE // max(1, math.prod(values.shape[1:])))


def _split(view: tuple[int, ...], rows: int) -> int:
    """How many of the view's dimensions the rows of the matrix were cut into, at least one."""
    for i in range(1, len(view)):
        if math.prod(view[:i]) == rows:
            return i
    raise ValueError(f"a block-quantised matrix of {rows} rows cannot be seen as {list(view)}")
