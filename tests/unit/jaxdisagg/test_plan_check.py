"""Negative controls: a plan that is wrong fails `check`, and the oracle that knows no plan."""

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from plan_layouts import cuts, pairs, seeds
from plan_oracle import make_request

from jaxdisagg import step_plans
from jaxdisagg.cache_layout import CacheLayout
from jaxdisagg.transfer_plan import PlanUnit, TransferPlan, check, plan

BASE = CacheLayout("gqa", layers=2, kv_heads=4, head_dim=4, page_size=3, itemsize=2, tp=2)

Units = tuple[PlanUnit, ...]


def swap(units: Units, i: int, **changes: int) -> Units:
    return (*units[:i], dataclasses.replace(units[i], **changes), *units[i + 1 :])


def dropped(p: TransferPlan, i: int, _: int) -> Units:
    return p.units[:i] + p.units[i + 1 :]


def doubled(p: TransferPlan, i: int, _: int) -> Units:
    return (*p.units, p.units[i])


def short(p: TransferPlan, i: int, _: int) -> Units:
    assume(p.units[i].length > 1)
    return swap(p.units, i, length=p.units[i].length - 1)


def source_shifted(p: TransferPlan, i: int, by: int) -> Units:
    room = p.source.shard_bytes - p.units[i].length
    to = by % (room + 1)
    assume(to != p.units[i].source_offset)
    return swap(p.units, i, source_offset=to)


def destination_shifted(p: TransferPlan, i: int, by: int) -> Units:
    room = p.destination.shard_bytes - p.units[i].length
    to = by % (room + 1)
    assume(to != p.units[i].destination_offset)
    return swap(p.units, i, destination_offset=to)


def head_swapped(p: TransferPlan, i: int, by: int) -> Units:
    """Two units of one length exchange where they read from, within a span."""
    a = p.units[i]
    same = [
        j
        for j, b in enumerate(p.units)
        if (b.span, b.length) == (a.span, a.length)
        and p.source.heads_of(b.source_rank) == p.source.heads_of(a.source_rank)
        and b.source_offset != a.source_offset
    ]
    assume(same)
    j = same[by % len(same)]
    b = p.units[j]
    half = swap(p.units, i, source_offset=b.source_offset)
    return swap(half, j, source_offset=a.source_offset)


def wrong_shard(p: TransferPlan, i: int, by: int) -> Units:
    held = p.source.heads_of(p.units[i].source_rank)
    others = [r for r in range(p.source.tp) if p.source.heads_of(r) != held]
    assume(others)
    return swap(p.units, i, source_rank=others[by % len(others)])


def wrong_rank(p: TransferPlan, i: int, by: int) -> Units:
    assume(p.destination.tp > 1)
    there = p.units[i].destination_rank
    return swap(
        p.units, i, destination_rank=(there + 1 + by % (p.destination.tp - 1)) % p.destination.tp
    )


def wrong_span(p: TransferPlan, i: int, by: int) -> Units:
    spans = len(p.spans.spans)
    assume(spans > 1)
    return swap(p.units, i, span=(p.units[i].span + 1 + by % (spans - 1)) % spans)


MUTATIONS: list[Callable[[TransferPlan, int, int], Units]] = [
    dropped, doubled, short, source_shifted, destination_shifted, head_swapped, wrong_shard,
    wrong_rank, wrong_span,
]  # fmt: skip


def carried_out(transfer: TransferPlan, chunk_ends: list[int], seed: int) -> list[str]:
    """What the oracle finds wrong after two periods, posted by a planner with this plan."""
    length = 2 * transfer.spans.period + 1
    request = make_request(
        transfer.source, transfer.destination, length, seed=seed, cuts=chunk_ends
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_plans, "plan", lambda *_: transfer)
        return request.carry_out().problems()


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda m: m.__name__)
# Not every layout can be wrong in every way: what cannot is left out.
@settings(
    max_examples=40, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)
@given(pairs(), cuts, seeds, st.data())
def test_a_wrong_plan_fails_the_check_and_the_oracle(mutate, pair, chunk_ends, seed, data):
    good = plan(*pair, seed)
    i = data.draw(st.integers(0, len(good.units) - 1))
    bad = dataclasses.replace(good, units=mutate(good, i, data.draw(st.integers(0, 999))))
    with pytest.raises(ValueError, match="byte"):
        check(bad)
    assert carried_out(bad, chunk_ends, seed), "the oracle passes a wrong plan"


@settings(max_examples=40)
@given(pairs(), cuts, seeds)
def test_the_right_plan_passes_both(pair, chunk_ends, seed):
    good = plan(*pair, seed)
    check(good)
    assert carried_out(good, chunk_ends, seed) == []


@pytest.mark.parametrize("sources", [(), (0,), (0, 1, 0), (0, 2), (0, -1)])
def test_the_check_wants_a_context_for_each_rank_from_one_that_exists(sources):
    with pytest.raises(ValueError, match="context_sources"):
        check(dataclasses.replace(plan(BASE, BASE), context_sources=sources))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"source_rank": 2}, "no such source rank"),
        ({"destination_rank": 2}, "no such destination rank"),
        ({"span": 1}, "no such span"),
        ({"span": -1}, "no such span"),
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
