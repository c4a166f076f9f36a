"""The prefill nodes that a decode node knows: connecting, refusing, choosing, losing them."""

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ffi_transport.errors import TransportError
from ffi_transport.events import PeerConnected
from jaxdisagg import messages
from jaxdisagg.group.decode_fabric import DecodeFabric
from jaxdisagg.group.node_fabric import Pair
from jaxdisagg.hello import NodeHello, compatibility
from jaxdisagg.page_spans import pages_for

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
REFUSED_RETRY_SECONDS = 10.0
LEAST_SECONDS = 0.5
"""For the links of a node whose leader took most of the time to answer."""


@dataclass(eq=False)
class PrefillPeer:
    """A connected prefill node that fits.

    `outstanding` are this node's prompt tokens there. It was connected at `since` (of
    `time.monotonic`), and nothing is sent to it before `busy_until`: it answered BUSY.
    """

    id: int
    name: str
    address: str
    hello: NodeHello
    since: float
    outstanding: int = 0
    busy_until: float = 0.0

    def never_fits(self, prompt_length: int) -> str | None:
        """Why this node can never prefill such a prompt, or None."""
        hello = self.hello
        if prompt_length > hello.max_model_len:
            return f"a prompt of at most {hello.max_model_len} tokens at {self.name}"
        pages = pages_for(prompt_length, hello.layout.page_size)
        if pages >= hello.num_pages:
            return f"{pages} source pages, {self.name} has {hello.num_pages - 1}"
        return None


@dataclass(eq=False)
class _Known:
    """An announced prefill node. `problem` says why it is not connected."""

    address: str
    load: int = 0
    connecting: bool = False
    retry_at: float = 0.0
    problem: str = "not connected yet"
    peer: PrefillPeer | None = None


class PrefillPeers:
    """Membership in, connections out. On the node's loop alone, but for `refresh`.

    `on_change` is called, on the loop, when a node was connected or lost.
    """

    def __init__(
        self,
        me: str,
        fabric: DecodeFabric,
        hello: NodeHello,
        timeout: float,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._me = me
        self._fabric = fabric
        self._hello = hello
        self._timeout = timeout
        self._post = post
        self._known: dict[str, _Known] = {}
        self._announced: frozenset[str] = frozenset()
        self._closed = False
        self.on_change: Callable[[], object] = lambda: None

    def refresh(self, members: Iterable[tuple[str, int]]) -> None:
        """The announced prefill nodes as (fabric address, outstanding tokens); for any thread."""
        self._post(functools.partial(self._refresh, list(members)))

    def _refresh(self, members: list[tuple[str, int]]) -> None:
        self._announced = frozenset(address for address, _ in members)
        for address, load in members:
            self._known.setdefault(address, _Known(address)).load = load
        for known in list(self._known.values()):
            self._forget_if_gone(known)
        self.tick(time.monotonic())

    def _forget_if_gone(self, known: _Known) -> None:
        """A node that is no longer announced goes on serving while it is connected (R23)."""
        if known.address not in self._announced and known.peer is None and not known.connecting:
            del self._known[known.address]

    def tick(self, now: float) -> None:
        """Connect to what is known and not connected, each in a thread of its own."""
        for known in self._known.values():
            if self._closed or known.peer or known.connecting or now < known.retry_at:
                continue
            known.connecting = True
            threading.Thread(
                target=self._connect, args=(known,), name=f"connect-{known.address}", daemon=True
            ).start()

    def next_deadline(self) -> float | None:
        """When the next connection is tried, or a busy node may be asked again."""
        now = time.monotonic()
        times = [k.retry_at for k in self._known.values() if not k.peer and not k.connecting]
        times += [p.busy_until for p in self.connected() if p.busy_until > now]
        return None if self._closed else min(times, default=None)

    def _connect(self, known: _Known) -> None:
        """In a thread of its own, since it waits; whatever happens, the loop hears of it."""
        deadline = time.monotonic() + self._timeout
        try:
            peer_id = self._fabric.connect(known.address, self._timeout)
            theirs = messages.decode_hello(self._fabric.peer_hello(peer_id))
            problems = compatibility(self._hello, theirs)
            if problems:
                self._fabric.disconnect(peer_id)
                reason = f"refused: {'; '.join(problems)}"
                self._post(
                    functools.partial(self._not_connected, known, reason, REFUSED_RETRY_SECONDS)
                )
                return
            left = max(deadline - time.monotonic(), LEAST_SECONDS)
            links = self._fabric.link(peer_id, known.address, theirs, left)
        except (TransportError, ValueError, OSError) as error:
            self._post(functools.partial(self._not_connected, known, str(error), RETRY_SECONDS))
            return
        self._post(functools.partial(self._connected, known, peer_id, theirs, links))

    def _not_connected(self, known: _Known, reason: str, pause: float) -> None:
        if known.problem != reason:
            log.warning("no connection to the prefill node at %s: %s", known.address, reason)
        known.connecting = False
        known.problem = reason
        known.retry_at = time.monotonic() + pause
        self._forget_if_gone(known)

    def _connected(
        self, known: _Known, peer_id: int, theirs: NodeHello, links: dict[Pair, int]
    ) -> None:
        try:
            # The loss of this peer may have been told before it was known here.
            self._fabric.admit(peer_id, theirs, links)
        except TransportError as error:
            self._not_connected(known, str(error), RETRY_SECONDS)
            return
        known.connecting = False
        now = time.monotonic()
        known.peer = PrefillPeer(peer_id, theirs.node, known.address, theirs, since=now)
        log.info("prefill node %s connected (%s)", theirs.node, known.address)
        self.on_change()

    def greeted(self, event: PeerConnected) -> None:
        """Somebody greeted this node: prefill nodes do not, so it is told and left alone."""
        log.warning("a node at %s greeted this decode node; it is not served", event.address)

    def lost(self, peer_id: int, reason: str) -> PrefillPeer | None:
        """Forget a connection; returns what it was. The node is tried again if still announced."""
        for known in self._known.values():
            if known.peer is not None and known.peer.id == peer_id:
                break
        else:
            return None
        peer, known.peer = known.peer, None
        known.problem = f"lost: {reason}"
        # It may be back already; but who is lost as soon as it is connected has some trouble.
        known.retry_at = max(time.monotonic(), peer.since + RETRY_SECONDS)
        log.warning("prefill node at %s was lost: %s", known.address, reason)
        self._forget_if_gone(known)
        self.on_change()
        return peer

    def connected(self) -> list[PrefillPeer]:
        """The nodes that can be sent a PREFILL."""
        return [k.peer for k in list(self._known.values()) if k.peer is not None]

    def choose(self, prompt_length: int, now: float) -> PrefillPeer | None:
        """The node with the fewest outstanding tokens: those announced and those sent since.

        None if every node that could take the prompt is busy.
        """
        best: PrefillPeer | None = None
        least = 0
        for known in self._known.values():
            peer = known.peer
            if peer is None or now < peer.busy_until or peer.never_fits(prompt_length):
                continue
            load = max(known.load, peer.outstanding)
            if best is None or load < least:
                best, least = peer, load
        return best

    def never_fits(self, prompt_length: int) -> str | None:
        """Why no connected node can ever prefill such a prompt; None if one can, or none is there.

        For any thread.
        """
        reasons = [peer.never_fits(prompt_length) for peer in self.connected()]
        if not reasons or not all(reasons):
            return None
        return "; ".join(filter(None, reasons))

    def missing(self) -> str | None:
        """None when a node is connected; otherwise what is known about each. For any thread."""
        known = list(self._known.values())
        if any(k.peer is not None for k in known):
            return None
        if not known:
            return f"no prefill node has announced itself to {self._me}"
        reasons = "; ".join(f"{k.address}: {k.problem}" for k in known)
        return f"no prefill node is connected to {self._me} ({reasons})"

    def close(self) -> None:
        """Connect to nothing any more."""
        self._closed = True

    def state(self) -> dict[str, Any]:
        """By address: the node's name or why it is not connected. For any thread."""
        return {
            address: {"node": k.peer.name, "outstanding_tokens": k.peer.outstanding}
            if k.peer
            else {"problem": k.problem}
            for address, k in list(self._known.items())
        }
