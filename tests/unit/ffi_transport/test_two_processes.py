"""Transfers and failures between two real processes over libfabric."""

import base64
import time

import numpy as np
import pytest
from fabric_peer import DEADLINE, PAGE, Peer, page_sums, wait_for
from ports import free_port

from ffi_transport.errors import PeerLost
from ffi_transport.events import (
    CounterReached,
    Event,
    MessageReceived,
    PeerLostEvent,
    TransferEnded,
)
from ffi_transport.types import PageUnit

WHOLE = PageUnit(PAGE, 0, PAGE, 0, PAGE)


def permutation(pages: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(pages)


def test_paged_writes_land_exactly_and_are_counted(provider, make_node):
    pages = 2048
    node = make_node(provider, pages * PAGE)
    node.memory[:] = np.random.default_rng(0).integers(0, 256, node.memory.size, np.uint8)
    with Peer(provider, pages * PAGE) as child:
        peer = node.engine.connect(child.address, 30)
        assert node.engine.peer_hello(peer) == b"child"
        child.call("arm", slot=77, expected=pages)
        source, destination = permutation(pages, 1), permutation(pages, 2)
        transfer = node.engine.open_transfer(peer, 77)
        node.engine.write_paged(transfer, node.region, child.remote, source, destination, WHOLE)
        node.engine.seal(transfer)
        ended = wait_for(node.engine, TransferEnded, [])
        assert ended == TransferEnded(transfer, peer, "completed", "", pages, pages, pages * PAGE)
        assert child.call("wait", kind="CounterReached") == {"slot": 77, "count": pages}
        sums, got = page_sums(node.memory), child.call("sums")
        assert [got[d] for d in destination] == [sums[s] for s in source]
        counters = child.call("counters")
        assert counters["units_received"] == pages
        assert counters["stale_immediates"] == counters["overshoots"] == 0


def test_parts_of_pages_and_ranges(provider, make_node):
    node = make_node(provider, 64 * PAGE)
    node.memory[:] = np.random.default_rng(3).integers(0, 256, node.memory.size, np.uint8)
    with Peer(provider, 64 * PAGE) as child:
        peer = node.engine.connect(child.address, 30)
        child.call("arm", slot=1, expected=16 + 16 + 3)
        transfer = node.engine.open_transfer(peer, 1)
        half = PAGE // 2
        # The two halves of 16 source pages go to 8 KiB pages, swapped.
        for offset in (0, half):
            node.engine.write_paged(
                transfer, node.region, child.remote, range(16), range(16),
                PageUnit(PAGE, offset, 2 * PAGE, half - offset, half),
            )  # fmt: skip
        node.engine.write(transfer, node.region, 40 * PAGE, child.remote, 50 * PAGE, 5000, units=3)
        node.engine.seal(transfer)
        assert child.call("wait", kind="CounterReached")["count"] == 35
        expected = np.zeros_like(node.memory)
        for page in range(16):
            a, b = page * PAGE, 2 * page * PAGE
            expected[b + half : b + PAGE] = node.memory[a : a + half]
            expected[b : b + half] = node.memory[a + half : a + PAGE]
        expected[50 * PAGE : 50 * PAGE + 5000] = node.memory[40 * PAGE : 40 * PAGE + 5000]
        assert child.call("sums") == page_sums(expected)


def test_cancel_drains_then_ends(provider, make_node):
    pages = 256
    node = make_node(provider, pages * PAGE, bytes_in_flight=8 * PAGE)
    node.memory[:] = 1
    with Peer(provider, pages * PAGE) as child:
        peer = node.engine.connect(child.address, 30)
        transfer = node.engine.open_transfer(peer, 5)
        rounds = 400
        for seed in range(rounds):
            node.engine.write_paged(
                transfer, node.region, child.remote, permutation(pages, seed),
                permutation(pages, seed + 1), WHOLE,
            )  # fmt: skip
        while node.engine.counters()["units_completed"] == 0:
            node.engine.poll(0.01)
        node.engine.cancel_transfer(transfer)
        ended = wait_for(node.engine, TransferEnded, [])
        assert ended.status == "cancelled"
        assert 0 < ended.units_done < ended.units_planned == rounds * pages
        counters = node.engine.counters()
        assert counters["writes_posted"] == counters["writes_completed"]
        # All bytes that were announced as done are in place, and no more come. (The receiver's
        # thread may count a landed write a moment after the provider acknowledged it.)
        child.call("fill", value=9)
        node.engine.send(peer, b"after the cancel")
        child.call("wait", kind="MessageReceived")
        end = time.monotonic() + DEADLINE
        while child.call("counters")["units_received"] < ended.units_done:
            assert time.monotonic() < end
        assert child.call("counters")["units_received"] == ended.units_done
        assert child.call("sums") == page_sums(np.full(pages * PAGE, 9, np.uint8))


def test_fence_stops_a_running_sender(provider, make_node):
    pages = 256
    node = make_node(provider, pages * PAGE)
    with Peer(provider, pages * PAGE) as child:
        child.call("fill", value=1)
        child.call("connect", address=node.engine.control_address)
        descriptor = base64.b64encode(node.region.descriptor).decode()
        units = child.call(
            "blast", descriptor=descriptor, length=node.memory.size, pages=pages, rounds=2000
        )
        while node.engine.counters()["units_received"] == 0:
            node.engine.poll(0.01)
        node.engine.fence(1)
        node.memory[:] = 0xEE
        received = node.engine.counters()["units_received"]
        assert 0 < received < units
        ended = child.call("wait", kind="TransferEnded")
        assert ended["status"] == "failed"
        child.call("wait", kind="PeerLostEvent")
        assert node.engine.counters()["units_received"] == received
        assert (node.memory == 0xEE).all()
        with pytest.raises(PeerLost, match="fenced by this node"):
            node.engine.send(1, b"x")


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_dead_receiver_fails_transfers_then_the_peer(provider, make_node, how):
    pages = 256
    node = make_node(
        provider, pages * PAGE, bytes_in_flight=64 * PAGE, heartbeat_ms=50, peer_timeout_ms=1500
    )
    with Peer(provider, pages * PAGE) as child:
        peer = node.engine.connect(child.address, 30)
        transfers = []
        for slot in range(3):
            transfers.append(node.engine.open_transfer(peer, slot))
            for seed in range(200):
                node.engine.write_paged(
                    transfers[-1], node.region, child.remote, permutation(pages, seed),
                    permutation(pages, seed + 1), WHOLE,
                )  # fmt: skip
        while node.engine.counters()["units_completed"] == 0:
            node.engine.poll(0.01)
        getattr(child, how)()
        seen: list[Event] = []
        lost = wait_for(node.engine, PeerLostEvent, seen)
        assert lost.peer == peer
        before = seen[: seen.index(lost)]
        ended = {e.transfer: e for e in before if isinstance(e, TransferEnded)}
        assert set(ended) == set(transfers)
        assert all(e.status == "failed" and e.error for e in ended.values())
        if how == "stop":
            assert lost.reason == "no sign of life"
            assert lost.elapsed_s >= 1.5
        with pytest.raises(PeerLost) as caught:
            node.engine.open_transfer(peer, 0)
        assert caught.value.peer == peer


def test_restarted_receiver_gets_nothing_from_an_old_sender(provider, make_node):
    pages = 256
    port = free_port()
    node = make_node(provider, pages * PAGE, bytes_in_flight=16 * PAGE)
    node.memory[:] = 1
    with Peer(provider, pages * PAGE, control_port=port) as first:
        peer = node.engine.connect(first.address, 30)
        transfer = node.engine.open_transfer(peer, 5)
        for seed in range(500):
            node.engine.write_paged(
                transfer, node.region, first.remote, permutation(pages, seed),
                permutation(pages, seed + 1), WHOLE,
            )  # fmt: skip
        while node.engine.counters()["units_completed"] == 0:
            node.engine.poll(0.01)
        first.kill()
        with Peer(provider, pages * PAGE, control_port=port) as second:
            assert second.address == first.address
            assert second.epoch != first.epoch
            second.call("arm", slot=5, expected=1)
            wait_for(node.engine, PeerLostEvent, [])
            again = node.engine.connect(second.address, 30)
            counters = second.call("counters")
            assert counters["immediates_received"] == 0
            assert second.call("sums") == page_sums(np.zeros(pages * PAGE, np.uint8))
            # The new life is greeted and served as any other.
            fresh = node.engine.open_transfer(again, 5)
            node.engine.write(fresh, node.region, 0, second.remote, 0, PAGE)
            node.engine.seal(fresh)
            assert second.call("wait", kind="CounterReached") == {"slot": 5, "count": 1}


def test_large_message(provider, make_node):
    node = make_node(provider)
    with Peer(provider) as child:
        peer = node.engine.connect(child.address, 30)
        payload = np.random.default_rng(5).bytes(600 << 10)
        node.engine.send(peer, payload)
        assert child.call("wait", kind="MessageReceived")["payload"].encode("latin-1") == payload
        child.call("send", peer=1, length=600 << 10)
        assert wait_for(node.engine, MessageReceived, []).payload == b"m" * (600 << 10)


def test_short_messages_overtake_bulk_data(provider, make_node):
    pages = 256
    node = make_node(provider, pages * PAGE)
    with Peer(provider, pages * PAGE) as child:
        peer = node.engine.connect(child.address, 30)
        child.call("echo", count=5)
        transfer = node.engine.open_transfer(peer, 1)
        for seed in range(2000):  # 2 GiB: some seconds
            node.engine.write_paged(
                transfer, node.region, child.remote, permutation(pages, seed),
                permutation(pages, seed + 1), WHOLE,
            )  # fmt: skip
        node.engine.seal(transfer)
        seen: list[Event] = []
        for number in range(5):
            node.engine.send(peer, bytes([number]) * 64)
            answers = [e for e in seen if isinstance(e, MessageReceived)]
            while len(answers) <= number:
                seen += node.engine.poll(0.2)
                answers = [e for e in seen if isinstance(e, MessageReceived)]
            assert answers[number].payload == bytes([number]) * 64
        # Five round trips fitted while the bulk was still on its way.
        assert not [e for e in seen if isinstance(e, TransferEnded)]
        node.engine.cancel_transfer(transfer)


def test_idle_engines_sleep(provider):
    """Some 15 wake-ups a second, of heartbeats, which cost 0.2 % of a core; spinning costs all."""
    with Peer(provider) as first, Peer(provider) as second:
        first.call("connect", address=second.address)
        first.call("send", peer=first.call("connect", address=second.address), length=100)
        second.call("wait", kind="MessageReceived")
        for child in (first, second):
            woken, used = child.call("idle", seconds=2.0)
            assert woken < 2 * 100
            assert used < 2 * 0.25


def test_two_domains_give_the_same_count(provider, make_node):
    pages = 512
    domains = ("127.0.0.1", "127.0.0.2")  # Linux has all of 127.0.0.0/8
    node = make_node(provider, pages * PAGE, domains=domains)
    node.memory[:] = np.random.default_rng(0).integers(0, 256, node.memory.size, np.uint8)
    with Peer(provider, pages * PAGE, domains=domains) as child:
        peer = node.engine.connect(child.address, 30)
        child.call("arm", slot=1, expected=pages)
        transfer = node.engine.open_transfer(peer, 1)
        source, destination = permutation(pages, 1), permutation(pages, 2)
        node.engine.write_paged(transfer, node.region, child.remote, source, destination, WHOLE)
        node.engine.seal(transfer)
        assert wait_for(node.engine, TransferEnded, []).status == "completed"
        child.call("wait", kind="CounterReached")
        sums, got = page_sums(node.memory), child.call("sums")
        assert [got[d] for d in destination] == [sums[s] for s in source]


def test_receiver_in_this_process_gets_counter_events(provider, make_node):
    node = make_node(provider)
    with Peer(provider) as child:
        child.call("fill", value=3)
        child.call("connect", address=node.engine.control_address)
        node.engine.arm(1, 256)
        child.call(
            "blast",
            descriptor=base64.b64encode(node.region.descriptor).decode(),
            length=node.memory.size,
            pages=256,
            rounds=1,
        )
        assert wait_for(node.engine, CounterReached, []) == CounterReached(1, 256)
        assert node.engine.seen(1) == 256
        assert (node.memory == 3).all()


def test_no_wake_up_is_missed_without_spinning(provider, make_node):
    """Each write goes through two sleeps; a missed wake-up would be a stall, not a slow test."""
    node = make_node(provider, spin_us=0)
    with Peer(provider, spin_us=0) as child:
        peer = node.engine.connect(child.address, 30)
        for _ in range(500):
            transfer = node.engine.open_transfer(peer, 1)
            node.engine.write(transfer, node.region, 0, child.remote, 0, PAGE)
            node.engine.seal(transfer)
            assert wait_for(node.engine, TransferEnded, []).status == "completed"
        assert child.call("counters")["immediates_received"] == 500
        child.call("echo", count=200)
        for number in range(200):
            node.engine.send(peer, b"%d" % number)
            assert wait_for(node.engine, MessageReceived, []).payload == b"%d" % number
