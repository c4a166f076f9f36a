"""Who is there, as the router knows it from heartbeats; no HTTP."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from jaxdisagg.announce import NodeInfo

logger = logging.getLogger(__name__)

MISSED_HEARTBEATS = 3.5
# A node whose heartbeats are late may only be busy: what it still sends is passed on, until it
# has sent nothing for so long.
SILENCE_S = 10.0


class Node:
    """A node that announced itself, and the router's own requests to it.

    One that is `gone`, as its heartbeats ended, gets no new requests.
    """

    def __init__(self, info: NodeInfo, now: float, silence_s: float = SILENCE_S) -> None:
        self.info = info
        self.seen = now
        self.in_flight = 0
        self.unreachable = False
        """A connection failed since the last heartbeat."""
        self.gone = False
        self._silence_s = silence_s
        self._waits: dict[asyncio.Timeout, float] = {}

    @asynccontextmanager
    async def wait(self, timeout_s: float) -> AsyncGenerator[None]:
        """Bound what is awaited inside: TimeoutError after `timeout_s`, sooner if it is gone."""
        end = asyncio.get_running_loop().time() + timeout_s
        async with asyncio.timeout_at(self._limit(end)) as limit:
            self._waits[limit] = end
            try:
                yield
            finally:
                del self._waits[limit]

    def drop(self) -> None:
        """Mark the node as gone and give every wait for it an early end."""
        self.gone = True
        self._reschedule()

    def revive(self) -> None:
        """The node is there after all: waits for it end as they would have."""
        self.gone = False
        self._reschedule()

    def _limit(self, end: float) -> float:
        return min(end, asyncio.get_running_loop().time() + self._silence_s) if self.gone else end

    def _reschedule(self) -> None:
        for limit, end in self._waits.items():
            if not limit.expired():
                limit.reschedule(self._limit(end))


class Membership:
    """The nodes by id. Times are seconds of one monotonic clock, given by the caller."""

    def __init__(self, silence_s: float = SILENCE_S) -> None:
        self._nodes: dict[str, Node] = {}
        self._silence_s = silence_s

    def announce(self, info: NodeInfo, now: float) -> None:
        """Take a heartbeat. Another address under a known id is a new node in its place."""
        node = self._nodes.get(info.id)
        if node is not None and not _same_node(node.info, info):
            logger.warning("node %s restarted", info.id)
            node.drop()
            node = None
        if node is None:
            logger.info("%s node %s joined", info.role, info.id)
            self._nodes[info.id] = Node(info, now, self._silence_s)
            return
        node.info, node.seen, node.unreachable = info, now, False
        if node.gone:
            logger.warning("node %s is back", info.id)
            node.revive()

    def leave(self, info: NodeInfo) -> None:
        """Forget a node at its own wish; what it still answers goes on."""
        node = self._nodes.get(info.id)
        if node is not None and _same_node(node.info, info):
            logger.info("%s node %s left", info.role, info.id)
            del self._nodes[info.id]

    def drop_stale(self, now: float) -> None:
        """Drop the nodes whose heartbeats ended; those that owe no answer are forgotten."""
        for node in list(self._nodes.values()):
            silent = now - node.seen
            if silent <= MISSED_HEARTBEATS * node.info.heartbeat_s:
                continue
            if not node.gone:
                logger.warning("node %s is gone: no heartbeat for %.1f s", node.info.id, silent)
                node.drop()
            if node.in_flight == 0:
                del self._nodes[node.info.id]

    def excuse(self, seconds: float, now: float) -> None:
        """No heartbeat could be heard for so long until now: that is no node's fault."""
        for node in self._nodes.values():
            node.seen = min(node.seen + seconds, now)

    @property
    def nodes(self) -> list[Node]:
        """All nodes that are not gone, by id."""
        return [node for _, node in sorted(self._nodes.items()) if not node.gone]

    def models(self) -> list[str]:
        """Names of the models that decode and mixed nodes have, ready or not."""
        return sorted({node.info.model for node in self.nodes if node.info.role != "prefill"})

    def candidates(self, model: str | None = None) -> list[Node]:
        """Nodes that serve requests (for a model) now, the one with the least to do first.

        Requests under way from here count first, as heartbeats do not know them yet.
        """
        serving = [
            node
            for node in self._of(model)
            if node.info.role != "prefill" and node.info.ready and not node.unreachable
        ]
        return sorted(serving, key=lambda node: (node.in_flight, node.info.load, node.info.id))

    def missing(self, model: str | None = None) -> str:
        """What is missing before requests (for a model) can be served; empty if nothing is."""
        front = [node for node in self._of(model) if node.info.role != "prefill"]
        back = [node for node in self._of(model) if node.info.role == "prefill"]
        if not front:
            return "no decode or mixed node has announced itself"
        candidates = self.candidates(model)
        if not candidates:
            return "no decode or mixed node is ready: " + _reasons(front)
        if any(node.info.role == "mixed" for node in candidates):
            return ""
        if not back:
            return "no prefill node has announced itself"
        if not any(node.info.ready for node in back):
            return "no prefill node is ready: " + _reasons(back)
        return ""

    def _of(self, model: str | None) -> list[Node]:
        return [node for node in self.nodes if model is None or node.info.model == model]


def _same_node(a: NodeInfo, b: NodeInfo) -> bool:
    return (a.role, a.url, a.fabric_address) == (b.role, b.url, b.fabric_address)


def _reasons(nodes: list[Node]) -> str:
    return ", ".join(
        f"{node.info.id} ({'not reachable' if node.unreachable else node.info.missing or 'busy'})"
        for node in nodes
    )
