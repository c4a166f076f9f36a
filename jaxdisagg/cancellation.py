"""How a decode node gives up prefills that are under way: by CANCEL, or by a hard fence.

A CANCEL is sent again and again until a terminal message answers it (R15). Where none comes in
time, and where a peer's writes cannot be trusted or its links are lost, all links to it are closed
in all processes (R13); its attempts hold what they have until that is done.
"""

import logging
import time

from ffi_transport.errors import TransportError
from jaxdisagg import messages
from jaxdisagg.active import ActiveRequest
from jaxdisagg.api import RequestError
from jaxdisagg.attempts import Attempt, Attempts
from jaxdisagg.decode_node import DecodeNode
from jaxdisagg.group.decode_fabric import DecodeFabric
from jaxdisagg.prefill_peers import PrefillPeer, PrefillPeers

log = logging.getLogger(__name__)

REVOKING_SHARE = 0.25


class Cancellation:
    """Used on the node's loop alone."""

    def __init__(
        self, node: DecodeNode, fabric: DecodeFabric, peers: PrefillPeers, attempts: Attempts
    ) -> None:
        self._node = node
        self._fabric = fabric
        self._peers = peers
        self._attempts = attempts
        self._timeouts = node.node.timeouts
        self._leaving: dict[int, PrefillPeer] = {}
        self._overshot: dict[int, list[tuple[ActiveRequest, RequestError]]] = {}

    # ---- CANCEL --------------------------------------------------------------------------------

    def cancel(self, active: ActiveRequest) -> None:
        """Ask for the end of a request's writes; it is over at once where none was asked for."""
        attempt = self._attempts.of_request(active)
        attempt.cancelled_at = time.monotonic()
        if attempt.sent:
            self._send(attempt, attempt.cancelled_at)
        else:
            self._attempts.settle(attempt)
            self._node.prefill_over(active)

    def pursue(self, attempt: Attempt, now: float) -> None:
        """Ask again for a cancelled attempt if it is time to, or fence its peer."""
        assert attempt.cancelled_at is not None
        if now - attempt.cancelled_at >= self._patience(attempt):
            self.fence(attempt.peer, "a CANCEL was not answered in time")
        elif now >= attempt.resend_at:
            self._send(attempt, now)

    def due(self, attempt: Attempt) -> float:
        """When `pursue` has something to do for a cancelled attempt."""
        assert attempt.cancelled_at is not None
        return min(attempt.resend_at, attempt.cancelled_at + self._patience(attempt))

    def _patience(self, attempt: Attempt) -> float:
        """Seconds that a CANCEL may stay unanswered before its peer is fenced.

        Short when REVOKING pages exceed a quarter of the pool, but not none: a burst of clients
        that leave is answered within a step, and a fence would end innocent requests.
        """
        share = self._node.pools[attempt.active.rank].revoking_share
        crowded = share > REVOKING_SHARE
        return self._timeouts.cancel_resend if crowded else self._timeouts.cancel_fence

    def _send(self, attempt: Attempt, now: float) -> None:
        attempt.resend_at = now + self._timeouts.cancel_resend
        try:
            self._fabric.send(attempt.peer.id, messages.encode(messages.Cancel(attempt.id)))
        except TransportError as error:  # resent, or ended by the fence
            log.debug("CANCEL to %s was not sent: %s", attempt.peer.name, error)

    # ---- the fence -----------------------------------------------------------------------------

    def fence(self, peer: PrefillPeer, reason: str) -> bool:
        """Close a peer's links in all processes; its PeerLostEvent comes once they are closed.

        Until then its attempts hold what they have. False if it is gone already.
        """
        log.warning("fencing prefill node %s: %s", peer.name, reason)
        if self._peers.lost(peer.id, reason) is not None:
            self._leaving[peer.id] = peer
            self._fabric.fence(peer.id, reason)
        return peer.id in self._leaving

    def fencing(self, peer_id: int) -> bool:
        """Whether a peer's links are being closed, which ends its attempts."""
        return peer_id in self._leaving

    def fence_overshot(self, attempt: Attempt, reason: str) -> None:
        """Fence the peer of an attempt whose count cannot be trusted; then its request fails.

        However the request ends meanwhile, its pages are kept until nothing can write them.
        """
        peer = attempt.peer
        error = RequestError(502, f"{peer.name}: {reason}", code="prefill_failed")
        self._node.hold(attempt.active)
        self._overshot.setdefault(peer.id, []).append((attempt.active, error))
        if not self.fence(peer, reason):
            self._fail_overshot(peer)

    def peer_lost(self, peer_id: int, reason: str) -> None:
        """A peer's data endpoints are closed in all processes: every attempt with it is over."""
        peer = self._peers.lost(peer_id, reason)
        peer = self._leaving.pop(peer_id, peer)
        if peer is None:
            return
        for attempt in [a for a in self._attempts if a.peer is peer]:
            arrived = self._attempts.arrived(attempt)
            self._attempts.settle(attempt)
            if attempt.cancelled_at is not None:
                self._node.prefill_over(attempt.active)
                continue
            self._node.fail_request(
                attempt.active,
                RequestError(
                    502,
                    f"the prefill node {peer.name} was lost ({reason}): {arrived}",
                    code="prefill_node_lost",
                ),
            )
        self._fail_overshot(peer)

    def _fail_overshot(self, peer: PrefillPeer) -> None:
        for active, error in self._overshot.pop(peer.id, ()):
            self._node.let_go(active)
            if not active.life.over:
                self._node.fail_request(active, error)
