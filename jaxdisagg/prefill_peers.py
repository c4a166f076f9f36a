"""The prefill nodes that a decode node knows: connecting, refusing, choosing, losing them."""

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ffi_transport.engine import TransferEngine
from ffi_transport.errors import TransportError
from ffi_transport.types import PeerConnected
from jaxdisagg import messages
from jaxdisagg.messages import MessageError, NodeHello

log = logging.getLogger(__name__)

RECONNECT_SECONDS = 1.0


@dataclass(eq=False)
class PrefillPeer:
    """A connected prefill node that fits; `outstanding` are this node's prompt tokens there."""

    id: int
    name: str
    address: str
    hello: NodeHello
    outstanding: int = 0


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
        engine: TransferEngine,
        hello: NodeHello,
        timeout: float,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._me = me
        self._engine = engine
        self._hello = hello
        self._timeout = timeout
        self._post = post
        self._known: dict[str, _Known] = {}
        self._by_id: dict[int, _Known] = {}
        self._closed = False
        self.on_change: Callable[[], object] = lambda: None

    def refresh(self, members: Iterable[tuple[str, int]]) -> None:
        """The announced prefill nodes as (fabric address, outstanding tokens); for any thread."""
        self._post(functools.partial(self._refresh, list(members)))

    def _refresh(self, members: list[tuple[str, int]]) -> None:
        for address, load in members:
            self._known.setdefault(address, _Known(address)).load = load
        announced = {address for address, _ in members}
        for address, known in list(self._known.items()):
            # A node that is no longer announced but still connected goes on serving (R23).
            if address not in announced and known.peer is None and not known.connecting:
                del self._known[address]
        self.tick(time.monotonic())

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
        """When the next connection is tried."""
        times = [k.retry_at for k in self._known.values() if not k.peer and not k.connecting]
        return None if self._closed else min(times, default=None)

    def _connect(self, known: _Known) -> None:
        try:
            peer_id = self._engine.connect(known.address, self._timeout)
            greeting = self._engine.peer_hello(peer_id)
        except TransportError as error:
            self._post(functools.partial(self._not_connected, known, str(error)))
            return
        self._post(functools.partial(self._connected, known, peer_id, greeting))

    def _not_connected(self, known: _Known, reason: str) -> None:
        if known.problem != reason:
            log.warning("no connection to the prefill node at %s: %s", known.address, reason)
        known.connecting = False
        known.problem = reason
        known.retry_at = time.monotonic() + RECONNECT_SECONDS

    def _connected(self, known: _Known, peer_id: int, greeting: bytes) -> None:
        known.connecting = False
        try:
            theirs = messages.decode_hello(greeting)
            problems = messages.compatibility(self._hello, theirs)
        except MessageError as error:
            problems, theirs = [str(error)], None
        if theirs is None or problems:
            known.problem = f"refused: {'; '.join(problems)}"
            known.retry_at = time.monotonic() + self._timeout
            log.error("the prefill node at %s was %s", known.address, known.problem)
            self._engine.disconnect(peer_id)
            return
        known.peer = PrefillPeer(peer_id, theirs.node, known.address, theirs)
        self._by_id[peer_id] = known
        log.info("prefill node %s connected (%s)", theirs.node, known.address)
        self.on_change()

    def greeted(self, event: PeerConnected) -> None:
        """The engine's own word of a connection; `connect` already returned or will return it."""
        log.debug("peer %d at %s connected", event.peer, event.address)

    def lost(self, peer_id: int, reason: str) -> PrefillPeer | None:
        """Forget a connection; returns what it was. The node is tried again."""
        known = self._by_id.pop(peer_id, None)
        if known is None:
            return None
        peer, known.peer = known.peer, None
        known.problem = f"lost: {reason}"
        known.retry_at = time.monotonic()  # it may be back already
        log.warning("prefill node at %s was lost: %s", known.address, reason)
        self.on_change()
        return peer

    def connected(self) -> list[PrefillPeer]:
        """The nodes that can be sent a PREFILL."""
        return [k.peer for k in self._known.values() if k.peer is not None]

    def choose(self) -> PrefillPeer | None:
        """The node with the fewest outstanding tokens: those announced and those sent since."""
        usable = [k for k in self._known.values() if k.peer is not None]
        if not usable:
            return None
        best = min(usable, key=lambda k: max(k.load, k.peer.outstanding if k.peer else 0))
        return best.peer

    def missing(self) -> str | None:
        """None when a node is connected; otherwise what is known about each."""
        if any(k.peer is not None for k in self._known.values()):
            return None
        if not self._known:
            return f"no prefill node has announced itself to {self._me}"
        reasons = "; ".join(f"{k.address}: {k.problem}" for k in self._known.values())
        return f"no prefill node is connected to {self._me} ({reasons})"

    def close(self) -> None:
        """Connect to nothing any more."""
        self._closed = True

    def state(self) -> dict[str, Any]:
        """By address: the node's name or why it is not connected."""
        return {
            address: {"node": k.peer.name, "outstanding_tokens": k.peer.outstanding}
            if k.peer
            else {"problem": k.problem}
            for address, k in list(self._known.items())
        }
