"""The KV messenger of a prefill node: PREFILLs in, page writes and their ends out.

It checks what decode nodes ask, turns each step's chunks into native page plans before the step is
dispatched, and answers every request with exactly one terminal word (or its count of writes).
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ffi_transport.errors import PeerLost, TransportError
from ffi_transport.events import (
    Event,
    MessageReceived,
    PeerConnected,
    PeerLostEvent,
    TransferEnded,
    TriggerFault,
)
from jaxdisagg import messages
from jaxdisagg.group.prefill_fabric import PrefillFabric
from jaxdisagg.hello import MemberHello, NodeHello, compatibility
from jaxdisagg.messages import MessageError
from jaxdisagg.planned_request import PlannedRequest
from jaxdisagg.process_shares import expected_units
from jaxdisagg.scheduler import PrefillStep
from jaxdisagg.transfer_plan import plan

if TYPE_CHECKING:
    from jaxdisagg.prefill_node import PrefillNode, PrefillRequest

log = logging.getLogger(__name__)

KEPT_TOMBSTONES = 4096


@dataclass(frozen=True)
class DecodePeer:
    """A decode node that greeted and fits."""

    name: str
    hello: NodeHello


class PrefillMessenger:
    """Used on the node's loop alone."""

    def __init__(self, fabric: PrefillFabric, hello: NodeHello, vocab_size: int) -> None:
        self._fabric = fabric
        self._vocab_size = vocab_size
        self._hello = hello
        self._peers: dict[int, DecodePeer] = {}
        self._refused: dict[int, str] = {}
        self._transfers: dict[int, PrefillRequest] = {}
        self._tombstones: OrderedDict[tuple[int, str], None] = OrderedDict()
        self._node: PrefillNode | None = None
        self._page_writes = 0

    def attach(self, node: "PrefillNode") -> None:
        """The node whose requests these are; before the first event."""
        self._node = node
        self._fabric.attach(node.post, self._handle)

    @property
    def node(self) -> "PrefillNode":
        """The attached node."""
        assert self._node is not None
        return self._node

    # ---- events ------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        now = time.monotonic()
        match event:
            case PeerConnected():
                self._greet(event)
            case PeerLostEvent():
                self._refused.pop(event.peer, None)
                peer = self._peers.pop(event.peer, None)
                if peer is not None:
                    log.warning("decode node %s was lost: %s", peer.name, event.reason)
                self.node.drop_peer(event.peer, event.reason)
            case MessageReceived():
                self._receive(event.peer, event.payload, now)
            case TransferEnded():
                request = self._transfers.pop(event.transfer, None)
                if request is not None:
                    self._page_writes += event.units_done
                    request.bytes = event.bytes
                    self.node.transfer_ended(request, event.status, event.error, now)
            case TriggerFault():
                raise RuntimeError(
                    f"trigger fault {event.kind} at step {event.step} layer {event.layer} device "
                    f"{event.ordinal}: {event.detail}"
                )
            case _:
                log.warning("unexpected event on a prefill node: %s", event)

    def _greet(self, event: PeerConnected) -> None:
        name = event.address
        try:
            theirs = messages.decode_greeting(event.hello)
            if isinstance(theirs, MemberHello):
                self._fabric.member(0, event.peer, theirs.node, theirs.epoch, theirs.process)
                return
            name = theirs.node
            problems = compatibility(self._hello, theirs)
            if not problems:
                self._fabric.know(event.peer, theirs, event.hello)
                self._peers[event.peer] = DecodePeer(name, theirs)
                log.info("decode node %s connected", name)
                return
        except ValueError as error:
            problems = [str(error)]
        self._refused[event.peer] = f"{name}: {'; '.join(problems)}"
        log.error("refused decode node %s: %s", name, "; ".join(problems))

    def _receive(self, peer: int, payload: bytes, now: float) -> None:
        try:
            message = messages.decode(payload)
        except MessageError as error:
            log.error("a message of peer %d was dropped: %s", peer, error)
            return
        match message:
            case messages.Prefill():
                self._on_prefill(peer, message, now)
            case messages.Cancel():
                self._on_cancel(peer, message.request)
            case _:
                log.error("%s is no message for a prefill node", type(message).__name__)

    def _on_prefill(self, peer: int, message: messages.Prefill, now: float) -> None:
        if (peer, message.request) in self._tombstones:
            self.acknowledge_cancel(peer, message.request)
            return
        if self.node.owner(message.request) is not None:
            # Any answer would be a terminal word about a request whose writes go on (R15).
            log.error("PREFILL %s came twice; the second is ignored", message.request)
            return
        problem = self._problem(peer, message)
        if problem is not None:
            self.report_failure(peer, message.request, "refused", problem)
            return
        busy = self._fabric.missing(peer) or self.node.accept(message, peer, now)
        if busy is not None:
            self._send(peer, messages.Busy(message.request, busy))

    def _problem(self, peer: int, message: messages.Prefill) -> str | None:
        """What is wrong with a PREFILL, or None: nothing of it may fail later, within a step."""
        known = self._peers.get(peer)
        if known is None:
            return f"the node was refused: {self._refused.get(peer, 'it did not greet')}"
        problem = message.problem(known.hello) or self.node.never_fits(message)
        if problem is not None:
            return problem
        highest = int(messages.unpack(message.tokens).max())
        if highest >= self._vocab_size:
            return f"tokens: {highest}, the model has token ids below {self._vocab_size}"
        expected = self._expected(known.hello, message)
        if message.expected != expected:
            return f"expected: {message.expected} there, {expected} by {self._hello.node}"
        return None

    def _expected(self, theirs: NodeHello, message: messages.Prefill) -> tuple[int, ...]:
        """How many units each process of the decode node will count (R3)."""
        moves = plan(self._hello.layout, theirs.layout, message.seed)
        return expected_units(
            moves,
            message.prompt_length,
            message.dp_rank,
            theirs.process_count,
            context=message.context is not None,
        )

    def _on_cancel(self, peer: int, request_id: str) -> None:
        if self.node.owner(request_id) == peer:
            self.node.cancel(request_id)
            return
        self._tombstones[peer, request_id] = None
        while len(self._tombstones) > KEPT_TOMBSTONES:
            self._tombstones.popitem(last=False)
        self.acknowledge_cancel(peer, request_id)

    # ---- transfers ---------------------------------------------------------------------------

    def open_transfer(self, request: "PrefillRequest") -> int | None:
        """All the writes of one request; None if its decode node is gone."""
        try:
            transfer = self._fabric.open_transfer(
                request.peer, request.message.slot, _planned(request)
            )
        except PeerLost as error:
            log.debug("request %s: %s", request.id, error)
            return None
        self._transfers[transfer] = request
        return transfer

    def fence(self, peer: int, reason: str) -> None:
        """Close a peer's links in all processes: its transfers end, and then it counts as lost."""
        log.warning("fencing peer %d: %s", peer, reason)
        self._fabric.fence(peer, reason)

    def cancel_transfer(self, transfer: int) -> None:
        """Post nothing more; the transfer ends when what was posted has drained."""
        self._fabric.cancel_transfer(transfer)

    def announce_step(
        self, number: int, step: PrefillStep, requests: Sequence["PrefillRequest"]
    ) -> None:
        """File the plan of a step that is about to be dispatched (M7), and seal finished prompts.

        Only pages that the chunk completes are sent, a partly filled last one with the last chunk,
        so every byte is sent once.
        """
        chunks = [
            (request.transfer, chunk.begin, chunk.end)
            for chunk, request in zip(step.chunks, requests, strict=True)
            if request.transfer is not None
        ]
        try:
            self._fabric.file_step(number, chunks)
        except (ValueError, TransportError) as error:
            # The step runs without a plan; the requests in it fail, the node does not.
            log.exception("no plan for step %d", number)
            for request in requests:
                self.node.fail_request(request, "plan", str(error))

    # ---- answers -----------------------------------------------------------------------------

    def report(self, request: "PrefillRequest", now: float) -> None:
        """Where the time of a finished request went; the decode node started by its count."""
        started = request.started or now
        self._send(
            request.peer,
            messages.Telemetry(
                request.id,
                queue_s=started - request.arrived,
                prefill_s=(request.computed or now) - started,
                bytes=request.bytes,
            ),
        )

    def acknowledge_cancel(self, peer: int, request_id: str) -> None:
        """No write of this request will come any more."""
        self._send(peer, messages.CancelAck(request_id))

    def report_failure(self, peer: int, request_id: str, code: str, reason: str) -> None:
        """The request failed here and its writes are drained."""
        log.warning("request %s failed (%s): %s", request_id, code, reason)
        self._send(peer, messages.Failed(request_id, code, reason))

    def _send(self, peer: int, message: messages.Message) -> None:
        try:
            self._fabric.send(peer, messages.encode(message))
        except TransportError as error:
            log.debug("%s to peer %d was not sent: %s", type(message).__name__, peer, error)

    def close(self, reason: str) -> None:
        """Fence every peer: nothing of this node's memory is read for them any more."""
        self._fabric.close(reason)

    def tick(self, now: float) -> None:
        """What is due. Raises RuntimeError if a process did not fence a peer in time."""
        self._fabric.tick(now)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do by itself."""
        return self._fabric.next_deadline()

    def state(self) -> dict[str, Any]:
        """Its part of /debug/state."""
        return {
            "peers": {str(k): p.name for k, p in list(self._peers.items())},
            "refused": [*self._refused.values(), *self._fabric.turned_away],
            "page_writes": self._page_writes,
            "fabric": self._fabric.state(),
        }


def _planned(request: "PrefillRequest") -> PlannedRequest:
    """What the writes of a request with leased pages follow from."""
    assert request.lease is not None
    message = request.message
    return PlannedRequest(
        rank=request.rank,
        dp_rank=message.dp_rank,
        seed=message.seed,
        total=message.prompt_length - 1,
        source_pages=messages.pack(request.lease.pages),
        destination_pages=message.pages,
        context_row=request.context,
        context=message.context,
    )
