"""The KV messenger of a prefill node: PREFILLs in, page writes and their ends out.

It checks what decode nodes ask, turns each step's chunks into native page plans before the step is
dispatched, and answers every request with exactly one terminal word (or its count of writes).
"""

import functools
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ffi_transport.engine import TransferEngine
from ffi_transport.errors import PeerLost, TransportError
from ffi_transport.types import (
    Event,
    MessageReceived,
    PageUnit,
    PeerConnected,
    PeerLostEvent,
    PlanWrite,
    TransferEnded,
    TriggerFault,
)
from jaxdisagg import messages
from jaxdisagg.cache import PagedCache
from jaxdisagg.fabric_events import RemoteCache
from jaxdisagg.messages import MessageError, NodeHello
from jaxdisagg.scheduler import PrefillStep
from jaxdisagg.transfer_plan import TransferPlan, plan

if TYPE_CHECKING:
    from jaxdisagg.prefill_node import PrefillNode, PrefillRequest

log = logging.getLogger(__name__)

KEPT_TOMBSTONES = 4096


@dataclass(frozen=True)
class DecodePeer:
    """A decode node that greeted and fits."""

    name: str
    hello: NodeHello
    remote: RemoteCache


class PrefillMessenger:
    """Used on the node's loop alone, but for `on_events`, which the event pump calls."""

    def __init__(self, engine: TransferEngine, hello: NodeHello, cache: PagedCache) -> None:
        self._engine = engine
        self._hello = hello
        self._cache = cache
        self._ordinals = {shard.rank: shard.ordinal for shard in cache.shards() if shard.layer == 0}
        self._peers: dict[int, DecodePeer] = {}
        self._refused: dict[str, str] = {}
        self._transfers: dict[int, PrefillRequest] = {}
        self._tombstones: OrderedDict[str, None] = OrderedDict()
        self._node: PrefillNode | None = None
        self._page_writes = 0

    def attach(self, node: "PrefillNode") -> None:
        """The node whose requests these are; before the first event."""
        self._node = node

    @property
    def node(self) -> "PrefillNode":
        """The attached node."""
        assert self._node is not None
        return self._node

    # ---- events ------------------------------------------------------------------------------

    def on_events(self, events: Sequence[Event]) -> None:
        """Hand the engine's events to the loop."""
        self.node.post(functools.partial(self._handle_all, events))

    def _handle_all(self, events: Sequence[Event]) -> None:
        for event in events:
            self._handle(event, time.monotonic())

    def _handle(self, event: Event, now: float) -> None:
        match event:
            case PeerConnected():
                self._greet(event)
            case PeerLostEvent():
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
                    self.node.transfer_ended(request, event.status, event.error, now)
            case TriggerFault():
                raise RuntimeError(
                    f"trigger fault {event.kind} at step {event.step} layer {event.layer} device "
                    f"{event.ordinal}: {event.detail}"
                )
            case _:
                log.warning("unexpected event on a prefill node: %s", event)

    def _greet(self, event: PeerConnected) -> None:
        try:
            theirs = messages.decode_hello(event.hello)
        except MessageError as error:
            self._refused[event.address] = str(error)
            log.error("refused the node at %s: %s", event.address, error)
            return
        problems = messages.compatibility(self._hello, theirs)
        if problems:
            self._refused[theirs.node] = "; ".join(problems)
            log.error("refused decode node %s: %s", theirs.node, "; ".join(problems))
            return
        self._refused.pop(theirs.node, None)
        self._peers[event.peer] = DecodePeer(theirs.node, theirs, RemoteCache(theirs))
        log.info("decode node %s connected", theirs.node)

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
        if message.request in self._tombstones:
            self.acknowledge_cancel(peer, message.request)
            return
        if self.node.knows(message.request):
            self.report_failure(peer, message.request, "refused", "the request id is in use")
            return
        known = self._peers.get(peer)
        if known is None:
            reason = "; ".join(self._refused.values()) or "it did not greet"
            self.report_failure(peer, message.request, "refused", f"the node was refused: {reason}")
            return
        problem = message.problem(known.hello) or self.node.never_fits(message)
        if problem is None:
            expected = self._plan(known, message.seed).expected_units(
                message.prompt_length, context_buffers=int(message.context is not None)
            )
            if message.expected != (expected,):
                problem = f"expected: {message.expected} there, {(expected,)} by {self._hello.node}"
        if problem is not None:
            self.report_failure(peer, message.request, "refused", problem)
            return
        busy = self.node.accept(message, peer, now)
        if busy is not None:
            self._send(peer, messages.Busy(message.request, busy))

    def _on_cancel(self, peer: int, request_id: str) -> None:
        if self.node.knows(request_id):
            self.node.cancel(request_id)
            return
        self._tombstones[request_id] = None
        while len(self._tombstones) > KEPT_TOMBSTONES:
            self._tombstones.popitem(last=False)
        self.acknowledge_cancel(peer, request_id)

    # ---- transfers ---------------------------------------------------------------------------

    def _plan(self, peer: DecodePeer, seed: int) -> TransferPlan:
        return plan(self._hello.layout, peer.hello.layout, seed)

    def open_transfer(self, request: "PrefillRequest") -> int | None:
        """All the writes of one request; None if its decode node is gone."""
        try:
            transfer = self._engine.open_transfer(request.peer, request.message.slot)
        except PeerLost as error:
            log.debug("request %s: %s", request.id, error)
            return None
        self._transfers[transfer] = request
        return transfer

    def cancel_transfer(self, transfer: int) -> None:
        """Post nothing more; the transfer ends when what was posted has drained."""
        self._engine.cancel_transfer(transfer)

    def announce_step(
        self, number: int, step: PrefillStep, requests: Sequence["PrefillRequest"]
    ) -> None:
        """File the plan of a step that is about to be dispatched (M7), and seal finished prompts.

        Only pages that the chunk completes are sent, a partly filled last one with the last chunk,
        so every byte is sent once.
        """
        writes: list[PlanWrite] = []
        for chunk, request in zip(step.chunks, requests, strict=True):
            peer = self._peers.get(request.peer)
            if peer is None or request.transfer is None:
                continue
            transfer_plan = self._plan(peer, request.message.seed)
            pages = transfer_plan.chunk_pages(chunk.begin, chunk.end, chunk.job.total)
            if pages:
                writes += self._page_writes_of(transfer_plan, peer, request, pages)
            if chunk.last and request.message.context is not None:
                writes.append(self._context_write(peer, request))
        layers = len(self._cache.layers) + 1
        self._engine.add_plan(number, self._ordinals.values(), layers, writes)
        for chunk, request in zip(step.chunks, requests, strict=True):
            if chunk.last and request.transfer is not None:
                self._engine.seal(request.transfer)

    def _page_writes_of(
        self, transfer_plan: TransferPlan, peer: DecodePeer, request: "PrefillRequest", pages: range
    ) -> list[PlanWrite]:
        assert request.lease is not None
        assert request.transfer is not None
        message = request.message
        source, destination = transfer_plan.source, transfer_plan.destination
        source_pages = request.lease.pages[pages.start : pages.stop]
        destination_pages = message.page_ids()[pages.start : pages.stop]
        return [
            PlanWrite(
                transfer=request.transfer,
                ordinal=self._ordinals[source.ordinal(request.rank, unit.source_rank)],
                first_layer=0,
                layers=source.layers,
                source_pages=source_pages,
                destination_pages=destination_pages,
                unit=PageUnit(
                    source_page_bytes=source.shard_bytes,
                    source_offset=unit.source_offset,
                    destination_page_bytes=destination.shard_bytes,
                    destination_offset=unit.destination_offset,
                    length=unit.length,
                ),
                remotes=peer.remote.layers(message.dp_rank, unit.destination_rank),
            )
            for unit in transfer_plan.units
        ]

    def _context_write(self, peer: DecodePeer, request: "PrefillRequest") -> PlanWrite:
        """The hidden state of the last prefilled token: one row, one unit, after the last layer."""
        assert request.transfer is not None
        assert request.message.context is not None
        region, buffers = peer.remote.context(request.message.dp_rank)
        return PlanWrite(
            transfer=request.transfer,
            ordinal=self._ordinals[self._hello.layout.ordinal(request.rank, 0)],
            first_layer=len(self._cache.layers),
            layers=1,
            source_pages=np.array([request.context], np.uint32),
            destination_pages=np.array([request.message.context], np.uint32),
            unit=PageUnit(
                source_page_bytes=self._cache.context_bytes,
                source_offset=0,
                destination_page_bytes=buffers.buffer_bytes,
                destination_offset=0,
                length=buffers.buffer_bytes,
            ),
            remotes=(region,),
        )

    # ---- answers -----------------------------------------------------------------------------

    def report(self, request: "PrefillRequest", now: float) -> None:
        """Where the time of a finished request went; the decode node started by its count."""
        started = request.started or now
        computed = request.computed or now
        units = sum(request.message.expected)
        pages = len(request.message.page_ids())
        page_bytes = self._hello.layout.shard_bytes * self._hello.layout.tp
        self._send(
            request.peer,
            messages.Telemetry(
                request.id,
                queue_s=started - request.arrived,
                prefill_s=computed - started,
                transfer_s=max(now - computed, 0.0),
                chunks=request.chunks,
                pages=pages,
                units=units,
                bytes=pages * page_bytes * self._hello.layout.layers + self._cache.context_bytes,
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
            self._engine.send(peer, messages.encode(message))
        except TransportError as error:
            log.debug("%s to peer %d was not sent: %s", type(message).__name__, peer, error)

    def close(self, reason: str) -> None:
        """Fence every peer: nothing of this node's memory is read for them any more."""
        for peer in list(self._peers):
            try:
                self._engine.fence(peer)
                self._engine.disconnect(peer)
            except TransportError as error:
                log.debug("peer %d at close (%s): %s", peer, reason, error)

    def state(self) -> dict[str, Any]:
        """Its part of /debug/state."""
        return {
            "peers": {str(k): p.name for k, p in list(self._peers.items())},
            "refused": dict(self._refused),
            "page_writes": self._page_writes,
            "fabric": {"provider": self._engine.provider, **self._engine.counters()},
        }
