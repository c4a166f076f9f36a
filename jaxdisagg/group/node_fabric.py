"""Other nodes as one node sees them from all of its processes; what both roles need of that.

The messengers speak of *peers*, which are nodes. Between two nodes lies a link from every process
of one to every process of the other, and each link belongs to the transfer engine of one process.
The leader keeps the table of them: a peer is lost when any of its links is, and it is gone once all
of them are closed, in every process; only then does the messenger hear of it (R13, R15).
A node of one process is a group of one: it has nobody to ask, and waits for nobody.
"""

import functools
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ffi_transport.engine import TransferEngine
from ffi_transport.events import Event, MessageReceived, PeerConnected, PeerLostEvent, TriggerFault
from jaxdisagg.group.connecting import fence_links
from jaxdisagg.group.fabric_messages import (
    Fault,
    Fence,
    FollowerWord,
    Introduce,
    LinkLost,
    Tally,
)
from jaxdisagg.group.processes import Group
from jaxdisagg.hello import NodeHello
from jaxdisagg.messages import encode

log = logging.getLogger(__name__)

KEPT_LOSSES = 1024

Pair = tuple[int, int]
"""A process of this node and one of a peer."""

Place = tuple[int, int]
"""A process of this node and one of its engine's peers: where a link is."""


@dataclass(eq=False)
class Peer:
    """Another node. `id` is the leader's link to its leader.

    `links` holds the link of each (own process, process of the peer). When `ending` says why, no
    new work is given to it, and `deadline` (of `time.monotonic`) is when its links must be closed.
    """

    id: int
    name: str
    epoch: int
    processes: int
    links: dict[Pair, int] = field(default_factory=dict)
    whole: bool = False
    ending: str | None = None
    deadline: float = float("inf")

    def absent(self, size: int) -> list[Pair]:
        """The pairs of processes, of `size` here, that have no link."""
        pairs = [(p, q) for p in range(size) for q in range(self.processes)]
        return [pair for pair in pairs if pair not in self.links]


class NodeFabric(ABC):
    """The transfer engines of a node's processes as one. On the node's loop, where not said.

    `fence_s` is how long the processes may take to close a peer's links: if one does not, no page
    is safe, and the node fails. `modes` says how the memory of each process is reached.
    """

    def __init__(
        self,
        engine: TransferEngine,
        group: Group,
        *,
        name: str,
        modes: Sequence[str],
        fence_s: float = 10.0,
    ) -> None:
        self.engine = engine
        self.group = group
        self.name = name
        self._modes = modes
        self._fence_s = fence_s
        self._peers: dict[int, Peer] = {}
        self._owner: dict[Place, Peer] = {}
        self._lost: OrderedDict[Place, str] = OrderedDict()
        self._tallies: dict[int, Tally] = {}
        self._post: Callable[[Callable[[], None]], None] | None = None
        self._handle: Callable[[Event], None] | None = None
        for kind in self.hears():
            group.on(kind, self._on_word)

    def attach(
        self, post: Callable[[Callable[[], None]], None], handle: Callable[[Event], None]
    ) -> None:
        """How calls reach the node's loop, and who takes events there; before the first event."""
        self._post, self._handle = post, handle

    def introduce(self, hello: NodeHello) -> None:
        """From now on answer those who greet, in every process."""
        self.group.broadcast(Introduce(hello.node, hello.epoch))
        self.engine.set_hello(encode(hello))

    @abstractmethod
    def hears(self) -> tuple[type[Any], ...]:
        """The kinds of messages that followers of this role send."""

    @abstractmethod
    def merge(self, event: Event) -> Iterable[Event]:
        """What an event of the leader's own engine means for the node."""

    @abstractmethod
    def hear(self, process: int, word: FollowerWord) -> Iterable[Event]:
        """What a follower's word means for the node."""

    @abstractmethod
    def note(self, process: int, seen: Mapping[int, int]) -> None:
        """What a follower has counted, by slot."""

    # ---- events --------------------------------------------------------------------------------

    def on_events(self, events: Sequence[Event]) -> None:
        """Take the events of the leader's engine; for the event pump's thread."""
        assert self._post is not None
        self._post(functools.partial(self._take, events))

    def _on_word(self, process: int, word: FollowerWord) -> None:
        """A follower's word, on a reader thread."""
        if self._post is not None:
            self._post(functools.partial(self._tell, self._heard, process, word))

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            self._tell(self._merged, event)

    def _tell(self, meaning: Callable[..., Iterable[Event]], *what: Any) -> None:
        assert self._handle is not None
        for event in meaning(*what):
            self._handle(event)

    def _merged(self, event: Event) -> Iterable[Event]:
        if isinstance(event, PeerLostEvent):
            return self.link_lost(0, event.peer, event.reason, event.elapsed_s)
        if isinstance(event, MessageReceived) and event.peer not in self._peers:
            owner = self._owner.get((0, event.peer))
            if owner is not None:
                log.error("a message of a process that does not lead %s was dropped", owner.name)
                return []
        if isinstance(event, PeerConnected | MessageReceived | TriggerFault):
            return [event]
        return self.merge(event)

    def _heard(self, process: int, word: FollowerWord) -> Iterable[Event]:
        if isinstance(word, Tally | LinkLost):
            self.note(process, word.seen)
        if isinstance(word, Tally):
            self._tallies[process] = word
            return []
        if isinstance(word, LinkLost):
            return self.link_lost(process, word.link, word.reason, word.elapsed_s)
        if isinstance(word, Fault):
            detail = f"in process {process}: {word.detail}"
            return [TriggerFault(word.kind, word.step, word.layer, word.ordinal, detail)]
        return self.hear(process, word)

    # ---- peers ---------------------------------------------------------------------------------

    def own(self, peer: Peer, pair: Pair, link: int) -> None:
        """A link is a peer's from now on."""
        peer.links[pair] = link
        self._owner[pair[0], link] = peer

    def link_lost(self, process: int, link: int, reason: str, elapsed_s: float) -> list[Event]:
        """A link is closed and its transfers have ended: fence the others, or it was the last."""
        peer = self._owner.pop((process, link), None)
        if peer is None:
            self._lost[process, link] = reason
            while len(self._lost) > KEPT_LOSSES:
                self._lost.popitem(last=False)
            return []
        (pair,) = [pair for pair, held in peer.links.items() if pair[0] == process and held == link]
        del peer.links[pair]
        if peer.ending is None and (peer.whole or pair == (0, 0)):
            if self.group.size > 1 or peer.processes > 1:
                reason = f"between process {pair[0]} here and process {pair[1]} there: {reason}"
            self.fence(peer.id, reason)
        if peer.links or peer.ending is None:
            return []
        del self._peers[peer.id]
        self.gone(peer)
        return [PeerLostEvent(peer.id, peer.ending, elapsed_s)]

    @abstractmethod
    def gone(self, peer: Peer) -> None:
        """All links of a peer are closed, in every process."""

    def fence(self, peer_id: int, reason: str) -> None:
        """Close all links of a peer in all processes; its PeerLostEvent comes when they are."""
        peer = self._peers.get(peer_id)
        if peer is None or peer.ending is not None:
            return
        peer.ending = reason
        peer.deadline = time.monotonic() + self._fence_s
        links: dict[int, list[int]] = {}
        for (process, _), link in peer.links.items():
            links.setdefault(process, []).append(link)
        for process, ids in links.items():
            self.close_links(process, ids)

    def close_links(self, process: int, links: Sequence[int]) -> None:
        """Fence links of one process."""
        if process:
            self.group.send(process, Fence(tuple(links)))
        else:
            fence_links(self.engine, links)

    def send(self, peer_id: int, payload: bytes) -> None:
        """Queue a message for a peer's leader. Raises what `TransferEngine.send` does."""
        self.engine.send(peer_id, payload)

    def close(self, reason: str) -> None:
        """Fence every peer."""
        for peer_id in list(self._peers):
            self.fence(peer_id, reason)

    # ---- time ----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Raises RuntimeError if a process did not close the links of a peer in time."""
        for peer in self._peers.values():
            if now >= peer.deadline:
                missing = sorted({process for process, _ in peer.links})
                raise RuntimeError(
                    f"process {', '.join(map(str, missing))} of {self.name} did not close its "
                    f"links to {peer.name} within {self._fence_s:g} s: no page is safe"
                )

    def next_deadline(self) -> float | None:
        """When `tick` has something to do by itself."""
        return min((p.deadline for p in self._peers.values() if p.ending), default=None)

    # ---- for people ----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The engines' counters, summed, and those of each domain; for any thread.

        "memory" is how the cache is reached: "host", "direct", "staged", or "direct+staged" where
        its buffers differ; a list, one of each process, where the processes differ. With followers
        there are each process's own numbers too, as old as what it told last.
        """
        tallies = {0: Tally({}, self.engine.counters(), self.engine.domain_counters())}
        tallies |= sorted(dict(self._tallies).items())
        total = Counter[str]()
        for tally in tallies.values():
            total.update(tally.counters)
        memory = self._modes[0] if len(set(self._modes)) == 1 else list(self._modes)
        state: dict[str, Any] = {"provider": self.engine.provider, "memory": memory, **total}
        if self.group.size == 1:
            return state | {"domains": tallies[0].domains}
        state["domains"] = [
            {"process": process, **domain}
            for process, tally in tallies.items()
            for domain in tally.domains
        ]
        state["processes"] = {str(process): t.counters for process, t in tallies.items()}
        return state
