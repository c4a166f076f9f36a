"""Transfer plans on real transfer engines: predicted = posted = what the receiver counted, and the
balance of the NICs.
"""

import dataclasses
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from fabric_peer import wait_for
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_layouts import cuts, pairs, seeds
from plan_oracle import CONTEXT_BYTES, CONTEXT_ROWS, Request, make_request, ordinal_of

from ffi_transport.engine import TransferEngine
from ffi_transport.events import CounterReached, TransferEnded
from ffi_transport.types import EngineConfig, MemoryRegion
from jaxdisagg.cache_layout import CacheLayout
from jaxdisagg.transfer_plan import plan, traffic


def addresses(count: int, first: int) -> tuple[str, ...]:
    """Addresses of this process alone on the loopback interface: each is a NIC to the engine."""
    high, low = divmod(os.getpid(), 256)
    return tuple(f"127.{1 + high % 250}.{low}.{first + i}" for i in range(count))


class Wire:
    """A sender and a receiver, connected; requests one after another.

    With `groups` each device has so many domains of its own, on either side; else all share all.
    """

    def __init__(
        self,
        sender: TransferEngine,
        receiver: TransferEngine,
        groups: tuple[int, int] | None = None,
    ) -> None:
        self.sender = sender
        self.receiver = receiver
        self.groups = groups
        self.peer = sender.connect(receiver.control_address, 30)
        self._slots = itertools.count(1)

    def posted(self) -> np.ndarray:
        """int64[2, domains]: units and bytes that left through each domain of the sender so far."""
        found = self.sender.domain_counters()
        return np.array([[d[name] for d in found] for name in ("units_posted", "bytes_posted")])

    def counted(self) -> np.ndarray:
        """Units that came in through each domain of the receiver so far."""
        return np.array([domain["units_counted"] for domain in self.receiver.domain_counters()])

    def run(self, request: Request, expected: int) -> tuple[TransferEnded, CounterReached]:
        """Move a request through both engines; memory is registered as nodes do, by device."""
        with self._memory(request) as (sources, destinations):
            slot = next(self._slots)
            self.receiver.arm(slot, expected)
            transfer = self.sender.open_transfer(self.peer, slot)
            for write in request.writes():
                rank = ordinal_of(write.ordinal)
                remotes: Any = write.remotes
                for layer, remote in enumerate(remotes, write.first_layer):
                    self.sender.write_paged(
                        transfer, sources[rank, layer], destinations[remote].remote(),
                        write.source_pages, write.destination_pages, write.unit,
                    )  # fmt: skip
            self.sender.seal(transfer)
            ended = wait_for(self.sender, TransferEnded, [])
            reached = wait_for(self.receiver, CounterReached, [])
            assert reached.slot == slot
            assert self.receiver.seen(slot) == expected, "more came than was expected"
            self.receiver.disarm(slot)
            return ended, reached

    @contextmanager
    def _memory(
        self, request: Request
    ) -> Iterator[tuple[dict[Any, MemoryRegion], dict[Any, MemoryRegion]]]:
        sources: dict[Any, MemoryRegion] = {}
        destinations: dict[Any, MemoryRegion] = {}
        contexts = []
        for engine, side, regions, size in (
            (self.sender, request.source, sources, self.groups and self.groups[0]),
            (self.receiver, request.destination, destinations, self.groups and self.groups[1]),
        ):
            here, layout = engine is self.sender, side.layout
            for dp_rank, rank in itertools.product(range(layout.dp), range(layout.tp)):
                arrays = dict(enumerate(side.memory[dp_rank][rank]))
                context = np.full((CONTEXT_ROWS, CONTEXT_BYTES), 7 if here else 0, np.uint8)
                contexts.append((engine, context))
                at = layout.ordinal(dp_rank, rank)
                domains = range(at * size, (at + 1) * size) if size else None
                for layer, array in [*arrays.items(), ("context", context)]:
                    key = (at, layout.layers if layer == "context" else layer)
                    name = key if here else (dp_rank, rank, layer)
                    regions[name] = engine.register_memory(array.ctypes.data, array.nbytes, domains)
        yield sources, destinations
        for engine, regions in ((self.sender, sources), (self.receiver, destinations)):
            for region in regions.values():
                engine.deregister(region)


@contextmanager
def wire(
    provider: str, here: int, there: int, groups: tuple[int, int] | None = None
) -> Iterator[Wire]:
    """Loopback takes any names for domains; over IP each domain has an address of its own."""
    names = [addresses(here, 110), addresses(there, 120)]
    if here == there == 1:
        names = [(), ()]
    with (
        TransferEngine(EngineConfig(provider=provider, domains=names[0])) as sender,
        TransferEngine(EngineConfig(provider=provider, domains=names[1])) as receiver,
    ):
        yield Wire(sender, receiver, groups)


WIRES = [("loopback", 1, 1), ("loopback", 2, 3), ("auto", 1, 1), ("auto", 3, 2)]


@pytest.fixture(scope="module", params=WIRES, ids=lambda w: f"{w[0]}-{w[1]}-to-{w[2]}")
def connected(request):
    with wire(*request.param) as found:
        found.longest = 0
        yield found


@settings(max_examples=40)
@given(pairs(), st.integers(2, 40), cuts, seeds)
def test_predicted_posted_and_counted_units_agree(connected, pair, length, chunk_ends, seed):
    """And what leaves through any two NICs differs by one unit, over all requests so far."""
    transfer = plan(*pair, seed)
    request = make_request(*pair, length, seed=seed, cuts=chunk_ends, real=True)
    moved = traffic(transfer, length, context_bytes=CONTEXT_BYTES)
    expected = transfer.expected_units(length, context=True)
    before = connected.posted().sum(axis=1), connected.counted().sum()
    ended, reached = connected.run(request, expected)
    assert (ended.status, ended.error) == ("completed", "")
    assert list(request.destination.misplaced(length - 1)) == []
    assert reached.count == ended.units_done == expected == moved.units.sum()
    assert ended.bytes == moved.bytes.sum()
    assert (connected.posted().sum(axis=1) - before[0]).tolist() == [expected, ended.bytes]
    assert connected.counted().sum() - before[1] == expected
    longest = max(CONTEXT_BYTES, *(unit.length for unit in transfer.units))
    connected.longest = max(connected.longest, longest)
    assert np.ptp(connected.posted()[1]) <= connected.longest


def dealt(jobs: list[int], domains: int) -> list[int]:
    """Units of each domain when every job (a list of units of one size) is dealt out evenly and
    what is left over goes to those that had fewest.
    """
    loads = np.zeros(domains, np.int64)
    for units in jobs:
        loads += units // domains
        loads[np.argsort(loads, kind="stable")[: units % domains]] += 1
    return sorted(loads.tolist())


@pytest.mark.parametrize(("here", "there"), [(1, 2), (2, 2), (2, 3), (4, 1), (3, 8)])
def test_nics_share_a_request_within_one_unit(here, there):
    """Of a latent cache, whose units are of one size, contexts apart: on both sides."""
    latent = CacheLayout("mla", 3, kv_heads=1, head_dim=5, page_size=4, itemsize=1, tp=2)
    layouts = (latent, CacheLayout("mla", 3, 1, head_dim=5, page_size=4, itemsize=1, tp=3))
    with wire("loopback", here, there) as found:
        jobs: list[int] = []
        for seed, length in enumerate((30, 7, 46, 3)):
            request = make_request(*layouts, length, seed=seed, cuts=(9, 14, 33), real=True)
            pages = [write for write in request.writes() if write.first_layer == 0]
            jobs += [len(write.source_pages) for write in pages for _ in range(write.layers)]
            request.writes = lambda pages=pages: iter(pages)
            units = plan(*layouts, seed).expected_units(length, context=False)
            ended, _ = found.run(request, units)
            assert ended.units_done == units
        posted, counted = found.posted()[0], found.counted()
        assert posted.sum() == counted.sum() == sum(jobs)
        assert np.ptp(posted) <= 1
        assert np.ptp(counted) <= 1
        assert sorted(posted.tolist()) == dealt(jobs, here)
        assert sorted(counted.tolist()) == dealt(jobs, there)


@pytest.mark.parametrize("groups", [(1, 2), (2, 1), (3, 2)], ids=str)
@pytest.mark.parametrize("tps", [(2, 6), (6, 2), (3, 2), (6, 12)], ids=str)
def test_a_devices_nics_share_its_part_of_a_request(tps, groups):
    """Six heads; every device has NICs of its own, as nodes register them."""
    heads = CacheLayout("gqa", 2, kv_heads=6, head_dim=3, page_size=4, itemsize=1, tp=1)
    source, destination = (dataclasses.replace(heads, tp=tp) for tp in tps)
    transfer = plan(source, destination, 3)
    moved = traffic(transfer, 90, context_bytes=CONTEXT_BYTES)
    longest = max(unit.length for unit in transfer.units)
    sizes = tps[0] * groups[0], tps[1] * groups[1]
    with wire("loopback", *sizes, groups) as found:
        request = make_request(source, destination, 90, seed=3, cuts=(31, 50), real=True)
        found.run(request, transfer.expected_units(90, context=True))
        sent = found.posted()[1].reshape(tps[0], groups[0])
        counted = found.counted().reshape(tps[1], groups[1])
    assert sent.sum(axis=1).tolist() == moved.bytes.sum(axis=1).tolist()
    assert counted.sum(axis=1).tolist() == moved.units.sum(axis=0).tolist()
    to = (moved.units > 0).sum(axis=1)
    assert (np.ptp(sent, axis=1) <= to * longest).all()
    if len({unit.length for unit in transfer.units}) == 1:  # contexts, one a rank, are shorter
        of = (moved.units > 0).sum(axis=0)
        assert (np.ptp(counted, axis=1) <= of + 1).all()
