"""The transfer plan, by carrying it out on small caches built without its help."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdisagg import transfer_plan
from jaxdisagg.transfer_plan import (
    CacheLayout,
    PlanUnit,
    TransferPlan,
    check,
    chunk_pages,
    pages_for,
    plan,
    traffic,
)


@st.composite
def layouts(draw) -> CacheLayout:
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    return CacheLayout(
        "gqa",
        layers=draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 4, 6])),
        page_size=draw(st.integers(1, 5)),
        itemsize=draw(st.sampled_from([1, 2, 4])),
        tp=draw(st.sampled_from(fitting_tp(kv_heads))),
        dp=draw(st.integers(1, 2)),
    )


def fitting_tp(kv_heads: int) -> list[int]:
    return [t for t in (1, 2, 3, 4, 6, 8, 12) if kv_heads % t == 0 or t % kv_heads == 0]


@st.composite
def head_pairs(draw) -> tuple[CacheLayout, CacheLayout]:
    """A prefill and a decode node of one cache of sharded heads, each with any tp that fits."""
    source = draw(layouts())
    tp = draw(st.sampled_from(fitting_tp(source.kv_heads)))
    return source, dataclasses.replace(source, tp=tp, dp=3 - source.dp)


@st.composite
def latent_pairs(draw) -> tuple[CacheLayout, CacheLayout]:
    """A prefill and a decode node of one latent cache, each with any tp and dp."""
    source = CacheLayout(
        "mla",
        layers=draw(st.integers(1, 3)),
        kv_heads=1,
        head_dim=draw(st.sampled_from([1, 5, 12])),
        page_size=draw(st.integers(1, 5)),
        itemsize=draw(st.sampled_from([1, 2, 4])),
        tp=draw(st.integers(1, 8)),
        dp=draw(st.integers(1, 3)),
    )
    return source, dataclasses.replace(
        source, tp=draw(st.integers(1, 8)), dp=draw(st.integers(1, 3))
    )


def cache_shape(layout: CacheLayout, pages: int) -> tuple[int, ...]:
    """Of a cache of all ranks, the last axis being the bytes of an element."""
    if layout.kind == "mla":
        return (pages, layout.page_size, layout.head_dim, layout.itemsize)
    return (pages, layout.kv_heads, 2, layout.page_size, layout.head_dim, layout.itemsize)


def shard(cache: np.ndarray, layout: CacheLayout, rank: int) -> np.ndarray:
    """What mesh axes (kv, rep) put on tp rank `rank` of a cache [pages, kv_heads, 2, Z, H].

    A latent cache [pages, Z, R+C] is on every rank.
    """
    if layout.kind == "mla":
        return cache.copy()
    kv = min(layout.tp, layout.kv_heads)
    devices = np.arange(layout.tp).reshape(kv, layout.tp // kv)
    part = int(np.argwhere(devices == rank)[0, 0])
    return np.split(cache, kv, axis=1)[part].copy()


def carry_out(transfer: TransferPlan, rng: np.random.Generator, length: int, chunks: list[int]):
    """Run the transfer by its plan. Returns (wrong destination bytes, times written, units)."""
    layout, into = transfer.source, transfer.destination
    rows, need = length - 1, pages_for(length, layout.page_size)
    pool = need + 3
    source_pages = rng.permutation(pool)[:need]
    target_pages = rng.permutation(pool)[:need]
    bounds = sorted({0, rows, *(c % (rows + 1) for c in chunks)})
    issued = wrong = 0
    times = np.zeros((layout.layers, into.tp, pool, into.shard_bytes), np.int64)
    for layer in range(layout.layers):
        cache = rng.integers(0, 256, cache_shape(layout, pool), dtype=np.uint8)
        source = [shard(cache, layout, r).reshape(pool, -1) for r in range(layout.tp)]
        target = [np.zeros((pool, into.shard_bytes), np.uint8) for _ in range(into.tp)]
        for begin, end in pairwise(bounds):
            for page in chunk_pages(begin, end, rows, layout.page_size):
                for u in transfer.units:
                    to = slice(u.destination_offset, u.destination_offset + u.length)
                    origin = slice(u.source_offset, u.source_offset + u.length)
                    part = source[u.source_rank][source_pages[page], origin]
                    target[u.destination_rank][target_pages[page], to] = part
                    times[layer, u.destination_rank, target_pages[page], to] += 1
                    issued += 1
        moved = np.zeros_like(cache)
        moved[target_pages] = cache[source_pages]
        for rank in range(into.tp):
            wrong += int((target[rank] != shard(moved, into, rank).reshape(pool, -1)).sum())
    untouched = np.setdiff1d(np.arange(pool), target_pages)
    assert not times[:, :, untouched].any(), "a page of someone else was written"
    return wrong, times[:, :, target_pages], issued


pairs = head_pairs() | latent_pairs()


@settings(max_examples=150, deadline=None)
@given(pairs, st.integers(2, 23), st.lists(st.integers(0, 99), max_size=4), st.integers(0, 9))
def test_every_byte_once_from_the_right_byte_and_the_count_is_what_is_issued(
    pair, length, chunks, seed
):
    transfer = plan(*pair, seed)
    check(transfer)
    wrong, times, issued = carry_out(transfer, np.random.default_rng(seed), length, chunks)
    assert wrong == 0
    assert (times == 1).all()
    assert issued == transfer.expected_units(length, context=False)
    contexts = len(transfer.context_sources)
    assert contexts == pair[1].tp, "each rank that decodes gets the context"
    assert transfer.expected_units(length, context=True) == issued + contexts


@given(pairs, st.integers(1, 60), st.booleans(), st.integers(0, 2**32 - 1))
def test_the_count_depends_on_neither_seed_nor_grouping_of_ranks(pair, length, context, seed):
    transfer = plan(*pair, seed)
    expected = plan(*pair, 0).expected_units(length, context=context)
    assert transfer.expected_units(length, context=context) == expected
    by_rank = [
        transfer.expected_units(length, context=context, destination_ranks=[r])
        for r in range(pair[1].tp)
    ]
    assert sum(by_rank) == expected
    assert by_rank == [
        plan(*pair, 0).expected_units(length, context=context, destination_ranks=[r])
        for r in range(pair[1].tp)
    ]


@given(latent_pairs(), st.integers(0, 2**32 - 1))
def test_every_decode_rank_gets_one_latent_copy_from_evenly_used_sources(pair, seed):
    source, destination = pair
    transfer = plan(source, destination, seed)
    assert [u.destination_rank for u in transfer.units] == list(range(destination.tp))
    assert {u.length for u in transfer.units} == {source.shard_bytes}, "one write a page"
    used = [0] * source.tp
    for unit in transfer.units:
        used[unit.source_rank] += 1
    assert max(used) - min(used) <= 1
    if destination.tp >= source.tp:
        assert min(used) >= 1, "an idle source device"
    assert transfer.context_sources == tuple(u.source_rank for u in transfer.units)
    assert plan(source, destination, seed) == transfer


def latent(tp: int) -> CacheLayout:
    return CacheLayout("mla", layers=2, kv_heads=1, head_dim=12, page_size=3, itemsize=2, tp=tp)


def sources_of(layouts: tuple[CacheLayout, CacheLayout], seed: int) -> list[int]:
    return [u.source_rank for u in plan(*layouts, seed).units]


@given(head_pairs(), st.integers(0, 2**32 - 1))
def test_copies_of_heads_are_used_evenly(pair, seed):
    source, destination = pair
    transfer = plan(source, destination, seed)
    used = np.bincount([u.source_rank for u in transfer.units], minlength=source.tp)
    shards = used.reshape(-1, source.replicas)
    assert (np.ptp(shards, axis=1) <= 1).all()
    if destination.tp >= source.tp:
        assert used.all(), "an idle source device"


@given(pairs, st.integers(1, 40), st.integers(0, 99), st.none() | st.integers(1, 99))
def test_traffic_is_what_the_units_say(pair, length, seed, context_bytes):
    transfer = plan(*pair, seed)
    source, destination = pair
    moved = traffic(transfer, length, context_bytes=context_bytes)
    expected = [
        transfer.expected_units(length, context=context_bytes is not None, destination_ranks=[rank])
        for rank in range(destination.tp)
    ]
    assert moved.units.sum(axis=0).tolist() == expected
    each = pages_for(length, source.page_size) * source.layers * destination.shard_bytes
    assert (moved.bytes.sum(axis=0) == each + (context_bytes or 0)).all()
    assert moved.units.shape == moved.bytes.shape == (source.tp, destination.tp)


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


@given(st.integers(1, 9), st.integers(1, 80), st.lists(st.integers(0, 80), max_size=8))
def test_chunks_cover_each_page_once_and_only_when_it_is_complete(page_size, length, cuts):
    rows = length - 1
    bounds = sorted([0, rows, *(c % (rows + 1) for c in cuts)])  # empty chunks too
    covered: list[int] = []
    for begin, end in pairwise(bounds):
        pages = chunk_pages(begin, end, rows, page_size)
        for page in pages:
            assert end >= min((page + 1) * page_size, rows), "sent before it was complete"
        covered.extend(pages)
    assert covered == list(range(pages_for(length, page_size)))


@pytest.mark.parametrize(
    ("length", "pages"), [(1, 0), (2, 1), (16, 1), (17, 1), (18, 2), (33, 2), (34, 3)]
)
def test_the_last_token_is_the_decoders(length, pages):
    assert pages_for(length, 16) == pages


@pytest.mark.parametrize(("begin", "end", "total"), [(-1, 3, 5), (3, 2, 5), (0, 6, 5)])
def test_a_range_that_is_no_chunk_is_refused(begin, end, total):
    with pytest.raises(ValueError, match="chunk"):
        chunk_pages(begin, end, total, 4)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt_length"):
        pages_for(0, 16)


BASE = CacheLayout("gqa", layers=2, kv_heads=4, head_dim=4, page_size=3, itemsize=2, tp=2)

MUTATIONS = {
    "a unit is missing": lambda u: u[1:],
    "a unit is sent twice": lambda u: (*u, u[0]),
    "ranks are swapped": lambda u: tuple(
        dataclasses.replace(x, source_rank=1 - x.source_rank) for x in u
    ),
    "a unit is short": lambda u: (dataclasses.replace(u[0], length=u[0].length - 1), *u[1:]),
    "the source is shifted": lambda u: (
        dataclasses.replace(u[0], source_offset=2, length=u[0].length - 2),
        dataclasses.replace(u[0], destination_offset=u[0].length - 2, length=2),
        *u[1:],
    ),
    "halves are swapped": lambda u: (
        dataclasses.replace(u[0], destination_offset=u[0].length // 2, length=u[0].length // 2),
        dataclasses.replace(u[0], source_offset=u[0].length // 2, length=u[0].length // 2),
        *u[1:],
    ),
}


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_a_wrong_plan_is_seen_by_the_check_and_by_carrying_it_out(mutate):
    good = plan(BASE, BASE)
    bad = dataclasses.replace(good, units=mutate(good.units))
    with pytest.raises(ValueError, match="byte"):
        check(bad)
    wrong, times, _ = carry_out(bad, np.random.default_rng(0), 8, [])
    assert wrong or (times != 1).any()


@pytest.mark.parametrize("mutation", [m for m in MUTATIONS if m != "ranks are swapped"])
@pytest.mark.parametrize("tps", [(2, 2), (2, 1), (1, 3)], ids=str)
def test_a_wrong_latent_plan_is_seen_too(mutation, tps):
    """But for swapped source ranks: they hold the same bytes."""
    good = plan(latent(tps[0]), latent(tps[1]), 7)
    bad = dataclasses.replace(good, units=MUTATIONS[mutation](good.units))
    with pytest.raises(ValueError, match="byte"):
        check(bad)
    wrong, times, _ = carry_out(bad, np.random.default_rng(0), 8, [])
    assert wrong or (times != 1).any()


@pytest.mark.parametrize("sources", [(), (0,), (0, 1, 0), (0, 2), (0, -1)])
def test_the_check_wants_a_context_for_each_rank_from_one_that_exists(sources):
    with pytest.raises(ValueError, match="context_sources"):
        check(dataclasses.replace(plan(BASE, BASE), context_sources=sources))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"source_rank": 2}, "no such source rank"),
        ({"destination_rank": 2}, "no such destination rank"),
        ({"source_offset": 1}, "outside the source"),
        ({"destination_offset": 1}, "outside the page"),
        ({"length": 0}, "length"),
    ],
)
def test_the_check_names_a_unit_out_of_bounds(change, text):
    good = plan(BASE, BASE)
    extra = dataclasses.replace(good.units[0], **change)
    with pytest.raises(ValueError, match=text):
        check(dataclasses.replace(good, units=(extra, *good.units)))


def test_a_page_is_rebuilt_from_the_parts_of_several_sources():
    one = dataclasses.replace(BASE, tp=1)
    half = BASE.shard_bytes
    transfer = plan(BASE, one)
    assert transfer.units == (PlanUnit(0, 0, 0, 0, half), PlanUnit(1, 0, 0, half, half))
    check(transfer)
    wrong = dataclasses.replace(transfer.units[1], source_rank=0)
    with pytest.raises(ValueError, match="byte"):
        check(dataclasses.replace(transfer, units=(transfer.units[0], wrong)))


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


def test_a_page_longer_than_a_write_is_several_units(monkeypatch):
    monkeypatch.setattr(transfer_plan, "MAX_UNIT_BYTES", 40)
    transfer = plan(BASE, BASE)
    assert [u.length for u in transfer.units if u.source_rank == 0] == [40, 40, 16]
    check(transfer)
    wrong, times, issued = carry_out(transfer, np.random.default_rng(1), 8, [2])
    assert wrong == 0
    assert (times == 1).all()
    assert issued == transfer.expected_units(8, context=False) == 3 * 2 * 2 * 3


def test_a_latent_page_longer_than_a_write_is_several_units_to_each_rank(monkeypatch):
    monkeypatch.setattr(transfer_plan, "MAX_UNIT_BYTES", 30)
    transfer = plan(latent(2), latent(3), 5)
    for rank in range(3):
        parts = [u for u in transfer.units if u.destination_rank == rank]
        assert [(u.source_offset, u.length) for u in parts] == [(0, 30), (30, 30), (60, 12)]
        assert len({u.source_rank for u in parts}) == 1
    check(transfer)
    wrong, times, issued = carry_out(transfer, np.random.default_rng(1), 8, [2])
    assert wrong == 0
    assert (times == 1).all()
    assert issued == transfer.expected_units(8, context=False) == 3 * 3 * 2 * 3


def test_replicated_heads_are_dealt_to_their_copies_by_the_seed():
    layout = dataclasses.replace(BASE, kv_heads=2, tp=4)
    assert [layout.heads_of(r) for r in range(4)] == [range(1), range(1), range(1, 2), range(1, 2)]
    drawn = {
        tuple((u.source_rank, u.destination_rank) for u in plan(layout, layout, seed).units)
        for seed in range(40)
    }
    assert drawn == {((a, 0), (1 - a, 1), (b, 2), (5 - b, 3)) for a in (0, 1) for b in (2, 3)}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"page_size": 6}, "page_size: 3 on the prefill node, 6 on the decode node"),
        ({"kv_heads": 8}, "kv_heads: 4"),
        ({"layers": 3}, "layers: 2"),
        ({"head_dim": 8}, "head_dim: 4"),
        ({"itemsize": 4}, "itemsize: 2"),
    ],
)
def test_layouts_that_cannot_be_mapped_name_the_field_and_both_values(change, text):
    with pytest.raises(ValueError, match=text):
        plan(BASE, dataclasses.replace(BASE, **change))


def test_a_latent_page_is_whole_on_every_rank_and_no_gqa_page():
    assert latent(2).shard_bytes == latent(8).shard_bytes == 3 * 12 * 2
    with pytest.raises(ValueError, match="kind: gqa on the prefill node, mla on"):
        plan(BASE, latent(2))


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


def test_a_rank_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="rank: 2"):
        BASE.heads_of(2)


def test_devices_are_numbered_dp_major():
    layout = dataclasses.replace(BASE, dp=3)
    assert [layout.ordinal(d, r) for d in range(3) for r in range(2)] == list(range(6))
