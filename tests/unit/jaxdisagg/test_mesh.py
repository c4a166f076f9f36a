"""tp= and dp= become (dp, kv, rep), or are refused by name."""

import pytest

from jaxdisagg.mesh import expert_axes, make_mesh, rank_devices, split_tp


@pytest.mark.parametrize(
    ("tp", "heads", "split"), [(1, 8, (1, 1)), (4, 8, (4, 1)), (8, 2, (2, 4)), (4, 1, (1, 4))]
)
def test_tp_splits_over_heads_then_copies(tp, heads, split):
    assert split_tp(tp, heads) == split


@pytest.mark.parametrize(("tp", "heads"), [(3, 4), (6, 4), (2, 3)])
def test_tp_that_fits_no_heads_is_refused(tp, heads):
    with pytest.raises(ValueError, match=f"tp={tp} does not fit {heads} KV heads"):
        split_tp(tp, heads)


def test_axes_sizes_and_ranks():
    mesh = make_mesh(tp=4, dp=2, kv_heads=2)
    assert mesh.axis_names == ("dp", "kv", "rep")
    assert mesh.devices.shape == (2, 2, 2)
    assert [d.id for d in rank_devices(mesh)] == list(range(8))


def test_too_few_devices_are_counted():
    with pytest.raises(ValueError, match="tp=8 dp=2 needs 16 devices, 8 are there"):
        make_mesh(tp=8, dp=2, kv_heads=8)


INSIDE = ["kv", "rep"]


@pytest.mark.parametrize(
    ("tp", "dp", "ep", "experts", "expert_ffn"),
    [
        (1, 1, 1, [], INSIDE),
        (4, 2, 1, [], INSIDE),
        (4, 2, 2, ["dp"], INSIDE),
        (4, 2, 4, INSIDE, []),
        (4, 2, 8, ["dp", *INSIDE], []),
        (2, 2, 2, ["dp"], INSIDE),  # dp before tp
        (4, 1, 4, ["dp", *INSIDE], []),
        (1, 4, 4, ["dp", *INSIDE], []),
    ],
)
def test_ep_cuts_experts_over_dp_tp_or_both(tp, dp, ep, experts, expert_ffn):
    assert expert_axes(tp=tp, dp=dp, ep=ep) == {"experts": experts, "expert_ffn": expert_ffn}


def test_an_ep_that_is_no_product_of_the_mesh_is_refused():
    with pytest.raises(ValueError, match=r"ep=3 must be 1, dp=2, tp=4 or dp\*tp=8"):
        expert_axes(tp=4, dp=2, ep=3)
