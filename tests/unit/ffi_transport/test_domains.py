"""Several domains (NICs) on either side, between two real processes over libfabric."""

import base64
import dataclasses
import os
import socket
import struct
from pathlib import Path

import numpy as np
import pytest
from fabric_peer import PAGE, Peer, page_sums, wait_for

from ffi_transport.engine import TransferEngine
from ffi_transport.errors import FabricUnavailable
from ffi_transport.events import CounterReached, Event, PeerLostEvent, TransferEnded
from ffi_transport.types import EngineConfig, PageUnit, RemoteRegion

PAGES = 256
WHOLE = PageUnit(PAGE, 0, PAGE, 0, PAGE)


def addresses(count: int, first: int) -> tuple[str, ...]:
    """Addresses of this process alone: Linux has all of 127.0.0.0/8 on the loopback interface."""
    high, low = divmod(os.getpid(), 256)
    return tuple(f"127.{1 + high % 250}.{low}.{first + i}" for i in range(count))


def established() -> set[tuple[str, str]]:
    """The (local, remote) addresses of this machine's TCP connections, as the kernel lists them."""
    pairs = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, remote, state = line.split()[1:4]
        if state == "01":
            numbers = [int(end.partition(":")[0], 16) for end in (local, remote)]
            first, second = (socket.inet_ntoa(struct.pack("<I", number)) for number in numbers)
            pairs.add((first, second))
    return pairs


def write_pages(engine, transfer, region, remote, rounds, portion=PAGES):
    """Random pages to random pages, in portions; returns the last round's two permutations."""
    random = np.random.default_rng(rounds)
    for _ in range(rounds):
        source, destination = random.permutation(PAGES), random.permutation(PAGES)
        for at in range(0, PAGES, portion):
            part = slice(at, at + portion)
            engine.write_paged(transfer, region, remote, source[part], destination[part], WHOLE)
    return source, destination


@pytest.mark.parametrize(("here", "there"), [(1, 2), (2, 3), (4, 1)])
def test_unequal_numbers_of_domains_share_the_pages(provider, make_node, here, there):
    ours, theirs = addresses(here, 10), addresses(there, 20)
    node = make_node(provider, PAGES * PAGE, domains=ours)
    node.memory[:] = np.random.default_rng(0).integers(0, 256, node.memory.size, np.uint8)
    with Peer(provider, PAGES * PAGE, domains=theirs) as child:
        peer = node.engine.connect(child.address, 30)
        child.call("arm", slot=1, expected=PAGES)
        transfer = node.engine.open_transfer(peer, 1)
        source, destination = write_pages(
            node.engine, transfer, node.region, child.remote, 1, portion=5
        )
        node.engine.seal(transfer)
        assert wait_for(node.engine, TransferEnded, []).status == "completed"
        assert child.call("wait", kind="CounterReached") == {"slot": 1, "count": PAGES}
        sums, got = page_sums(node.memory), child.call("sums")
        assert [got[d] for d in destination] == [sums[s] for s in source]

        sent, received = node.engine.domain_counters(), child.call("domain_counters")
        assert [one["name"] for one in sent] == list(ours)
        assert [one["name"] for one in received] == list(theirs)
        for counts, domains in (
            ([one["units_posted"] for one in sent], here),
            ([one["units_completed"] for one in sent], here),
            ([one["units_counted"] for one in received], there),
        ):
            assert sum(counts) == PAGES
            assert max(counts) - min(counts) <= 1, counts
            assert len(counts) == domains
        assert sum(one["bytes_completed"] for one in sent) == PAGES * PAGE
        # Each page left through the address of its domain and came in through that of the other.
        pairs = {pair for pair in established() if pair[0] in ours and pair[1] in theirs}
        assert {local for local, _ in pairs} == set(ours)
        assert {remote for _, remote in pairs} == set(theirs)
        assert len(pairs) <= here + there - 1


def test_a_group_uses_its_own_domains_alone(provider, make_node):
    ours, theirs = addresses(4, 30), addresses(3, 40)
    node = make_node(provider, PAGES * PAGE, domains=ours)
    region = node.engine.register_memory(node.memory.ctypes.data, node.memory.nbytes, (2, 1))
    with Peer(provider, PAGES * PAGE, domains=theirs) as child:
        node.memory[:] = 7
        peer = node.engine.connect(child.address, 30)
        transfer = node.engine.open_transfer(peer, 1)
        write_pages(node.engine, transfer, region, child.remote, 1)
        node.engine.seal(transfer)
        assert wait_for(node.engine, TransferEnded, []).status == "completed"
        assert child.call("sums") == page_sums(node.memory)
        posted = [one["units_posted"] for one in node.engine.domain_counters()]
        assert posted == [0, PAGES // 2, PAGES // 2, 0]
        locals_used = {local for local, remote in established() if remote in theirs}
        assert locals_used & set(ours) == set(ours[1:3])


def test_fence_stops_a_sender_on_every_domain(provider, make_node):
    node = make_node(provider, PAGES * PAGE, domains=addresses(3, 50))
    with Peer(provider, PAGES * PAGE, domains=addresses(2, 60)) as child:
        child.call("fill", value=1)
        child.call("connect", address=node.engine.control_address)
        descriptor = base64.b64encode(node.region.descriptor).decode()
        units = child.call(
            "blast", descriptor=descriptor, length=node.memory.size, pages=PAGES, rounds=2000
        )
        while not all(one["units_counted"] for one in node.engine.domain_counters()):
            node.engine.poll(0.01)
        node.engine.fence(1)
        node.memory[:] = 0xEE
        received = node.engine.counters()["units_received"]
        assert 0 < received < units
        assert child.call("wait", kind="TransferEnded")["status"] == "failed"
        child.call("wait", kind="PeerLostEvent")
        assert node.engine.counters()["units_received"] == received
        assert sum(one["units_counted"] for one in node.engine.domain_counters()) == received
        assert (node.memory == 0xEE).all()


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_dead_peer_with_several_domains(provider, make_node, how):
    node = make_node(
        provider, PAGES * PAGE, domains=addresses(2, 70), bytes_in_flight=64 * PAGE,
        heartbeat_ms=50, peer_timeout_ms=1500,
    )  # fmt: skip
    with Peer(provider, PAGES * PAGE, domains=addresses(3, 80)) as child:
        peer = node.engine.connect(child.address, 30)
        transfers = [node.engine.open_transfer(peer, slot) for slot in range(3)]
        for transfer in transfers:
            write_pages(node.engine, transfer, node.region, child.remote, 200)
        while not all(one["units_completed"] for one in node.engine.domain_counters()):
            node.engine.poll(0.01)
        getattr(child, how)()
        seen: list[Event] = []
        lost = wait_for(node.engine, PeerLostEvent, seen)
        ended = [event for event in seen if isinstance(event, TransferEnded)]
        assert {event.transfer for event in ended} == set(transfers)
        assert all(event.status == "failed" for event in ended)
        assert lost.peer == peer
        node.engine.deregister(node.region)  # no domain reads it any more


def test_cancel_drains_every_domain(provider, make_node):
    node = make_node(provider, PAGES * PAGE, domains=addresses(2, 90), bytes_in_flight=16 * PAGE)
    with Peer(provider, PAGES * PAGE, domains=addresses(3, 100)) as child:
        peer = node.engine.connect(child.address, 30)
        transfer = node.engine.open_transfer(peer, 5)
        write_pages(node.engine, transfer, node.region, child.remote, 400)
        while not all(one["units_completed"] for one in node.engine.domain_counters()):
            node.engine.poll(0.01)
        node.engine.cancel_transfer(transfer)
        ended = wait_for(node.engine, TransferEnded, [])
        assert ended.status == "cancelled"
        assert 0 < ended.units_done < ended.units_planned == 400 * PAGES
        domains = node.engine.domain_counters()
        assert [one["units_posted"] for one in domains] == [
            one["units_completed"] for one in domains
        ]
        node.engine.deregister(node.region)


def test_addresses_and_names_of_domains(provider):
    config = EngineConfig(provider=provider, domains=("127.0.0.9", "lo"))
    with TransferEngine(config) as engine:
        assert [one["name"] for one in engine.domain_counters()] == ["127.0.0.9", "lo"]
    for name in ("192.0.2.250", "0.0.0.0", "mlx5_0"):
        with pytest.raises(
            FabricUnavailable, match=rf"no domain '{name}'; it has: .*lo \(127\.0\.0\.1\)"
        ):
            TransferEngine(dataclasses.replace(config, domains=("lo", name)))


def test_domains_are_checked_before_anything_is_opened():
    for fields, words in (
        ({"domains": ("a", "b", "a")}, "domains: 'a' is there twice"),
        ({"domains": ("a", "")}, "domains: an empty name"),
        ({"domains": tuple(map(str, range(65)))}, "domains: 65"),
        ({"domains": ("a", "b"), "domain_cpus": ((0,),)}, "domain_cpus: 1 entries for 2 domains"),
        ({"domain_cpus": ((-1,),)}, "domain_cpus: -1 is not in"),
    ):
        with pytest.raises(ValueError, match=words):
            EngineConfig(provider="loopback", **fields)
    with pytest.raises(ValueError, match="domain_cpus: this process may not run on CPU 1023"):
        TransferEngine(EngineConfig(provider="loopback", domain_cpus=((1023,),)))


def test_domains_of_a_region_are_checked(make_node):
    node = make_node("loopback", domains=("a", "b", "c"))
    for domains, words in (
        ((), "domains: a region needs at least one"),
        ((0, 3), "domains: 3 is not in 0..2"),
        ((1, 1), "domains: 1 is there twice"),
    ):
        with pytest.raises(ValueError, match=words):
            node.engine.register_memory(node.memory.ctypes.data, node.memory.nbytes, domains)


def descriptor(length: int, domains: list[int]) -> bytes:
    """A region's descriptor as docs/protocol.md has it."""
    out = struct.pack("<QI", length, len(domains))
    return out + b"".join(struct.pack("<IQQ", domain, 1, 0) for domain in domains)


def test_descriptors_of_a_hostile_peer_are_refused(make_node):
    assert RemoteRegion(descriptor(64, [0, 5, 63]), 64).length == 64
    for domains in ([], [1, 1], [1, 0], [64], list(range(65))):
        with pytest.raises(ValueError, match="descriptor: "):
            RemoteRegion(descriptor(64, domains), 64)
    with pytest.raises(ValueError, match="descriptor: 51 bytes"):
        RemoteRegion(descriptor(64, [0, 1])[:-1], 64)
    sender = make_node("loopback", domains=("a", "b"))
    receiver = make_node("loopback", domains=("a", "b", "c"))
    peer = sender.engine.connect(receiver.engine.control_address, 30)
    beyond = RemoteRegion(descriptor(1 << 20, [1, 3]), 1 << 20)
    transfer = sender.engine.open_transfer(peer, 1)
    sender.engine.write_paged(transfer, sender.region, beyond, [0], [0], WHOLE)
    ended = wait_for(sender.engine, TransferEnded, [])
    assert ended.status == "failed"
    assert ended.error == "the peer announced memory on its domain 3, but has only 3"
    # The peer itself is as before.
    receiver.engine.arm(1, 1)
    transfer = sender.engine.open_transfer(peer, 1)
    sender.engine.write(transfer, sender.region, 0, receiver.region.remote(), 0, 100)
    assert wait_for(receiver.engine, CounterReached, []) == CounterReached(1, 1)
