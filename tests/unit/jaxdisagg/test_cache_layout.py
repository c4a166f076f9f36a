"""The layout of a cache in a node's devices, against the shape that the model allocates."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from plan_layouts import pairs
from plan_oracle import heads_of, page_shape

from jaxdisagg.cache_layout import CacheLayout

BASE = CacheLayout("gqa", layers=2, kv_heads=4, head_dim=4, page_size=3, itemsize=2, tp=2)


@given(pairs())
def test_each_rank_holds_the_heads_that_the_mesh_puts_there(pair):
    for layout in pair:
        assert layout.shard_bytes == np.prod(page_shape(layout))
        for rank in range(layout.tp):
            held = list(layout.heads_of(rank))
            assert held == heads_of(layout, rank)
            assert all(rank in layout.ranks_of(layout.shard_of(head)) for head in held)
        copies = [rank for shard in range(layout.shards) for rank in layout.ranks_of(shard)]
        assert copies == list(range(layout.tp))


def test_bytes_are_numbered_by_head_plane_and_token_whatever_the_page_size():
    """Of four tokens of one byte, in pages of 4 and of 2; heads 2 and 3 are on rank 1."""
    one = CacheLayout("gqa", 1, kv_heads=4, head_dim=1, page_size=4, itemsize=1, tp=2)
    assert one.byte_ids(1, 4).tolist() == [[*range(16, 32)]]
    two = dataclasses.replace(one, page_size=2)
    assert two.byte_ids(1, 4).tolist() == [
        [16, 17, 20, 21, 24, 25, 28, 29],
        [18, 19, 22, 23, 26, 27, 30, 31],
    ]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kind": "mha"}, "kind"),
        ({"layers": 0}, "layers"),
        ({"tp": 3}, "tp: 3"),
        ({"tp": 0}, "tp: 0"),
        ({"dp": 0}, "dp: 0"),
        ({"tp": 2**40}, "tp: 1099511627776 with dp 1, must be at most 4096 devices"),
        ({"tp": 64, "dp": 65}, "tp: 64 with dp 65"),
        ({"kind": "mla"}, "kv_heads: 4"),
    ],
)
def test_a_layout_that_cannot_exist_names_the_field(change, text):
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(BASE, **change)


def test_what_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="rank: 2"):
        BASE.heads_of(2)
    with pytest.raises(ValueError, match="head: 4"):
        BASE.shard_of(4)
    with pytest.raises(ValueError, match="shard: 2"):
        BASE.ranks_of(2)


def test_devices_are_numbered_dp_major():
    layout = dataclasses.replace(BASE, dp=3)
    assert [layout.ordinal(d, r) for d in range(3) for r in range(2)] == list(range(6))
