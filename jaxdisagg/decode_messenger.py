"""The KV messenger of a decode node: sends PREFILLs to prefill nodes and counts what they write.

A request holds one lease: pages, an immediate slot and a context buffer. They go back together,
when the request has ended and nothing can write them any more: after the exact count, on a drained
terminal message or after a hard fence.
"""

import functools
import logging
import secrets
import time
from typing import Any

from ffi_transport.errors import PeerLost, TransportError
from ffi_transport.events import (
    ArrivalFailed,
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
from jaxdisagg.attempts import Attempt, Attempts
from jaxdisagg.cancellation import Cancellation
from jaxdisagg.decode_node import DecodeNode
from jaxdisagg.group.decode_fabric import DecodeFabric
from jaxdisagg.hello import NodeHello
from jaxdisagg.landings import Destination
from jaxdisagg.messages import MessageError
from jaxdisagg.page_spans import pages_for
from jaxdisagg.prefill_peers import PrefillPeers
from jaxdisagg.prefill_reports import PrefillReports
from jaxdisagg.prefiller import Prefiller
from jaxdisagg.process_shares import expected_units
from jaxdisagg.transfer_plan import plan

log = logging.getLogger(__name__)

BUSY_SECONDS = 0.05


class DecodeMessenger(Prefiller):
    """Used on the node's loop alone, but for `refresh` of its peers, which only posts to it."""

    def __init__(self, node: DecodeNode, fabric: DecodeFabric, hello: NodeHello) -> None:
        self._node = node
        self._fabric = fabric
        self._hello = hello
        self._timeouts = node.node.timeouts
        self.peers = PrefillPeers(node.node.id, fabric, hello, self._timeouts.connect, node.post)
        self._attempts = Attempts(
            fabric,
            hello.epoch,
            secrets.randbits(fabric.slot_bits),
            node.runner.dp,
            node.runner.cache.context_rows,
        )
        self._cancellation = Cancellation(node, fabric, self.peers, self._attempts)
        self._reports = PrefillReports(node.node.max_requests)
        self._page_writes = 0
        fabric.attach(node.post, self._handle)

    # ---- Prefiller -----------------------------------------------------------------------------

    def unavailable(self) -> str | None:
        """None when a prefill node is connected, or what is known of those that are not."""
        return self.peers.missing()

    def never_fits(self, prompt_length: int) -> str | None:
        """Why no connected prefill node can ever take such a prompt, or None."""
        return self.peers.never_fits(prompt_length)

    def has_room(self, active: ActiveRequest) -> bool:
        """Whether there is a peer, a slot, a context buffer, and room in the half of the pool.

        Requests that await prefill hold at most half of the pages (R9); one alone may hold more.
        """
        if not self._attempts.has_room:
            return False
        if self.peers.choose(active.prompt_length, time.monotonic()) is None:
            return False
        pages = -(-active.cache_tokens // self._node.node.cache.page_size)
        awaiting = self._attempts.pages
        total = sum(pool.counts().total for pool in self._node.pools)
        return not awaiting or awaiting + pages <= total // 2

    def begin(self, active: ActiveRequest) -> None:
        """Arm the counters, then send PREFILL to the peer with the fewest outstanding tokens."""
        now = time.monotonic()
        peer = self.peers.choose(active.prompt_length, now)
        assert active.lease is not None
        assert peer is not None
        seed = secrets.randbits(32)
        transfer_plan = plan(peer.hello.layout, self._hello.layout, seed)
        processes = self._hello.process_count
        expected = expected_units(
            transfer_plan, active.prompt_length, active.rank, processes, context=True
        )
        pages = pages_for(active.prompt_length, self._hello.layout.page_size)
        deadline = now + self._timeouts.prefill
        attempt = self._attempts.open(active, peer, expected, deadline)
        active.context = attempt.context
        self._node.pools[active.rank].expose(active.lease)
        active.sent_at = now
        active.account.node = peer.name
        active.account.pages = pages
        message = messages.Prefill(
            request=attempt.id,
            slot=attempt.slot,
            expected=expected,
            tokens=messages.pack(active.request.prompt),
            pages=messages.pack(active.lease.pages[:pages]),
            dp_rank=active.rank,
            seed=seed,
            deadline_ms=int(self._timeouts.prefill * 1000),
            context=attempt.context,
        )
        self._attempts.arm(
            attempt,
            Destination(active.rank, message.pages, attempt.context),
            functools.partial(self._armed, attempt, message),
        )

    def _armed(self, attempt: Attempt, message: messages.Prefill, problem: str | None) -> None:
        """Every counter waits (R4), so PREFILL may go out; or a process did not arm its own."""
        if self._attempts.awaiting(attempt.id) is not attempt:
            return  # it has ended meanwhile
        if problem is not None:
            self._attempts.settle(attempt)
            self._node.fail_request(
                attempt.active, RequestError(504, problem, code="prefill_failed")
            )
            return
        attempt.sent = True
        try:
            self._fabric.send(attempt.peer.id, messages.encode(message))
        except PeerLost:
            # Its loss comes as an event, after its endpoints were fenced, and ends all attempts.
            log.debug("PREFILL %s found %s gone", attempt.id, attempt.peer.name)
        except TransportError as error:  # it takes no messages any more: nothing was sent
            self._cancellation.fence(attempt.peer, str(error))

    def cancel(self, active: ActiveRequest) -> None:
        """Ask for the end of the writes, again and again until the answer or the fence."""
        self._cancellation.cancel(active)

    def tick(self, now: float) -> bool:
        """Deadlines of prefills, resent CANCELs, fences, and new connections."""
        self._fabric.tick(now)
        self.peers.tick(now)
        for attempt in self._attempts:
            if self._attempts.awaiting(attempt.id) is not attempt:
                continue  # ended meanwhile
            if self._cancellation.fencing(attempt.peer.id):
                continue  # its links are being closed in all processes, which ends it
            if attempt.cancelled_at is not None:
                self._cancellation.pursue(attempt, now)
            elif now >= attempt.deadline:
                self._node.fail_and_cancel(attempt.active, self._late(attempt))
        return False

    def next_deadline(self) -> float | None:
        """The first of the deadlines above."""
        times = [
            a.deadline if a.cancelled_at is None else self._cancellation.due(a)
            for a in self._attempts
            if not self._cancellation.fencing(a.peer.id)
        ]
        others = (self.peers.next_deadline(), self._fabric.next_deadline())
        return min([*times, *(t for t in others if t is not None)], default=None)

    def close(self, reason: str) -> None:
        """Fence every peer, so that nothing is written into memory that may go away."""
        for peer in self.peers.connected():
            self._cancellation.fence(peer, reason)
        self._fabric.land_no_more()
        self.peers.close()

    # ---- events --------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        now = time.monotonic()
        match event:
            case CounterReached():
                self._on_count(event.slot, event.count, now)
            case CounterOvershoot():
                self._on_overshoot(event)
            case ArrivalFailed():
                self._on_arrival_failed(event)
            case MessageReceived():
                self._receive(event.peer, event.payload, now)
            case PeerLostEvent():
                self._cancellation.peer_lost(event.peer, event.reason)
            case PeerConnected():
                self.peers.greeted(event)
            case _:
                log.warning("unexpected event on a decode node: %s", event)

    def _on_count(self, slot: int, count: int, now: float) -> None:
        attempt = self._counting(slot)
        if attempt is None:
            return
        self._page_writes += count
        attempt.active.account.page_writes = count
        self._attempts.settle(attempt)
        self._reports.expect(attempt.id, attempt.active)
        self._node.prefilled(attempt.active, now)

    def _counting(self, slot: int) -> Attempt | None:
        """The attempt that waits for a slot's count.

        None where it is over already, or cancelled: a count reached while REVOKING frees nothing
        (R15).
        """
        attempt = self._attempts.of_slot(slot)
        if attempt is None or attempt.cancelled_at is not None:
            return None
        return self._attempts.awaiting(attempt.id)

    def _on_arrival_failed(self, event: ArrivalFailed) -> None:
        """Every write was counted, so nothing comes any more, but a GPU does not have the pages."""
        attempt = self._counting(event.slot)
        log.error("slot %d: %s", event.slot, event.error)
        if attempt is None:
            return
        self._attempts.settle(attempt)
        text = f"the cache from {attempt.peer.name} did not come into the device: {event.error}"
        self._node.fail_request(attempt.active, RequestError(500, text, code="prefill_failed"))

    def _on_overshoot(self, event: CounterOvershoot) -> None:
        """A write came twice, so that another one may be missing: the cache cannot be trusted."""
        attempt = self._attempts.of_slot(event.slot)
        log.error("slot %d: %d units, %d were expected", event.slot, event.seen, event.expected)
        if attempt is None:
            return
        reason = (
            f"protocol error: {event.seen} page-writes were counted where {event.expected} were "
            "expected"
        )
        self._cancellation.fence_overshot(attempt, reason)

    def _receive(self, peer_id: int, payload: bytes, now: float) -> None:
        try:
            message = messages.decode(payload)
        except MessageError as error:
            log.error("a message of peer %d was dropped: %s", peer_id, error)
            return
        if isinstance(message, messages.Telemetry):
            attempt = self._attempts.awaiting(message.request)
            self._reports.take(message, None if attempt is None else attempt.active)
            return
        if not isinstance(message, messages.Busy | messages.Failed | messages.CancelAck):
            log.error("%s is no message for a decode node", type(message).__name__)
            return
        attempt = self._attempts.awaiting(message.request)
        if attempt is None or attempt.peer.id != peer_id or self._cancellation.fencing(peer_id):
            return  # the answer to a resent CANCEL, or what a fence will end
        self._attempts.settle(attempt)
        if attempt.cancelled_at is not None:
            self._node.prefill_over(attempt.active)
        elif isinstance(message, messages.Busy):
            attempt.peer.busy_until = now + BUSY_SECONDS
            self._node.requeue(attempt.active)
        else:
            reason = message.reason if isinstance(message, messages.Failed) else "it was cancelled"
            self._node.fail_request(
                attempt.active,
                RequestError(
                    502,
                    f"the prefill at {attempt.peer.name} failed: {reason}",
                    code="prefill_failed",
                ),
            )

    # ---- ends ----------------------------------------------------------------------------------

    def release(self, active: ActiveRequest) -> None:
        """Give back slot and context buffer together with the pages."""
        self._attempts.release(active)

    def _late(self, attempt: Attempt) -> RequestError:
        waited = time.monotonic() - (attempt.active.sent_at or 0.0)
        return RequestError(
            504,
            f"the prefill at {attempt.peer.name} was not complete after {waited:.1f} s: "
            f"{self._attempts.arrived(attempt)}",
            code="prefill_timeout",
        )

    def state(self) -> dict[str, Any]:
        """Its part of /debug/state."""
        return {
            "peers": self.peers.state(),
            "awaiting": self._attempts.state(),
            "page_writes": self._page_writes,
            "fabric": self._fabric.state(),
        }
