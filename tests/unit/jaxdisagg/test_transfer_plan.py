"""The transfer plan, by carrying out what a StepPlanner posts by it on memory laid out without it.

Thousands of layouts: both kinds of cache, tp, dp, copies, page sizes, prompts, chunks, seeds.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_layouts import cuts, lengths, pairs, seeds
from plan_oracle import CONTEXT_BYTES, make_request

from ffi_transport.types import MAX_UNIT_BYTES
from jaxdisagg.cache_layout import CacheLayout
from jaxdisagg.page_spans import pages_for
from jaxdisagg.process_shares import process_of
from jaxdisagg.transfer_plan import (
    MAX_SPAN_UNITS,
    PlanUnit,
    check,
    plan,
    traffic,
)

BASE = CacheLayout("gqa", layers=2, kv_heads=4, head_dim=4, page_size=3, itemsize=2, tp=2)


def latent(tp: int, page_size: int = 3) -> CacheLayout:
    return CacheLayout(
        "mla", layers=2, kv_heads=1, head_dim=12, page_size=page_size, itemsize=2, tp=tp
    )


def arrives(pair, length, chunk_ends, seed, processes):
    """Carry a request out; every byte, count and context must be what the plan says."""
    destination = pair[1]
    transfer = plan(*pair, seed)
    check(transfer)
    request = make_request(*pair, length, seed=seed, cuts=chunk_ends, processes=processes)
    carried = request.carry_out()
    assert carried.problems() == []
    ranks: dict[int, list[int]] = {}
    for rank in range(destination.tp):
        at = destination.ordinal(request.destination.dp_rank, rank)
        ranks.setdefault(process_of(at, destination.devices, processes), []).append(rank)
    assert carried.units == {
        100 + process: transfer.expected_units(length, context=True, destination_ranks=held)
        for process, held in ranks.items()
    }
    assert sum(carried.units.values()) == transfer.expected_units(length, context=True)
    assert sorted(to for _, to in carried.contexts) == list(range(destination.tp))
    moved = traffic(transfer, length, context_bytes=CONTEXT_BYTES)
    np.testing.assert_array_equal(carried.sent, [moved.units, moved.bytes])


def several(pair):
    """Numbers of processes that the decode node may have."""
    devices = pair[1].devices
    return st.sampled_from([n for n in (1, 2, 3, 4) if devices % n == 0])


@settings(max_examples=2000)
@given(pairs(), lengths, cuts, seeds, st.data())
def test_every_byte_once_from_the_right_byte_and_the_count_is_what_is_issued(
    pair, length, chunk_ends, seed, data
):
    arrives(pair, length, chunk_ends, seed, data.draw(several(pair)))


@pytest.mark.slow
@settings(max_examples=10_000)
@given(pairs(), st.integers(2, 300), st.lists(st.integers(0, 400), max_size=9), seeds, st.data())
def test_ten_thousand_more_layouts(pair, length, chunk_ends, seed, data):
    arrives(pair, length, chunk_ends, seed, data.draw(several(pair)))


@settings(max_examples=300)
@given(pairs(), st.integers(1, 60), st.booleans(), seeds)
def test_the_count_depends_on_neither_seed_nor_grouping_of_ranks(pair, length, context, seed):
    transfer, other = plan(*pair, seed), plan(*pair, 0)
    expected = other.expected_units(length, context=context)
    assert transfer.expected_units(length, context=context) == expected
    by_rank = [
        transfer.expected_units(length, context=context, destination_ranks=[r])
        for r in range(pair[1].tp)
    ]
    assert sum(by_rank) == expected
    assert by_rank == [
        other.expected_units(length, context=context, destination_ranks=[r])
        for r in range(pair[1].tp)
    ]


@settings(max_examples=300)
@given(pairs(page_sizes=False), st.integers(1, 60))
def test_with_one_page_size_the_count_is_pages_times_source_shards_met(pair, length):
    """By the formula of docs/protocol.md, from overlapping ranges of heads alone."""
    source, destination = pair
    parts = 0
    for rank in range(destination.tp):
        heads = set(destination.heads_of(rank))
        shards = {tuple(source.heads_of(r)) for r in range(source.tp)}
        parts += sum(bool(heads.intersection(shard)) for shard in shards)
    pages = pages_for(length, source.page_size)
    expected = plan(*pair).expected_units(length, context=True)
    assert expected == pages * source.layers * parts + destination.tp


@settings(max_examples=300)
@given(pairs(), st.integers(2, 60), seeds)
def test_source_ranks_share_the_work_within_one_shard(pair, length, seed):
    """The bounds that `plan` states: between source ranks, and what a destination receives."""
    source, destination = pair
    moved = traffic(plan(*pair, seed), length, context_bytes=None)
    received = moved.bytes.sum(axis=0)
    assert len(set(received.tolist())) == 1
    of_a_head = int(received[0]) // len(destination.heads_of(0))
    shard = of_a_head * len(source.heads_of(0))
    sent = moved.bytes.sum(axis=1)
    assert np.ptp(sent) <= shard
    if source.replicas == 1 or destination.tp % source.tp == 0:
        assert np.ptp(sent) == 0
    if destination.tp >= source.tp:
        assert sent.all(), "an idle source device"
    with_context = traffic(plan(*pair, seed), length, context_bytes=1)
    contexts = with_context.bytes - moved.bytes
    assert contexts.sum(axis=0).tolist() == [1] * destination.tp
    assert np.ptp(contexts.sum(axis=1)) <= 1


@given(pairs(), seeds)
def test_a_plan_is_the_same_whenever_it_is_made(pair, seed):
    first = plan(*pair, seed)
    plan.cache_clear()
    assert plan(*pair, seed) == first


def sources_of(layouts: tuple[CacheLayout, CacheLayout], seed: int) -> list[int]:
    return [u.source_rank for u in plan(*layouts, seed).units]


def test_over_requests_a_narrow_decode_node_is_served_by_every_source_device():
    used = [sources_of((latent(8), latent(1)), seed)[0] for seed in range(400)]
    counts = np.bincount(used, minlength=8)
    # 50 are expected of each; 5 standard deviations of a fair draw are 33.
    assert (np.abs(counts - 50) < 33).all(), counts


def test_equal_latent_tp_is_a_bijection_that_the_seed_draws():
    drawn = {tuple(sources_of((latent(4), latent(4)), seed)) for seed in range(300)}
    assert all(sorted(order) == [0, 1, 2, 3] for order in drawn)
    assert len(drawn) == 24, "some order is never drawn"


def test_the_draw_is_the_same_on_every_machine():
    """Ranks in the order of what `printf "0 RANK" | b2sum -l 128` prints."""
    assert sources_of((latent(4), latent(4)), 0) == [1, 0, 3, 2]


def test_a_page_is_rebuilt_from_the_parts_of_several_sources():
    one = dataclasses.replace(BASE, tp=1)
    half = BASE.shard_bytes
    assert plan(BASE, one).units == (PlanUnit(0, 0, 0, 0, half), PlanUnit(1, 0, 0, half, half))


def test_a_page_is_split_among_several_destinations():
    four = dataclasses.replace(BASE, tp=4)
    one = BASE.head_bytes
    assert plan(BASE, four).units == (
        PlanUnit(0, 0, 0, 0, one),
        PlanUnit(0, 1, one, 0, one),
        PlanUnit(1, 2, 0, 0, one),
        PlanUnit(1, 3, one, 0, one),
    )


def test_heads_that_two_ranks_share_partly_are_units_of_their_own():
    """Six heads: {012}{345} on the prefill node, {01}{23}{45} on the decode node."""
    two = dataclasses.replace(BASE, kv_heads=6, tp=2)
    three = dataclasses.replace(two, tp=3)
    h = two.head_bytes
    assert plan(two, three).units == (
        PlanUnit(0, 0, 0, 0, 2 * h),
        PlanUnit(0, 1, 2 * h, 0, h),
        PlanUnit(1, 1, 0, h, h),
        PlanUnit(1, 2, h, 0, 2 * h),
    )
    assert plan(three, two).units == (
        PlanUnit(0, 0, 0, 0, 2 * h),
        PlanUnit(1, 0, 0, 2 * h, h),
        PlanUnit(1, 1, h, 0, h),
        PlanUnit(2, 1, 0, h, 2 * h),
    )


def test_replicated_heads_are_dealt_to_their_copies_by_the_seed():
    layout = dataclasses.replace(BASE, kv_heads=2, tp=4)
    assert [layout.heads_of(r) for r in range(4)] == [range(1), range(1), range(1, 2), range(1, 2)]
    drawn = {
        tuple((u.source_rank, u.destination_rank) for u in plan(layout, layout, seed).units)
        for seed in range(40)
    }
    assert drawn == {((a, 0), (1 - a, 1), (b, 2), (5 - b, 3)) for a in (0, 1) for b in (2, 3)}


def test_pages_of_two_sizes_are_units_by_head_plane_and_span():
    """One head, pages of 2 tokens to pages of 3: tokens 0-1, 2, 3, 4-5 of each plane."""
    two = CacheLayout("gqa", 1, kv_heads=1, head_dim=1, page_size=2, itemsize=1, tp=1)
    three = dataclasses.replace(two, page_size=3)
    assert plan(two, three).units == (
        PlanUnit(0, 0, 0, 0, 2, 0),
        PlanUnit(0, 0, 2, 3, 2, 0),
        PlanUnit(0, 0, 0, 2, 1, 1),
        PlanUnit(0, 0, 2, 5, 1, 1),
        PlanUnit(0, 0, 1, 0, 1, 2),
        PlanUnit(0, 0, 3, 3, 1, 2),
        PlanUnit(0, 0, 0, 1, 2, 3),
        PlanUnit(0, 0, 2, 4, 2, 3),
    )


@pytest.mark.parametrize(("length", "spans"), [(1, 0), (2, 1), (17, 1), (18, 2), (25, 2), (26, 3)])
def test_only_spans_that_hold_tokens_are_counted(length, spans):
    transfer = plan(latent(1, page_size=16), latent(2, page_size=24))
    assert transfer.expected_units(length, context=False) == spans * 2 * 2


def test_a_run_longer_than_a_write_is_several_units():
    wide = CacheLayout("gqa", 1, kv_heads=2, head_dim=4096, page_size=40, itemsize=4, tp=1)
    half = wide.head_bytes
    assert half == 2 * 40 * 4096 * 4 == 5 * MAX_UNIT_BYTES // 4
    transfer = plan(wide, dataclasses.replace(wide, tp=2))
    for rank in range(2):
        parts = [u for u in transfer.units if u.destination_rank == rank]
        assert [(u.source_offset - rank * half, u.destination_offset, u.length) for u in parts] == [
            (0, 0, MAX_UNIT_BYTES),
            (MAX_UNIT_BYTES, MAX_UNIT_BYTES, half - MAX_UNIT_BYTES),
        ]
    check(transfer)
    assert transfer.expected_units(42, context=False) == 2 * 2 * 2


def test_a_latent_longer_than_a_write_is_several_units_from_one_source():
    wide = CacheLayout("mla", 1, kv_heads=1, head_dim=8192, page_size=96, itemsize=2, tp=2)
    transfer = plan(wide, dataclasses.replace(wide, tp=3, page_size=144), 5)
    for rank in range(3):
        parts = [u for u in transfer.units if u.destination_rank == rank and u.span == 0]
        assert [u.length for u in parts] == [MAX_UNIT_BYTES, 32 * 8192 * 2]
        assert len({u.source_rank for u in parts}) == 1
    check(transfer)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kv_heads": 8}, "kv_heads: 4"),
        ({"layers": 3}, "layers: 2 on the prefill node, 3 on the decode node"),
        ({"head_dim": 8}, "head_dim: 4"),
        ({"itemsize": 4}, "itemsize: 2"),
    ],
)
def test_layouts_that_cannot_be_mapped_name_the_field_and_both_values(change, text):
    with pytest.raises(ValueError, match=text):
        plan(BASE, dataclasses.replace(BASE, **change))


def test_page_sizes_that_cut_each_other_too_often_are_refused():
    """(1000 + 1001) / 1 - 1 spans of four heads' keys and values."""
    thousand, odd = (dataclasses.replace(BASE, page_size=size) for size in (1000, 1001))
    with pytest.raises(ValueError, match="page_size: 1000 on the prefill node, 1001 on") as caught:
        plan(thousand, odd)
    units = 2000 * 4 * 2
    assert f"into {units} units every 1001000 tokens, at most {MAX_SPAN_UNITS}" in str(caught.value)
    assert len(plan(BASE, dataclasses.replace(BASE, page_size=500)).units) == 502 * 8
    huge = dataclasses.replace(BASE, page_size=2**61)
    with pytest.raises(ValueError, match=f"page_size: {2**61} on the prefill"):
        plan(huge, BASE)


def test_a_latent_page_is_whole_on_every_rank_and_no_gqa_page():
    assert latent(2).shard_bytes == latent(8).shard_bytes == 3 * 12 * 2
    with pytest.raises(ValueError, match="kind: gqa on the prefill node, mla on"):
        plan(BASE, latent(2))
