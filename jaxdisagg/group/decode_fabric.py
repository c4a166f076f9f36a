"""A decode node's fabric: the prefill nodes that it is linked to, and each process's counters.

Each process counts what lands in its own devices, with its own expected number (R3); the node's
count is reached when all of them have reported. A PREFILL goes out when all have armed (R4).
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ffi_transport.engine import TransferEngine
from ffi_transport.errors import PeerLost, TransferTimeout, TransportError
from ffi_transport.events import ArrivalFailed, CounterOvershoot, CounterReached, Event
from jaxdisagg.group.fabric_messages import (
    Arm,
    Armed,
    Disarm,
    Fault,
    FollowerWord,
    LinkLost,
    NotArrived,
    Overshot,
    Reached,
    Tally,
)
from jaxdisagg.group.node_fabric import NodeFabric, Pair, Peer
from jaxdisagg.group.node_links import NodeLinks
from jaxdisagg.group.processes import Group
from jaxdisagg.hello import NodeHello
from jaxdisagg.landings import Destination, DeviceLandings

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Count:
    """A slot's counters. `unarmed` and `short` are processes that have not answered, or counted."""

    expected: tuple[int, ...]
    unarmed: set[int]
    short: set[int]
    then: Callable[[str | None], None] | None
    deadline: float
    seen: dict[int, int] = field(default_factory=dict)


class DecodeFabric(NodeFabric):
    """Used on the node's loop, but for what says otherwise.

    `landings` are the leader's: all processes of a node have GPUs, or none has.
    """

    def __init__(
        self,
        engine: TransferEngine,
        group: Group,
        landings: DeviceLandings,
        *,
        name: str,
        modes: Sequence[str],
        fence_s: float = 10.0,
        arm_s: float = 10.0,
    ) -> None:
        self._landings = landings
        self._arm_s = arm_s
        self._counts: dict[int, _Count] = {}
        super().__init__(engine, group, name=name, modes=modes, fence_s=fence_s)
        self._links = NodeLinks(engine, group, name)

    def hears(self) -> tuple[type[Any], ...]:
        """The kinds of messages that a decode node's followers send."""
        return (LinkLost, Tally, Fault, Armed, Reached, NotArrived, Overshot)

    # ---- links ---------------------------------------------------------------------------------

    def connect(self, address: str, timeout_s: float) -> int:
        """Greet a prefill node's leader; for the thread that connects. As TransferEngine's."""
        return self.engine.connect(address, timeout_s)

    def peer_hello(self, peer_id: int) -> bytes:
        """What that leader said. PeerLost if it is gone."""
        return self.engine.peer_hello(peer_id)

    def disconnect(self, peer_id: int) -> None:
        """Take leave of a leader that does not fit; for the thread that connects."""
        self.engine.disconnect(peer_id)

    def link(
        self, peer_id: int, address: str, hello: NodeHello, timeout_s: float
    ) -> dict[Pair, int]:
        """Every link to a node whose leader, at `address`, was greeted.

        For the thread that connects. As `NodeLinks.make`.
        """
        return self._links.make(peer_id, address, hello, timeout_s)

    def admit(self, peer_id: int, hello: NodeHello, links: Mapping[Pair, int]) -> None:
        """A node with all its links is a peer from now on. PeerLost if one of them is gone."""
        peer = Peer(peer_id, hello.node, hello.epoch, hello.process_count, whole=True)
        self._peers[peer_id] = peer
        for pair, link in links.items():
            self.own(peer, pair, link)
        for pair, link in links.items():
            reason = self._lost.pop((pair[0], link), None)
            if reason is not None:  # told before the peer was known here
                self.link_lost(pair[0], link, reason, 0.0)
        if peer.ending is not None:
            raise PeerLost(f"{hello.node} is lost already: {peer.ending}", peer=peer_id)

    def gone(self, peer: Peer) -> None:
        """Its attempts are the messenger's; nothing of a peer is kept here."""

    # ---- counters ------------------------------------------------------------------------------

    @property
    def slot_bits(self) -> int:
        """Of the immediate."""
        return self.engine.config.slot_bits

    def arm(
        self,
        slot: int,
        expected: tuple[int, ...],
        destination: Destination,
        then: Callable[[str | None], None],
    ) -> None:
        """Expect `expected[process]` units on a slot, in every process that expects any.

        `then` is called once: with None when all counters wait (at once, where the leader alone is
        concerned), or with what is wrong, such as the process that did not answer in time.
        """
        armed = {process for process, number in enumerate(expected) if number}
        count = _Count(expected, armed - {0}, set(armed), then, time.monotonic() + self._arm_s)
        self._counts[slot] = count
        if 0 in armed:
            try:
                self.engine.arm(slot, expected[0], landings=self._landings.of(destination))
            except TransportError as error:  # a device cannot be opened
                self._armed(count, f"the counter of {self.name} does not wait: {error}")
                return
        where = destination if self._landings else None
        for process in sorted(count.unarmed):
            self.group.send(process, Arm(slot, expected[process], where))
        if not count.unarmed:
            self._armed(count, None)

    @staticmethod
    def _armed(count: _Count, problem: str | None) -> None:
        then, count.then = count.then, None
        count.unarmed.clear()
        if then is not None:
            then(problem)

    def disarm(self, slot: int) -> None:
        """Forget a slot's counts in every process.

        When this returns nothing is copied into this process's devices for it any more, and the
        other processes see to theirs before they handle a later word, such as a step that uses the
        pages. Raises TransferTimeout when copies have hung: then the pages are not safe.
        """
        for process, number in enumerate(self._counts.pop(slot).expected):
            if number and process:
                self.group.send(process, Disarm(slot))
            elif number:
                self.engine.disarm(slot)

    def land_no_more(self) -> None:
        """The node has failed: copy nothing more into this process's devices.

        The others end with their leader. What was armed stays known, for those who forget it.
        """
        for slot, count in self._counts.items():
            if count.expected[0]:
                with contextlib.suppress(TransferTimeout):  # it fails already
                    self.engine.disarm(slot)

    def seen(self, slot: int) -> tuple[int, ...]:
        """Units counted on an armed slot so far, by process; of followers, when last heard."""
        count = self._counts.get(slot)
        if count is None:
            return (0,) * self.group.size
        own = self.engine.seen(slot) if count.expected[0] else 0
        return (own, *(count.seen.get(process, 0) for process in range(1, self.group.size)))

    # ---- events --------------------------------------------------------------------------------

    def merge(self, event: Event) -> Iterable[Event]:
        """The leader's own counters are one part of the node's."""
        if isinstance(event, CounterReached):
            return self._reached(0, event.slot)
        if isinstance(event, CounterOvershoot):
            return self._overshot(0, event)
        if isinstance(event, ArrivalFailed):
            return [self._not_arrived(0, event.slot, event.error)]
        return [event]

    def hear(self, process: int, word: FollowerWord) -> Iterable[Event]:
        """A follower's counters are the others."""
        if isinstance(word, Armed):
            self._on_armed(process, word)
        elif isinstance(word, Reached):
            self.note(process, {word.slot: word.count})
            return self._reached(process, word.slot)
        elif isinstance(word, NotArrived):
            return [self._not_arrived(process, word.slot, word.error)]
        elif isinstance(word, Overshot):
            self.note(process, {word.slot: word.seen})
            return self._overshot(process, CounterOvershoot(word.slot, word.expected, word.seen))
        return []

    def note(self, process: int, seen: Mapping[int, int]) -> None:
        """What a follower has counted."""
        for slot, number in seen.items():
            if slot in self._counts:
                self._counts[slot].seen[process] = number

    def _on_armed(self, process: int, word: Armed) -> None:
        count = self._counts.get(word.slot)
        if count is None or process not in count.unarmed:
            return
        count.unarmed.discard(process)
        if word.problem:
            self._armed(count, f"process {process} of {self.name}: {word.problem}")
        elif not count.unarmed:
            self._armed(count, None)

    def _reached(self, process: int, slot: int) -> list[Event]:
        count = self._counts.get(slot)
        if count is None or process not in count.short:
            return []
        count.short.discard(process)
        return [] if count.short else [CounterReached(slot, sum(count.expected))]

    def _not_arrived(self, process: int, slot: int, error: str) -> ArrivalFailed:
        where = f"process {process} of {self.name}: " if self.group.size > 1 else ""
        return ArrivalFailed(slot, f"{where}{error}")

    def _overshot(self, process: int, event: CounterOvershoot) -> list[Event]:
        if self.group.size > 1:
            log.error("process %d counted too much on slot %d", process, event.slot)
        return [event]

    # ---- time ----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Also give up on processes that did not arm in time."""
        super().tick(now)
        for count in list(self._counts.values()):
            if count.then is not None and now >= count.deadline:
                missing = ", ".join(map(str, sorted(count.unarmed)))
                self._armed(
                    count,
                    f"process {missing} of {self.name} did not arm its counter within "
                    f"{self._arm_s:g} s",
                )

    def next_deadline(self) -> float | None:
        """The first of a fence's and of an arming."""
        first = super().next_deadline()
        times = [count.deadline for count in self._counts.values() if count.then is not None]
        return min([*times, *([] if first is None else [first])], default=None)
