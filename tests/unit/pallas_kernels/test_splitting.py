"""Cutting rows into pieces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import splitting

cut = jax.jit(splitting.cut, static_argnums=(1, 2))


@given(
    lengths=st.lists(st.integers(0, 5000), min_size=5, max_size=5),
    extra=st.sampled_from([1, 9, 40]),
)
@settings(max_examples=60, deadline=None)
def test_pieces_cover_every_block_once_and_are_nearly_equal(lengths, extra):
    count = len(lengths) + extra
    pieces, bounds = (np.asarray(a) for a in cut(jnp.array(lengths, jnp.int32), 64, count))
    assert pieces.shape == (count, 3)
    blocks = [-(-n // 64) for n in lengths]
    covered = [
        [i for r, a, b in pieces if r == row for i in range(a, b)] for row in range(len(lengths))
    ]
    assert covered == [list(range(n)) for n in blocks]
    assert (np.diff(pieces[:, 0]) >= 0).all()
    np.testing.assert_array_equal(bounds, np.searchsorted(pieces[:, 0], range(len(lengths) + 1)))
    used = pieces[:, 0] < len(lengths)
    sizes = pieces[:, 2] - pieces[:, 1]
    assert (sizes[used] > 0).all()
    assert (sizes[~used] == 0).all()
    assert sizes.max() <= max(-(-sum(blocks) // extra), 1)


@pytest.mark.parametrize(("rows", "heads"), [(1, 8), (64, 1), (64, 8), (200, 8)])
def test_there_are_pieces_for_every_processor_and_two_a_row(rows, heads):
    count = splitting.num_pieces(rows, heads, 2)
    assert count >= 2 * rows
    assert heads * count >= min(132 * 2 - heads, 96 * heads * rows)
