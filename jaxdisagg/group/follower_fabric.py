"""The fabric of a process that another one leads: it does what it is told, and tells what happens.

Nothing is decided here. `handle` is for the channel's reader thread, `file` for the step thread,
before the step whose plan it is (R21); events come on the pump's thread.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from ffi_transport.engine import TransferEngine
from ffi_transport.errors import TransportError
from ffi_transport.events import (
    ArrivalFailed,
    CounterOvershoot,
    CounterReached,
    Event,
    PeerConnected,
    PeerLostEvent,
    TransferEnded,
    TriggerFault,
)
from ffi_transport.types import PlanWrite
from jaxdisagg.cache import PagedCache
from jaxdisagg.cache_layout import CacheLayout
from jaxdisagg.config import NodeConfig
from jaxdisagg.event_pump import EventPump
from jaxdisagg.group import fabric_messages as words
from jaxdisagg.group.connecting import fence_links, leave_links, link_all
from jaxdisagg.group.node_transfer import part_ended
from jaxdisagg.hello import MemberHello
from jaxdisagg.messages import MessageError, decode_greeting, decode_hello, encode
from jaxdisagg.model_fit import cache_layout
from jaxdisagg.planned_request import PlannedRequest
from jaxdisagg.registration import RemoteCache, register_cache
from jaxdisagg.runner import ModelRunner
from jaxdisagg.step_plans import StepPlanner

log = logging.getLogger(__name__)

TALLY_SECONDS = 0.25


class _Part:
    """This process's part of a transfer: native transfers by process of the decode node."""

    def __init__(self, peer: int, request: PlannedRequest) -> None:
        self.peer = peer
        self.request = request
        self.native: dict[int, int] = {}


class FollowerFabric:
    """Process `process` of a node, whose whole cache has `layout`; of `cache` it holds its shards.

    `send` takes words for the leader and `fail` a reason why the process must end; both are for any
    thread. It registers what it holds and tells the leader at once.
    """

    def __init__(
        self,
        engine: TransferEngine,
        cache: PagedCache,
        layout: CacheLayout,
        *,
        process: int,
        source: bool,
        send: Callable[[words.FollowerWord], None],
        fail: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._process = process
        self._planner = StepPlanner(layout, cache) if source else None
        self._send = send
        self._fail = fail
        self._lock = threading.Lock()
        self._armed: set[int] = set()
        self._remotes: dict[int, RemoteCache] = {}
        self._parts: dict[int, _Part] = {}
        self._native: dict[int, tuple[int, int]] = {}
        self._tally = words.Tally({}, {}, [])
        self._next_tally = 0.0
        self._pump = EventPump(engine, self._on_events, fail, "member-events", self._tell_tally)
        memory = register_cache(engine, cache, layout, source=source)
        self._landings = memory.landings
        send(words.Registered(engine.control_address, memory.regions, memory.contexts, memory.mode))
        self._pump.start()

    def close(self) -> None:
        """End the engine, and with it every link and every write."""
        self._pump.stop()
        self._engine.close()

    # ---- what the leader says ------------------------------------------------------------------

    def handle(self, word: words.LeaderWord) -> None:
        """Do what the leader says, at once."""
        match word:
            case words.Introduce():
                hello = MemberHello(word.node, word.epoch, self._process)
                self._engine.set_hello(encode(hello))
            # These two wait for others; counters and cancellations do not.
            case words.LinkTo():
                threading.Thread(target=self._link, args=(word,), name="link", daemon=True).start()
            case words.Unlink():
                leaving = self._engine, word.links
                threading.Thread(
                    target=leave_links, args=leaving, name="leave", daemon=True
                ).start()
            case words.Fence():
                fence_links(self._engine, word.links)
            case words.Arm():
                self._arm(word)
            case words.Disarm():
                self._disarm(word.slot)
            case words.Know():
                self._remotes[word.peer] = RemoteCache(decode_hello(word.hello))
            case words.Forget():
                self._remotes.pop(word.peer, None)
            case words.Open():
                self._open(word)
            case words.CancelPart():
                with self._lock:
                    part = self._parts.get(word.transfer)
                    native = list(part.native.values()) if part is not None else []
                for transfer in native:
                    self._engine.cancel_transfer(transfer)
            case words.FileStep():
                raise ValueError("FileStep is ordered: it is for `file`")

    def _link(self, word: words.LinkTo) -> None:
        links, problems = link_all(
            self._engine, word.node, word.epoch, dict(enumerate(word.addresses)), word.timeout_s
        )
        processes = range(len(word.addresses))
        self._send(
            words.Linked(
                word.number,
                tuple(links.get(process, -1) for process in processes),
                tuple(problems.get(process, "") for process in processes),
            )
        )

    def _arm(self, word: words.Arm) -> None:
        problem = ""
        with self._lock:
            self._armed.add(word.slot)
        try:
            landings = self._landings.of(word.destination) if word.destination else ()
            self._engine.arm(word.slot, word.expected, landings=landings)
        except (ValueError, TransportError) as error:
            problem = str(error)
        self._send(words.Armed(word.slot, problem))

    def _disarm(self, slot: int) -> None:
        """On the reader thread: no step that uses the slot's pages is taken before this is over."""
        with self._lock:
            self._armed.discard(slot)
        try:
            self._engine.disarm(slot)
        except TransportError as error:  # copies into a device have hung
            self._fail(str(error))

    def _open(self, word: words.Open) -> None:
        part = _Part(word.peer, word.request)
        failed: list[tuple[int, str]] = []
        with self._lock:
            for process, link in word.links.items():
                try:
                    native = self._engine.open_transfer(link, word.slot)
                except TransportError as error:
                    failed.append((process, str(error)))
                    continue
                part.native[process] = native
                self._native[native] = (word.transfer, process)
            if part.native:
                self._parts[word.transfer] = part
        for process, error in failed:
            self._send(words.PartEnded(word.transfer, process, "failed", error, 0, 0, 0))

    def file(self, word: words.FileStep) -> None:
        """File what a step's triggers post from here; before the step is dispatched."""
        assert self._planner is not None
        writes: list[PlanWrite] = []
        sealed: list[int] = []
        with self._lock:
            parts = {t: (p, dict(p.native)) for t, p in self._parts.items()}
        try:
            for transfer, begin, end in word.chunks:
                part, native = parts.get(transfer, (None, {}))
                remote = self._remotes.get(part.peer) if part is not None else None
                if part is None or remote is None:
                    continue  # nothing goes from here, or it has ended
                writes += self._planner.writes_of(part.request, begin, end, remote, native)
                if end == part.request.total:
                    sealed += native.values()
            self._engine.add_plan(word.number, self._planner.ordinals, self._planner.layers, writes)
            for native_id in sealed:
                self._engine.seal(native_id)
        except (ValueError, TransportError) as error:
            log.exception("no plan for step %d", word.number)
            transfers = tuple(transfer for transfer, _, _ in word.chunks)
            self._send(words.PlanRefused(transfers, str(error)))

    # ---- what happens --------------------------------------------------------------------------

    def _on_events(self, events: Sequence[Event]) -> None:
        for event in events:
            self._on_event(event)

    def _on_event(self, event: Event) -> None:
        match event:
            case PeerConnected():
                self._greeted(event)
            case PeerLostEvent():
                seen = self._seen()
                self._send(words.LinkLost(event.peer, event.reason, event.elapsed_s, seen))
            case CounterReached():
                self._send(words.Reached(event.slot, event.count))
            case ArrivalFailed():
                self._send(words.NotArrived(event.slot, event.error))
            case CounterOvershoot():
                self._send(words.Overshot(event.slot, event.expected, event.seen))
            case TransferEnded():
                self._part_ended(event)
            case TriggerFault():
                self._send(
                    words.Fault(event.kind, event.step, event.layer, event.ordinal, event.detail)
                )
            case _:
                log.warning("a member takes no messages: %s", type(event).__name__)

    def _greeted(self, event: PeerConnected) -> None:
        try:
            hello = decode_greeting(event.hello)
        except MessageError as error:
            log.error("refused a peer at %s: %s", event.address, error)
            fence_links(self._engine, [event.peer])
            return
        if self._planner is None:
            log.warning("a node at %s greeted this decode node; it is not served", event.address)
            return
        number = hello.process if isinstance(hello, MemberHello) else 0
        self._send(words.Greeted(event.peer, hello.node, hello.epoch, number))

    def _part_ended(self, event: TransferEnded) -> None:
        with self._lock:
            found = self._native.pop(event.transfer, None)
            if found is None:
                return
            transfer, process = found
            part = self._parts[transfer]
            del part.native[process]
            if not part.native:
                del self._parts[transfer]
        self._send(part_ended(event, transfer, process))

    def _seen(self) -> dict[int, int]:
        with self._lock:
            armed = list(self._armed)
        return {slot: self._engine.seen(slot) for slot in armed}

    def _tell_tally(self) -> None:
        """For /debug/state and for who waits: what changed, every quarter of a second at most."""
        now = time.monotonic()
        if now < self._next_tally:
            return
        tally = words.Tally(self._seen(), self._engine.counters(), self._engine.domain_counters())
        if tally != self._tally:
            self._next_tally = now + TALLY_SECONDS
            self._tally = tally
            self._send(tally)


def open_follower_fabric(
    node: NodeConfig,
    runner: ModelRunner,
    engine: TransferEngine,
    send: Callable[[words.FollowerWord], None],
    fail: Callable[[str], None],
) -> FollowerFabric:
    """The fabric of a follower whose runner has warmed up."""
    return FollowerFabric(
        engine,
        runner.cache,
        cache_layout(node, runner.cache.spec),
        process=node.process,
        source=node.role == "prefill",
        send=send,
        fail=fail,
    )
