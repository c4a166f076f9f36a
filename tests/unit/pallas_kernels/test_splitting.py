"""Cutting rows into pieces, and merging what pieces give."""

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
    pieces = np.asarray(cut(jnp.array(lengths, jnp.int32), 64, count))
    assert pieces.shape == (count, 3)
    blocks = [-(-n // 64) for n in lengths]
    covered = [
        [i for r, a, b in pieces if r == row for i in range(a, b)] for row in range(len(lengths))
    ]
    assert covered == [list(range(n)) for n in blocks]
    assert (np.diff(pieces[:, 0]) >= 0).all()
    used = pieces[:, 0] < len(lengths)
    sizes = pieces[:, 2] - pieces[:, 1]
    assert (sizes[used] > 0).all()
    assert (sizes[~used] == 0).all()
    assert sizes.max() <= max(-(-sum(blocks) // extra), 1)


@pytest.mark.parametrize(("rows", "heads"), [(1, 8), (64, 1), (64, 8), (200, 8)])
def test_there_are_pieces_for_every_processor_and_two_a_row(rows, heads):
    count = splitting.num_pieces(rows, heads, 2)
    assert count >= 2 * rows
    assert heads * count >= 132 * 2 - heads


def test_merged_pieces_are_one_softmax():
    rng = np.random.default_rng(0)
    scores, values = rng.standard_normal((2, 5, 30)) * 4, rng.standard_normal((2, 30, 7))
    cuts = [(0, 0, 11), (0, 11, 30), (1, 0, 2), (1, 2, 3), (1, 3, 30)]
    parts, lse = np.zeros((7, 5, 7)), np.full((7, 5), -1e30)
    for i, (row, a, b) in enumerate(cuts):
        weights = np.exp2(scores[row, :, a:b])
        parts[i] = weights @ values[row, a:b] / weights.sum(-1, keepdims=True)
        lse[i] = np.log2(weights.sum(-1))
    row = jnp.array([r for r, *_ in cuts] + [3, 3])
    f32 = (jnp.asarray(a, jnp.float32) for a in (parts, lse))
    ours = splitting.merge(*f32, row, 3)
    weights = np.exp2(scores)
    want = weights @ values / weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(ours[:2], want, atol=1e-5)
    assert (ours[2] == 0).all()  # a row without pieces
