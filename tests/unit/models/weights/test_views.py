"""Slices of a parameter read from the tensor that it is made of, in pieces of any size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import float8_e4m3fn

from models.interface import HFSource
from models.quantization import BlockFp8
from models.weights import views
from models.weights.views import BlockFp8View, PlainView

# Stored [12, 10] as outputs (3, 4) and inputs (10,) or (5, 2), in any order of dimensions.
VIEWS = [(12, 10), (3, 4, 10), (12, 5, 2), (3, 4, 5, 2)]
PIECES = st.sampled_from([1, 7, 40, 1000])


@st.composite
def slices(draw: st.DrawFn) -> tuple[HFSource, tuple[slice, ...]]:
    view = draw(st.sampled_from(VIEWS))
    order = tuple(draw(st.permutations(range(len(view)))))
    take = None
    if draw(st.booleans()):
        axis = draw(st.integers(0, len(view) - 1))
        begin = draw(st.integers(0, view[axis] - 1))
        take = (axis, begin, draw(st.integers(begin + 1, view[axis])))
    shape = list(view)
    if take:
        shape[take[0]] = take[2] - take[1]
    index = []
    for axis in order:
        begin = draw(st.integers(0, shape[axis] - 1))
        index.append(slice(begin, draw(st.integers(begin + 1, shape[axis]))))
    if draw(st.booleans()):
        index[0] = slice(None)
    return HFSource("w", (12, 10), view, order, take), tuple(index)


def plainly(values: np.ndarray, source: HFSource, index: tuple[slice, ...]) -> np.ndarray:
    values = values.reshape(source.view)
    if source.take:
        axis, begin, end = source.take
        values = np.take(values, range(begin, end), axis)
    return values.transpose(source.order)[index]


@given(slices(), PIECES)
def test_a_plain_tensor(case: tuple[HFSource, tuple[slice, ...]], piece: int):
    source, index = case
    values = np.arange(120, dtype=np.float32).reshape(12, 10)
    expected = plainly(values, source, index)
    out = np.full(expected.shape, np.nan, np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(views, "_PIECE", piece)
        PlainView(values, source).read(index, out)
    np.testing.assert_array_equal(out, expected)


@given(slices(), PIECES)
def test_a_quantised_matrix(case: tuple[HFSource, tuple[slice, ...]], piece: int):
    source, index = case
    rng = np.random.default_rng(0)
    stored = rng.standard_normal((12, 10)).astype(float8_e4m3fn)
    scales = rng.uniform(0.5, 2, (3, 4)).astype(np.float32)
    values = np.array(
        [[np.float32(stored[r, c]) * scales[r // 5, c // 3] for c in range(10)] for r in range(12)]
    )
    expected = plainly(values, source, index)
    out = np.full(expected.shape, np.nan, np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(views, "_PIECE", piece)
        BlockFp8View(stored, scales, BlockFp8(5, 3), source).read(index, out)
    np.testing.assert_array_equal(out, expected)


def test_a_view_that_mixes_rows_and_columns_is_refused():
    stored = np.zeros((12, 10), float8_e4m3fn)
    source = HFSource("w", (12, 10), (8, 15), (0, 1))
    with pytest.raises(ValueError, match=r"12 rows cannot be seen as \[8, 15\]"):
        BlockFp8View(stored, np.ones((3, 4), np.float32), BlockFp8(5, 3), source)
