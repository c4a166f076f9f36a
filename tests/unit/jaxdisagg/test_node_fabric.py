"""Counters and transfers of nodes of several processes, as fabrics alone."""

import pytest
from group_nodes import CONTEXT_BYTES
from group_pair import TOTAL, Both, arrived, fill, gqa, mla

from ffi_transport import _native
from ffi_transport.events import CounterOvershoot, CounterReached, TransferEnded, TriggerFault
from jaxdisagg.landings import Destination
from jaxdisagg.transfer_plan import CacheLayout

NOWHERE = Destination(0, b"", 0)


@pytest.mark.parametrize(
    ("source", "destination", "processes", "ranks"),
    [
        (gqa(2), gqa(2), (2, 2), (0, 0)),
        (gqa(2), gqa(4), (2, 2), (0, 0)),
        (gqa(4), gqa(2), (2, 2), (0, 0)),
        (gqa(4, heads=2), gqa(4, heads=2), (4, 2), (0, 0)),
        (gqa(2), gqa(1), (2, 1), (0, 0)),
        (gqa(1), gqa(2), (1, 2), (0, 0)),
        (mla(2), mla(2), (2, 2), (0, 0)),
        (mla(2), mla(4), (2, 4), (0, 0)),
        (gqa(1, dp=2), gqa(2, dp=2), (2, 2), (1, 0)),
        (mla(2, dp=2), mla(1, dp=2), (2, 2), (0, 1)),
        (gqa(2), gqa(2), (1, 1), (0, 0)),
    ],
    ids=lambda v: f"{v.kind}-tp{v.tp}-dp{v.dp}" if isinstance(v, CacheLayout) else None,
)
def test_every_byte_arrives_and_is_counted_where_it_landed(source, destination, processes, ranks):
    with Both(source, destination, processes) as both:
        request = both.request(rank=ranks[0], dp_rank=ranks[1])
        fill(both.prefill, request.rank)
        _, expected = both.begin(request)
        both.fire_all()
        both.run_until(lambda: both.decode.of(CounterReached), "the count is reached")
        both.run_until(lambda: both.prefill.of(TransferEnded), "the transfer has ended")
        assert both.decode.of(CounterReached) == [CounterReached(5, sum(expected))]
        (ended,) = both.prefill.of(TransferEnded)
        assert (ended.status, ended.error) == ("completed", "")
        assert ended.units_done == ended.units_planned == sum(expected)
        pages = 3 * destination.layers * destination.shard_bytes * destination.tp
        assert ended.bytes == pages + destination.tp * CONTEXT_BYTES
        arrived(both.decode, request.dp_rank)
        assert both.decode.decode.seen(5) == expected
        counted = [engine.counters()["units_received"] for engine in both.decode.engines]
        assert tuple(counted) == expected, "each process counts its own"
        both.decode.decode.disarm(5)
        wait = both.decode.group.followers.values()
        both.run_until(lambda: not any(f._armed for f in wait), "disarmed everywhere")


def test_prefill_waits_for_the_counter_of_every_process():
    with Both(gqa(2), gqa(2)) as both:
        hearing = both.decode.group.hearing[1]
        hearing.clear()
        told = []
        both.decode.decode.arm(5, (3, 4), NOWHERE, told.append)
        both.run_until(lambda: True, "-")
        assert not told
        hearing.set()
        both.run_until(lambda: told, "the other process has armed")
        assert told == [None]


def test_a_process_that_does_not_arm_in_time_is_named():
    with Both(gqa(2), gqa(2), decode={"arm_s": 0.05}) as both:
        both.decode.group.hearing[1].clear()
        told = []
        both.decode.decode.arm(5, (3, 4), NOWHERE, told.append)
        deadline = both.decode.decode.next_deadline()
        assert deadline is not None
        both.decode.decode.tick(deadline - 0.001)
        assert not told
        both.decode.decode.tick(deadline)
        assert told == ["process 1 of decode-0 did not arm its counter within 0.05 s"]
        assert both.decode.decode.next_deadline() is None
        both.decode.decode.disarm(5)  # goes after the Arm, whenever that is heard
        both.decode.group.hearing[1].set()
        both.arm(5, (3, 4))


def test_a_counter_that_cannot_be_armed_is_told_with_its_process():
    with Both(gqa(2), gqa(2)) as both:
        both.decode.engines[1].arm(5, 1)
        told = []
        both.decode.decode.arm(5, (3, 4), NOWHERE, told.append)
        both.run_until(lambda: told, "an answer")
        assert told == ["process 1 of decode-0: slot 5 is already armed"]


def test_a_request_is_ready_when_every_process_has_its_count():
    with Both(gqa(2), gqa(2)) as both:
        request = both.request()
        _, expected = both.begin(request)
        both.fire_all([0])
        both.run_until(
            lambda: both.decode.engines[0].seen(5) == expected[0], "the first process has all"
        )
        both.run_until(lambda: both.decode.decode.seen(5) == (expected[0], 0), "and says so")
        assert not both.decode.of(CounterReached)
        both.fire_all([1])
        both.run_until(lambda: both.decode.of(CounterReached), "the count is reached")
        assert both.decode.of(CounterReached) == [CounterReached(5, sum(expected))]


def test_what_a_follower_counted_so_far_is_told_before_it_is_all():
    with Both(gqa(2), gqa(2)) as both:
        _, expected = both.begin(both.request())
        both.filed(1)
        both.prefill.fire(1)  # the first of two chunks
        first = 1 * both.decode.layout.layers  # a page of each layer
        both.run_until(lambda: both.decode.decode.seen(5) == (first, first), "told by its tally")
        assert first < min(expected)


def test_a_unit_too_many_in_any_process_is_told():
    with Both(gqa(2), gqa(2)) as both:
        both.arm(5, (1, 1))
        both.prefill.prefill.open_transfer(both.at_prefill, 5, both.request())
        both.prefill.prefill.file_step(1, [(1, 0, TOTAL)])
        both.filed(1)
        both.prefill.fire(1, [1])
        both.run_until(lambda: both.decode.of(CounterOvershoot), "an overshoot")
        assert not both.decode.of(CounterReached)
        assert both.decode.of(CounterOvershoot)[0].expected == 1


def test_a_cancelled_transfer_ends_when_every_process_has_drained():
    with Both(gqa(2), gqa(2)) as both:
        transfer, _ = both.begin(both.request())
        both.filed(2)
        both.prefill.group.hearing[1].clear()
        both.prefill.prefill.cancel_transfer(transfer)
        both.prefill.prefill.cancel_transfer(transfer)  # as often as one likes
        both.run_until(lambda: (0, 0) not in parts(both, transfer), "the leader's part has ended")
        assert not both.prefill.of(TransferEnded), "the other process may still write"
        both.prefill.group.hearing[1].set()
        both.run_until(lambda: both.prefill.of(TransferEnded), "all parts have ended")
        assert [e.status for e in both.prefill.of(TransferEnded)] == ["cancelled"]
        both.fire_all()
        assert not any(both.decode.bytes(r, 0).any() for r in range(2)), "nothing was posted"


def parts(both, transfer):
    return both.prefill.prefill._transfers[transfer].open


def test_the_end_of_one_part_before_its_time_ends_the_others():
    with Both(gqa(2), gqa(2)) as both:
        both.begin(both.request())
        both.filed(2)
        (native,) = both.prefill.group.followers[1]._native
        both.prefill.engines[1].cancel_transfer(native)
        both.run_until(lambda: both.prefill.of(TransferEnded), "all parts have ended")
        assert [e.status for e in both.prefill.of(TransferEnded)] == ["cancelled"]


def test_a_plan_that_one_process_refuses_fails_the_transfer_in_all():
    with Both(gqa(2), gqa(2)) as both:
        both.arm(5, (1, 1))
        fabric = both.prefill.prefill
        follower = both.prefill.group.followers[1]

        def refuse(*_):
            raise ValueError("a page leaves its region")

        follower._engine.add_plan = refuse
        transfer = fabric.open_transfer(both.at_prefill, 5, both.request())
        fabric.file_step(1, [(transfer, 0, 20)])
        both.run_until(lambda: both.prefill.of(TransferEnded), "it has ended")
        (ended,) = both.prefill.of(TransferEnded)
        assert (ended.status, ended.error) == ("failed", "process 1: a page leaves its region")


def test_a_trigger_fault_of_a_follower_is_told_with_its_process():
    with Both(gqa(2), gqa(2)) as both:
        both.begin(both.request())
        both.filed(2)
        shard = both.prefill.caches[1].shards()[0]
        moved = shard.address + 64
        _native.fire_trigger(both.prefill.engines[1].index, 1, shard.ordinal, 0, moved)
        both.run_until(lambda: both.prefill.of(TriggerFault), "the fault is told")
        (fault,) = both.prefill.of(TriggerFault)
        assert fault.kind == "address_changed"
        assert fault.detail.startswith("in process 1: ")


def test_state_sums_the_processes_and_shows_each():
    with Both(gqa(2), gqa(2)) as both:
        _, expected = both.begin(both.request())
        both.fire_all()
        both.run_until(lambda: both.decode.of(CounterReached), "the count is reached")

        def told():
            return both.decode.decode.state()["units_received"] == sum(expected)

        both.run_until(told, "the follower's tally")
        state = both.decode.decode.state()
        each = [state["processes"][str(p)]["units_received"] for p in (0, 1)]
        assert each == list(expected)
        assert [d["process"] for d in state["domains"]] == [0, 1]
        assert [d["units_counted"] for d in state["domains"]] == list(expected)
