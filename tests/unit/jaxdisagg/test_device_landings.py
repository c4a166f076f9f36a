"""Counters of decode nodes with GPUs, of one process and of several, over the fake CUDA driver.

The arrays of group_nodes play device memory, the fake driver's streams copy, its log is the order.
"""

import time

import numpy as np
import pytest
from group_pair import Both, arrived, fill, gqa, mla
from proc import statuses

from ffi_transport.errors import TransferTimeout
from ffi_transport.events import ArrivalFailed, CounterReached, TransferEnded
from jaxdisagg.landings import Destination, DeviceLandings
from jaxdisagg.messages import pack

COPY = "cuMemcpyHtoDAsync_v2"
FLUSH = "cuFlushGPUDirectRDMAWrites"
FLUSH_OPTIONS = 117  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS
ORDERING = 118  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
OWNER = 100  # CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


def both_on_gpus(source, destination, processes, mode):
    side = {"on_gpus": True, "engine": {"device_memory": mode}}
    return Both(source, destination, processes, prefill=side, decode=side)


def note_the_end(both, fake):
    """Put a line into the driver's log when the node hears that a count is reached."""

    def note(event):
        if isinstance(event, CounterReached):
            fake.note("told")
        both.decode.events.append(event)

    both.decode.on_event = note


def total(side, name):
    return sum(engine.counters()[name] for engine in side.engines)


def places(log, words):
    return [i for i, line in enumerate(log) if words in line]


@pytest.mark.parametrize(
    ("source", "destination", "processes", "ranks"),
    [
        (gqa(2), gqa(2), (1, 1), (0, 0)),
        (gqa(2), gqa(4), (2, 2), (0, 0)),
        (mla(2), mla(4), (2, 4), (0, 0)),
        (gqa(1, dp=2), gqa(2, dp=2), (2, 2), (1, 1)),
    ],
    ids=["one", "two", "latent", "dp"],
)
def test_a_count_is_told_once_the_pages_are_in_every_process_s_devices(
    fake_cuda, source, destination, processes, ranks
):
    fake_cuda.set_delay(7, 1000)
    with both_on_gpus(source, destination, processes, "staged") as both:
        note_the_end(both, fake_cuda)
        request = both.request(rank=ranks[0], dp_rank=ranks[1])
        fill(both.prefill, request.rank)
        _, expected = both.begin(request)
        both.fire_all()
        both.run_until(lambda: both.decode.of(CounterReached), "the count is reached")
        arrived(both.decode, request.dp_rank)
        assert both.decode.of(CounterReached) == [CounterReached(5, sum(expected))]
        log = fake_cuda.log()
        (told,) = places(log, "told")
        ran = places(log, f"ran {COPY}")
        # Three pages without neighbours of each layer, and a context row, on each device.
        assert len(ran) == destination.tp * (3 * destination.layers + 1)
        assert max(ran) < told
        assert total(both.decode, "arrival_copies") == len(ran)
        moved = destination.tp * (3 * destination.layers * destination.shard_bytes + 64)
        assert total(both.decode, "arrival_bytes") == moved
        assert not places(log, FLUSH)
        both.run_until(lambda: both.prefill.of(TransferEnded), "the transfer has ended")
        both.decode.decode.disarm(5)
        assert total(both.decode, "arrivals_failed") == 0
        for side in both.sides:
            assert side.fabric.state()["memory"] == "staged"


@pytest.mark.parametrize(("ordering", "flushes"), [(0, 1), (OWNER, 0)])
def test_a_nic_s_writes_are_flushed_on_every_device_before_the_count_is_told(
    fake_cuda, ordering, flushes
):
    for device in range(4):
        fake_cuda.set_attribute(device, FLUSH_OPTIONS, 1)
        fake_cuda.set_attribute(device, ORDERING, ordering)
    with both_on_gpus(gqa(2), gqa(4), (2, 2), "direct") as both:
        note_the_end(both, fake_cuda)
        request = both.request()
        fill(both.prefill, 0)
        for slot in (5, 6):
            both.begin(request, slot)
            both.fire_all()
            both.run_until(
                lambda slot=slot: slot in [e.slot for e in both.decode.of(CounterReached)],
                "the count is reached",
            )
        arrived(both.decode, 0)
        log = fake_cuda.log()
        first, second = places(log, "told")
        flushed = places(log, FLUSH)
        assert [len([f for f in flushed if f < first]), len(flushed)] == [4 * flushes, 8 * flushes]
        assert all(f < second for f in flushed)
        assert not places(log, COPY)
        assert both.decode.fabric.state()["memory"] == "direct"


def test_a_copy_that_fails_in_a_follower_is_told_with_its_process(fake_cuda):
    with both_on_gpus(gqa(2), gqa(2), (2, 2), "staged") as both:
        fill(both.prefill, 0)
        both.begin(both.request())
        fake_cuda.fail(COPY, INVALID_VALUE)
        both.fire_all([1])
        both.run_until(lambda: both.decode.of(ArrivalFailed), "the failure is told")
        (failed,) = both.decode.of(ArrivalFailed)
        assert failed.slot == 5
        assert failed.error.startswith("process 1 of decode-0: CUDA device 1")
        assert "CUDA_ERROR_INVALID_VALUE" in failed.error
        both.fire_all([0])
        both.run_until(lambda: both.prefill.of(TransferEnded), "the transfer has ended")
        both.decode.decode.disarm(5)
        assert not both.decode.of(CounterReached)


def test_what_follows_a_disarm_waits_for_the_copies_that_have_begun(fake_cuda):
    """A step that uses the pages comes behind the Disarm in the follower's one queue."""
    staged = {"on_gpus": True, "engine": {"device_memory": "staged"}}
    with Both(gqa(2), gqa(2), (2, 2), decode=staged) as both:
        fill(both.prefill, 0)
        both.begin(both.request())
        fake_cuda.hold(True)
        both.fire_all([1])
        both.run_until(lambda: places(fake_cuda.log(), COPY), "the follower copies")
        both.decode.decode.disarm(5)  # the leader itself has nothing to copy
        told = []
        both.decode.decode.arm(6, (0, 1), Destination(0, b"", 0), told.append)
        time.sleep(0.1)
        both.run_until(lambda: True, "-")
        assert not told
        fake_cuda.hold(False)
        both.run_until(lambda: told, "what came behind it is done")
        assert told == [None]
        device = both.decode.bytes(1, 0)
        device[:] = 0xEE  # the pages are another request's
        both.decode.decode.disarm(6)
        both.run_until(  # of slot 5 both, of slot 6 one: the follower disarms in its own time
            lambda: total(both.decode, "arrivals_dropped") >= 2 + 1, "all arrivals are dropped"
        )
        time.sleep(0.05)
        assert (device == 0xEE).all()
        assert not both.decode.of(CounterReached)
        assert total(both.decode, "arrivals_dropped") == 2 + 1


def test_a_node_that_has_failed_copies_nothing_more(fake_cuda):
    with both_on_gpus(gqa(2), gqa(2), (1, 1), "staged") as both:
        fill(both.prefill, 0)
        _, expected = both.begin(both.request())
        both.decode.decode.land_no_more()
        both.fire_all()
        both.run_until(lambda: both.prefill.of(TransferEnded), "the transfer has ended")
        both.run_until(
            lambda: total(both.decode, "units_received") == sum(expected), "its units came"
        )
        both.decode.decode.disarm(5)  # as requests end later
        assert not places(fake_cuda.log(), COPY)
        assert not both.decode.of(CounterReached)


def test_a_device_that_cannot_be_opened_fails_the_arming(fake_cuda):
    with both_on_gpus(gqa(2), gqa(2), (2, 2), "staged") as both:
        fabric, told = both.decode.decode, []
        where = Destination(0, pack([11, 2, 7]), 2)
        fake_cuda.fail("cuStreamCreate", OUT_OF_MEMORY)
        fabric.arm(5, (3, 4), where, told.append)
        (problem,) = told
        assert problem.startswith("the counter of decode-0 does not wait: CUDA device 0")
        assert "CUDA_ERROR_OUT_OF_MEMORY" in problem
        fabric.disarm(5)
        told.clear()
        fabric.arm(6, (3, 4), where, told.append)  # the leader's is open from here on
        both.run_until(lambda: told, "an answer")
        assert told == [None]
        fabric.disarm(6)


def test_a_follower_whose_copies_hang_ends(fake_cuda, monkeypatch):
    """Its leader then fails the node: no page is known to be safe."""
    with both_on_gpus(gqa(2), gqa(2), (2, 2), "staged") as both:
        both.arm(5, (1, 1))
        follower, failed = both.decode.group.followers[1], []

        def hang(slot):
            raise TransferTimeout(f"copies of slot {slot} into a device have not ended")

        monkeypatch.setattr(follower._engine, "disarm", hang)
        monkeypatch.setattr(follower, "_fail", failed.append)
        both.decode.decode.disarm(5)
        both.run_until(lambda: failed, "the follower ends")
        assert failed == ["copies of slot 5 into a device have not ended"]


def test_host_memory_has_no_landings_and_no_thread(fake_cuda):
    before = statuses()  # threads of earlier tests may be ending
    with Both(gqa(2), gqa(2), (2, 2)) as both:
        fill(both.prefill, 0)
        both.begin(both.request())
        both.fire_all()
        both.run_until(lambda: both.decode.of(CounterReached), "the count is reached")
        threads = [status["Name"] for id, status in statuses().items() if id not in before]
        assert "fabric-control" in threads
        assert "arrivals" not in threads
        # Engines of earlier tests may still be letting go of theirs.
        opened = ("cuDevicePrimaryCtxRetain", "cuStreamCreate", COPY, FLUSH)
        assert not [line for line in fake_cuda.log() if line.startswith(opened)]
        assert both.decode.fabric.state()["memory"] == "host"


def test_landings_are_the_request_s_pages_on_the_devices_of_its_dp_rank():
    layout = gqa(tp=2, dp=2)
    layers = {rank: [f"{rank}.0", f"{rank}.1"] for rank in (1, 2)}  # of one process
    landings = DeviceLandings(layout, layers, {1: "1.c", 2: "2.c"}, 64)  # type: ignore[dict-item]
    pages, context = landings.of(Destination(1, pack([11, 2, 7]), 3))
    assert (pages.regions, pages.page_bytes) == (("2.0", "2.1"), layout.shard_bytes)
    np.testing.assert_array_equal(pages.pages, [11, 2, 7])
    assert (context.regions, context.pages, context.page_bytes) == (("2.c",), [3], 64)
    assert landings
    none = DeviceLandings(layout, {}, {}, 64)
    assert not none
    assert none.of(Destination(1, pack([11]), 3)) == ()
    assert landings.of(Destination(0, pack([1]), 0))[0].regions == ("1.0", "1.1")
