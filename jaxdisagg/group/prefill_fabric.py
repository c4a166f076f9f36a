"""A prefill node's fabric: links from decode nodes, and transfers that all its processes write.

A transfer has a part for each (process here, process there) between which a request has bytes to
move; it has ended when all parts have, drained or fenced, and only then is anyone told (R15).
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ffi_transport.engine import TransferEngine
from ffi_transport.errors import PeerLost
from ffi_transport.events import Event, TransferEnded
from ffi_transport.types import PlanWrite
from jaxdisagg.cache_layout import CacheLayout
from jaxdisagg.group.fabric_messages import (
    CancelPart,
    Fault,
    FileStep,
    FollowerWord,
    Forget,
    Greeted,
    Know,
    LinkLost,
    Open,
    PartEnded,
    PlanRefused,
    Tally,
)
from jaxdisagg.group.node_fabric import NodeFabric, Pair, Peer, Place
from jaxdisagg.group.node_transfer import NodeTransfer, part_ended
from jaxdisagg.group.processes import Group
from jaxdisagg.hello import NodeHello
from jaxdisagg.planned_request import PlannedRequest
from jaxdisagg.process_shares import process_of
from jaxdisagg.registration import RemoteCache
from jaxdisagg.step_plans import StepPlanner
from jaxdisagg.transfer_plan import plan

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Stranger:
    """A link whose node is not known yet: its leader's HELLO may be on its way."""

    key: tuple[str, int]
    process: int
    deadline: float


class PrefillFabric(NodeFabric):
    """Used on the node's loop. `layout` is the node's own.

    A member of a node that nobody has heard of within `stranger_s` seconds is turned away.
    """

    def __init__(
        self,
        engine: TransferEngine,
        group: Group,
        planner: StepPlanner,
        layout: CacheLayout,
        *,
        name: str,
        modes: Sequence[str],
        fence_s: float = 10.0,
        stranger_s: float = 10.0,
    ) -> None:
        self._planner = planner
        self._layout = layout
        self._stranger_s = stranger_s
        self._remotes: dict[int, RemoteCache] = {}
        self._strangers: dict[Place, _Stranger] = {}
        self._transfers: dict[int, NodeTransfer] = {}
        # Of each native transfer here: whose part it is, and to which process there.
        self._parts: dict[int, tuple[int, int]] = {}
        self._opened = 0
        self.turned_away: list[str] = []
        super().__init__(engine, group, name=name, modes=modes, fence_s=fence_s)

    def hears(self) -> tuple[type[Any], ...]:
        """The kinds of messages that a prefill node's followers send."""
        return (LinkLost, Tally, Fault, Greeted, PartEnded, PlanRefused)

    # ---- links ---------------------------------------------------------------------------------

    def know(self, peer_id: int, hello: NodeHello, blob: bytes) -> None:
        """A decode node that fits, by the link of its leader; `blob` is its HELLO as it came.

        Raises ValueError, naming the field, if its memory is not described well.
        """
        remote = RemoteCache(hello)
        peer = Peer(peer_id, hello.node, hello.epoch, hello.process_count)
        self._peers[peer_id] = peer
        self._remotes[peer_id] = remote
        self.own(peer, (0, 0), peer_id)
        self.group.broadcast(Know(peer_id, blob))
        for (process, link), stranger in list(self._strangers.items()):
            if stranger.key == (hello.node, hello.epoch):
                del self._strangers[process, link]
                self._join(peer, process, link, stranger.process)

    def member(self, process: int, link: int, node: str, epoch: int, number: int) -> None:
        """Process `number` of a node greeted one of this node's processes."""
        known = [p for p in self._peers.values() if (p.name, p.epoch) == (node, epoch)]
        for peer in reversed(known):
            if peer.ending is None and (process, number) not in peer.links:
                self._join(peer, process, link, number)
                return
        if any(peer.ending is None for peer in known):
            self._turn_away(process, link, f"process {number} of {node} greeted twice")
            return
        deadline = time.monotonic() + self._stranger_s
        self._strangers[process, link] = _Stranger((node, epoch), number, deadline)

    def _join(self, peer: Peer, process: int, link: int, number: int) -> None:
        if number >= peer.processes:
            text = f"process {number} of {peer.name}, which announced {peer.processes} processes"
            self._turn_away(process, link, text)
        elif (process, number) in peer.links:
            self._turn_away(process, link, f"process {number} of {peer.name} greeted twice")
        else:
            self.own(peer, (process, number), link)

    def _turn_away(self, process: int, link: int, why: str) -> None:
        where = f"process {process}" if self.group.size > 1 else self.name
        text = f"{why}: turned away by {where}"
        log.error("%s", text)
        self.turned_away = [*self.turned_away[-31:], text]
        self.close_links(process, [link])

    def missing(self, peer_id: int) -> str | None:
        """Which processes of a known node are not linked to which here; None if all are."""
        peer = self._peers[peer_id]
        absent = peer.absent(self.group.size)
        if not absent:
            peer.whole = True
            return None
        return "; ".join(
            f"process {here} of {self.name} has not been greeted by process {there} of {peer.name}"
            for here, there in absent
        )

    def link_lost(self, process: int, link: int, reason: str, elapsed_s: float) -> list[Event]:
        """Also of a member that waited for its leader."""
        if self._strangers.pop((process, link), None) is not None:
            return []
        return super().link_lost(process, link, reason, elapsed_s)

    def gone(self, peer: Peer) -> None:
        """Nothing is written to it any more."""
        del self._remotes[peer.id]
        self.group.broadcast(Forget(peer.id))

    # ---- transfers -----------------------------------------------------------------------------

    def open_transfer(self, peer_id: int, slot: int, request: PlannedRequest) -> int:
        """Begin the writes of a request, in all processes. PeerLost if its node is gone."""
        peer = self._peers.get(peer_id)
        if peer is None or peer.ending is not None:
            raise PeerLost(f"peer {peer_id} is lost", peer=peer_id)
        pairs = self._pairs(request, self._remotes[peer_id].hello)
        self._opened += 1
        transfer = NodeTransfer(self._opened, peer, request, pairs)
        for process, there in sorted(pairs):
            if process == 0:
                native = self.engine.open_transfer(peer.links[0, there], slot)
                transfer.native[there] = native
                self._parts[native] = (transfer.id, there)
        self._transfers[transfer.id] = transfer
        for process in sorted({here for here, _ in pairs} - {0}):
            links = {there: peer.links[process, there] for here, there in pairs if here == process}
            self.group.send(process, Open(transfer.id, peer_id, slot, links, request))
        return transfer.id

    def _pairs(self, request: PlannedRequest, theirs: NodeHello) -> set[Pair]:
        """Between which processes a request has bytes to move."""
        moves = plan(self._layout, theirs.layout, request.seed)
        ways = {(unit.source_rank, unit.destination_rank) for unit in moves.units}
        if request.context is not None:
            ways |= {(origin, rank) for rank, origin in enumerate(moves.context_sources)}
        ours = self._layout
        return {
            (
                process_of(ours.ordinal(request.rank, source), ours.devices, self.group.size),
                process_of(
                    theirs.layout.ordinal(request.dp_rank, rank),
                    theirs.layout.devices,
                    theirs.process_count,
                ),
            )
            for source, rank in ways
        }

    def cancel_transfer(self, transfer_id: int) -> None:
        """Post nothing more in any process; TransferEnded follows when all have drained."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.stopped:
            return
        transfer.stopped = True
        for process in sorted({process for process, _ in transfer.open}):
            if process:
                self.group.send(process, CancelPart(transfer_id))
        for there, native in transfer.native.items():
            if (0, there) in transfer.open:
                self.engine.cancel_transfer(native)

    def file_step(self, number: int, chunks: Sequence[tuple[int, int, int]]) -> None:
        """File what a step's triggers post, in every process, before the step is dispatched (R21).

        `chunks` are (transfer, begin row, end row); the one that ends at a request's last row seals
        its transfer. Raises ValueError or TransportError if the leader's part is refused; what a
        follower's engine refuses ends those transfers as failed.
        """
        self.group.broadcast(FileStep(number, tuple(chunks)))
        writes: list[PlanWrite] = []
        sealed: list[int] = []
        for transfer_id, begin, end in chunks:
            transfer = self._transfers.get(transfer_id)
            remote = self._remotes.get(transfer.peer.id) if transfer else None
            if transfer is None or remote is None:
                continue
            request = transfer.request
            writes += self._planner.writes_of(request, begin, end, remote, transfer.native)
            if end == request.total:
                sealed += transfer.native.values()
        self.engine.add_plan(number, self._planner.ordinals, self._planner.layers, writes)
        for native in sealed:
            self.engine.seal(native)

    # ---- events --------------------------------------------------------------------------------

    def merge(self, event: Event) -> Iterable[Event]:
        """The leader's own transfers are parts of the node's."""
        if not isinstance(event, TransferEnded):
            return [event]
        part = self._parts.pop(event.transfer, None)
        if part is None:
            return []
        transfer_id, there = part
        ended = part_ended(event, transfer_id, there)
        return self._part_ended(0, ended)

    def hear(self, process: int, word: FollowerWord) -> Iterable[Event]:
        """What followers say of their links and their parts."""
        if isinstance(word, Greeted):
            self.member(process, word.link, word.node, word.epoch, word.process)
        elif isinstance(word, PartEnded):
            return self._part_ended(process, word)
        elif isinstance(word, PlanRefused):
            for transfer_id in word.transfers:
                transfer = self._transfers.get(transfer_id)
                if transfer is not None:
                    transfer.worsen("failed", f"process {process}: {word.reason}")
                    self.cancel_transfer(transfer_id)
        return []

    def note(self, process: int, seen: Mapping[int, int]) -> None:
        """Nothing is counted on a prefill node."""

    def _part_ended(self, process: int, part: PartEnded) -> list[Event]:
        transfer = self._transfers.get(part.transfer)
        if transfer is None or not transfer.end(process, part):
            return []
        if transfer.open:
            if part.status != "completed":
                self.cancel_transfer(transfer.id)  # the request is over: drain the rest
            return []
        del self._transfers[transfer.id]
        return [transfer.ended()]

    # ---- time ----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Also turn away those whose node nobody has heard of."""
        super().tick(now)
        for (process, link), stranger in list(self._strangers.items()):
            if now >= stranger.deadline:
                del self._strangers[process, link]
                text = f"process {stranger.process} of {stranger.key[0]}, a node that is not known"
                self._turn_away(process, link, text)

    def next_deadline(self) -> float | None:
        """The first of a fence's and of a stranger's."""
        first = super().next_deadline()
        times = [stranger.deadline for stranger in self._strangers.values()]
        return min([*times, *([] if first is None else [first])], default=None)
