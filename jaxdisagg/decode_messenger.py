"""The KV messenger of a decode node: finds prefill nodes, sends PREFILLs, counts, cancels.

A request that awaits its prefill holds one lease: pages, an immediate slot and a context buffer.
They are released together, on the exact count, on a drained terminal message or after a hard fence.
"""

import functools
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ffi_transport.engine import TransferEngine
from ffi_transport.errors import TransportError
from ffi_transport.types import (
    CounterOvershoot,
    CounterReached,
    Event,
    MessageReceived,
    PeerConnected,
    PeerLostEvent,
)
from jaxdisagg import messages
from jaxdisagg.active import ActiveRequest
from jaxdisagg.api import RequestError
from jaxdisagg.decode_node import DecodeNode, Prefiller
from jaxdisagg.messages import MessageError, NodeHello
from jaxdisagg.prefill_peers import PrefillPeer, PrefillPeers
from jaxdisagg.slots import SlotAllocator
from jaxdisagg.transfer_plan import plan

log = logging.getLogger(__name__)

BUSY_DELAY = 0.05
REVOKING_SHARE = 0.25


@dataclass(eq=False)
class Attempt:
    """One PREFILL: what it holds and what it expects. Times are of `time.monotonic`."""

    id: str
    active: ActiveRequest
    peer: PrefillPeer
    slot: int
    context: int
    expected: int
    pages: int
    deadline: float
    cancelled_at: float | None = None
    resend_at: float = field(default=float("inf"))


class DecodeMessenger(Prefiller):
    """Used on the node's loop alone, but for `on_events` and `refresh`, which only post to it."""

    def __init__(self, node: DecodeNode, engine: TransferEngine, hello: NodeHello) -> None:
        self._node = node
        self._engine = engine
        self._hello = hello
        self._timeouts = node.node.timeouts
        self.peers = PrefillPeers(node.node.id, engine, hello, self._timeouts.connect, node.post)
        self._slots = SlotAllocator(secrets.randbits(20))
        self._contexts = [
            list(range(1, node.runner.cache.context_rows)) for _ in range(node.runner.dp)
        ]
        self._awaiting: dict[str, Attempt] = {}
        self._by_slot: dict[int, Attempt] = {}
        self._by_request: dict[str, Attempt] = {}
        self._told: dict[str, ActiveRequest] = {}
        self._sequence = 0
        self._page_writes = 0

    # ---- Prefiller -----------------------------------------------------------------------------

    def unavailable(self) -> str | None:
        """None when a prefill node is connected, or what is known of those that are not."""
        return self.peers.missing()

    def has_room(self, active: ActiveRequest) -> bool:
        """Whether there is a slot and a context buffer, and pages within the half of the pool.

        Requests that await prefill hold at most half of the pages (R9); one alone may hold more.
        """
        if not self._slots.free or not all(self._contexts):
            return False
        pages = -(-active.cache_tokens // self._node.node.cache.page_size)
        awaiting = sum(a.pages for a in self._awaiting.values())
        total = sum(pool.counts().total for pool in self._node.pools)
        return not awaiting or awaiting + pages <= total // 2

    def begin(self, active: ActiveRequest) -> None:
        """Arm the counter, then send PREFILL to the peer with the fewest outstanding tokens."""
        peer = self.peers.choose()
        assert active.lease is not None
        assert peer is not None
        now = time.monotonic()
        transfer_plan = plan(peer.hello.layout, self._hello.layout)
        expected = transfer_plan.expected_units(active.prompt_length, context_buffers=1)
        pages = transfer_plan.pages_for(active.prompt_length)
        self._sequence += 1
        attempt = Attempt(
            id=f"{self._hello.epoch:016x}-{self._sequence}",
            active=active,
            peer=peer,
            slot=self._slots.take(),
            context=self._contexts[active.rank].pop(),
            expected=expected,
            pages=len(active.lease.pages),
            deadline=now + self._timeouts.prefill,
        )
        self._awaiting[attempt.id] = attempt
        self._by_slot[attempt.slot] = attempt
        self._by_request[active.id] = attempt
        self._engine.arm(attempt.slot, expected)
        self._node.pools[active.rank].expose(active.lease)
        active.sent_at = now
        active.account.node = peer.name
        active.account.pages = pages
        peer.outstanding += active.prompt_length
        message = messages.Prefill(
            request=attempt.id,
            slot=attempt.slot,
            expected=(expected,),
            tokens=messages.pack(active.request.prompt),
            pages=messages.pack(active.lease.pages[:pages]),
            dp_rank=active.rank,
            seed=secrets.randbits(32),
            deadline_ms=int(self._timeouts.prefill * 1000),
            context=attempt.context,
        )
        if not self._send(peer, message):
            # The loss of the peer is on its way as an event, after its endpoint was fenced, and
            # ends this attempt with all others.
            log.debug("PREFILL %s found %s gone", attempt.id, peer.name)

    def cancel(self, active: ActiveRequest) -> None:
        """Ask for the end of the writes, again and again until the answer or the fence."""
        attempt = self._by_request[active.id]
        attempt.cancelled_at = time.monotonic()
        self._send_cancel(attempt, attempt.cancelled_at)

    def tick(self, now: float) -> bool:
        """Deadlines of prefills, resent CANCELs, fences, and new connections."""
        self.peers.tick(now)
        for attempt in list(self._awaiting.values()):
            if self._awaiting.get(attempt.id) is not attempt:
                continue  # a fence ended it meanwhile
            if attempt.cancelled_at is not None:
                if now - attempt.cancelled_at >= self._patience(attempt):
                    self._fence(attempt.peer, "a CANCEL was not answered in time")
                elif now >= attempt.resend_at:
                    self._send_cancel(attempt, now)
            elif now >= attempt.deadline:
                self._node.fail_and_cancel(attempt.active, self._late(attempt))
        return False

    def next_deadline(self) -> float | None:
        """The first of the deadlines above."""
        times = [
            min(a.resend_at, a.cancelled_at + self._patience(a))
            if a.cancelled_at is not None
            else a.deadline
            for a in self._awaiting.values()
        ]
        connect = self.peers.next_deadline()
        return min([*times, *([] if connect is None else [connect])], default=None)

    def close(self, reason: str) -> None:
        """Fence every peer, so that nothing is written into memory that may go away."""
        for peer in self.peers.connected():
            self._fence(peer, reason)
        self.peers.close()

    # ---- events --------------------------------------------------------------------------------

    def on_events(self, events: Sequence[Event]) -> None:
        """Hand the engine's events to the loop."""
        self._node.post(functools.partial(self._handle_all, events))

    def _handle_all(self, events: Sequence[Event]) -> None:
        for event in events:
            self._handle(event, time.monotonic())

    def _handle(self, event: Event, now: float) -> None:
        match event:
            case CounterReached():
                self._on_count(event.slot, event.count, now)
            case CounterOvershoot():
                self._on_overshoot(event)
            case MessageReceived():
                self._receive(event.peer, event.payload, now)
            case PeerLostEvent():
                peer = self.peers.lost(event.peer, event.reason)
                if peer is not None:
                    self._peer_gone(peer, event.reason)
            case PeerConnected():
                self.peers.greeted(event)
            case _:
                log.warning("unexpected event on a decode node: %s", event)

    def _on_count(self, slot: int, count: int, now: float) -> None:
        attempt = self._by_slot.get(slot)
        if attempt is None or attempt.cancelled_at is not None or attempt.id not in self._awaiting:
            return  # a count reached while REVOKING frees nothing (R15)
        self._page_writes += count
        attempt.active.account.page_writes = count
        self._settle(attempt)
        self._told[attempt.id] = attempt.active
        while len(self._told) > self._node.node.max_waiting:
            del self._told[next(iter(self._told))]
        self._node.prefilled(attempt.active, now)

    def _on_overshoot(self, event: CounterOvershoot) -> None:
        """A write came twice, so that another one may be missing: the cache cannot be trusted."""
        attempt = self._by_slot.get(event.slot)
        log.error("slot %d: %d units, %d were expected", event.slot, event.seen, event.expected)
        if attempt is None:
            return
        reason = (
            f"protocol error: {event.seen} page-writes were counted where {event.expected} were "
            "expected"
        )
        self._fence(attempt.peer, reason)
        if self._by_request.get(attempt.active.id) is attempt and not attempt.active.life.over:
            self._node.fail(
                attempt.active,
                RequestError(502, f"{attempt.peer.name}: {reason}", code="prefill_failed"),
            )

    def _receive(self, peer_id: int, payload: bytes, now: float) -> None:
        try:
            message = messages.decode(payload)
        except MessageError as error:
            log.error("a message of peer %d was dropped: %s", peer_id, error)
            return
        if isinstance(message, messages.Telemetry):
            self._on_telemetry(message)
            return
        if not isinstance(message, messages.Busy | messages.Failed | messages.CancelAck):
            log.error("%s is no message for a decode node", type(message).__name__)
            return
        attempt = self._awaiting.get(message.request)
        if attempt is None or attempt.peer.id != peer_id:
            return  # the answer to a resent CANCEL
        self._settle(attempt)
        if attempt.cancelled_at is not None:
            self._node.prefill_over(attempt.active)
        elif isinstance(message, messages.Busy):
            self._node.requeue(attempt.active, now + BUSY_DELAY)
        else:
            reason = message.reason if isinstance(message, messages.Failed) else "it was cancelled"
            self._node.fail(
                attempt.active,
                RequestError(
                    502,
                    f"the prefill at {attempt.peer.name} failed: {reason}",
                    code="prefill_failed",
                ),
            )

    def _on_telemetry(self, message: messages.Telemetry) -> None:
        active = self._told.pop(message.request, None)
        if active is None:
            attempt = self._awaiting.get(message.request)
            if attempt is None:
                return
            active = attempt.active
        active.account.queue = message.queue_s
        active.account.compute = message.prefill_s
        active.account.bytes = message.bytes
        active.account.reported = True

    # ---- ends ----------------------------------------------------------------------------------

    def _settle(self, attempt: Attempt) -> None:
        """The prefill is over, well or not: nobody waits for it any more."""
        attempt.peer.outstanding -= attempt.active.prompt_length
        del self._awaiting[attempt.id]

    def release(self, active: ActiveRequest) -> None:
        """Give back slot and context buffer together with the pages.

        Until then the slot stays armed: a duplicate that made the count early would otherwise pass
        unseen, since the unit that it stood for would only be stale (R6).
        """
        attempt = self._by_request.pop(active.id, None)
        if attempt is None:
            return  # a prompt of one token
        self._engine.disarm(attempt.slot)
        self._slots.give(attempt.slot)
        del self._by_slot[attempt.slot]
        self._contexts[active.rank].append(attempt.context)

    def _arrived(self, attempt: Attempt) -> str:
        seen = self._engine.seen(attempt.slot)
        return f"{seen} of {attempt.expected} page-writes had arrived"

    def _late(self, attempt: Attempt) -> RequestError:
        waited = time.monotonic() - (attempt.active.sent_at or 0.0)
        return RequestError(
            504,
            f"the prefill at {attempt.peer.name} was not complete after {waited:.1f} s: "
            f"{self._arrived(attempt)}",
            code="prefill_timeout",
        )

    def _peer_gone(self, peer: PrefillPeer, reason: str) -> None:
        """The peer's data endpoint is closed: every attempt with it is over."""
        for attempt in [a for a in self._awaiting.values() if a.peer is peer]:
            arrived = self._arrived(attempt)
            self._settle(attempt)
            if attempt.cancelled_at is not None:
                self._node.prefill_over(attempt.active)
                continue
            self._node.fail(
                attempt.active,
                RequestError(
                    502,
                    f"the prefill node {peer.name} was lost ({reason}): {arrived}",
                    code="prefill_node_lost",
                ),
            )

    def _fence(self, peer: PrefillPeer, reason: str) -> None:
        log.warning("fencing prefill node %s: %s", peer.name, reason)
        try:
            self._engine.fence(peer.id)
            self._engine.disconnect(peer.id)
        except TransportError as error:
            log.debug("fence of %s: %s", peer.name, error)
        self.peers.lost(peer.id, reason)
        self._peer_gone(peer, reason)

    def _patience(self, attempt: Attempt) -> float:
        """Seconds that a CANCEL may stay unanswered before its peer is fenced.

        Short when REVOKING pages exceed a quarter of the pool, but not none: a burst of clients
        that leave is answered within a step, and a fence would end innocent requests.
        """
        share = self._node.pools[attempt.active.rank].revoking_share
        crowded = share > REVOKING_SHARE
        return self._timeouts.cancel_resend if crowded else self._timeouts.cancel_fence

    def _send_cancel(self, attempt: Attempt, now: float) -> None:
        attempt.resend_at = now + self._timeouts.cancel_resend
        self._send(attempt.peer, messages.Cancel(attempt.id))

    def _send(self, peer: PrefillPeer, message: messages.Message) -> bool:
        try:
            self._engine.send(peer.id, messages.encode(message))
        except TransportError as error:
            log.debug("%s to %s was not sent: %s", type(message).__name__, peer.name, error)
            return False
        return True

    def state(self) -> dict[str, Any]:
        """Its part of /debug/state."""
        return {
            "peers": self.peers.state(),
            "awaiting": [
                {
                    "request": a.active.id,
                    "prefill_node": a.peer.name,
                    "expected": a.expected,
                    "seen": self._engine.seen(a.slot),
                    "cancelled": a.cancelled_at is not None,
                }
                for a in list(self._awaiting.values())
            ],
            "page_writes": self._page_writes,
            "fabric": {"provider": self._engine.provider, **self._engine.counters()},
        }
