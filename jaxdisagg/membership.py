"""Who is there, as the router knows it from heartbeats; no HTTP."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from jaxdisagg.announce import NodeInfo

logger = logging.getLogger(__name__)

MISSED_HEARTBEATS = 3.5


class Node:
    """A node that announced itself, and the router's own requests to it."""

    def __init__(self, info: NodeInfo, now: float) -> None:
        self.info = info
        self.seen = now
        self.in_flight = 0
        self.unreachable = False
        """A connection failed since the last heartbeat."""
        self.gone = False
        self._waits: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def wait(self, timeout_s: float) -> AsyncGenerator[None]:
        """Bound what is awaited inside: TimeoutError after `timeout_s` or once the node is gone."""
        async with asyncio.timeout(0 if self.gone else timeout_s) as limit:
            self._waits.add(limit)
            try:
                yield
            finally:
                self._waits.discard(limit)

    def drop(self) -> None:
        """Mark the node as gone and end every wait for it."""
        self.gone = True
        for limit in self._waits:
            limit.reschedule(asyncio.get_running_loop().time())


class Membership:
    """The nodes by id. Times are seconds of one monotonic clock, given by the caller."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}

    def announce(self, info: NodeInfo, now: float) -> None:
        """Take a heartbeat. Another address under a known id is a new node in its place."""
        node = self._nodes.get(info.id)
        if node is not None and not _same_node(node.info, info):
            logger.warning("node %s restarted", info.id)
            self._remove(node)
            node = None
        if node is None:
            logger.info("%s node %s joined", info.role, info.id)
            self._nodes[info.id] = Node(info, now)
        else:
            node.info, node.seen, node.unreachable = info, now, False

    def leave(self, info: NodeInfo) -> None:
        """Forget a node at its own wish; what it still answers goes on."""
        node = self._nodes.get(info.id)
        if node is not None and _same_node(node.info, info):
            logger.info("%s node %s left", info.role, info.id)
            del self._nodes[info.id]

    def drop_stale(self, now: float) -> None:
        """Forget the nodes that were silent for too long, and end every wait for them."""
        for node in list(self._nodes.values()):
            silent = now - node.seen
            if silent > MISSED_HEARTBEATS * node.info.heartbeat_s:
                logger.warning("node %s is gone: no heartbeat for %.1f s", node.info.id, silent)
                self._remove(node)

    @property
    def nodes(self) -> list[Node]:
        """All nodes, by id."""
        return [self._nodes[name] for name in sorted(self._nodes)]

    def candidates(self) -> list[Node]:
        """Nodes that serve requests now, the one with the least to do first.

        Requests under way from here count first, as heartbeats do not know them yet.
        """
        serving = [
            node
            for node in self.nodes
            if node.info.role != "prefill" and node.info.ready and not node.unreachable
        ]
        return sorted(serving, key=lambda node: (node.in_flight, node.info.load, node.info.id))

    def missing(self) -> str:
        """What is missing before requests can be served; empty if nothing is."""
        front = [node for node in self.nodes if node.info.role != "prefill"]
        back = [node for node in self.nodes if node.info.role == "prefill"]
        if not front:
            return "no decode or mixed node has announced itself"
        if not self.candidates():
            return "no decode or mixed node is ready: " + _reasons(front)
        if any(node.info.role == "mixed" for node in self.candidates()):
            return ""
        if not back:
            return "no prefill node has announced itself"
        if not any(node.info.ready for node in back):
            return "no prefill node is ready: " + _reasons(back)
        return ""

    def _remove(self, node: Node) -> None:
        del self._nodes[node.info.id]
        node.drop()


def _same_node(a: NodeInfo, b: NodeInfo) -> bool:
    return (a.role, a.url, a.fabric_address) == (b.role, b.url, b.fabric_address)


def _reasons(nodes: list[Node]) -> str:
    return ", ".join(
        f"{node.info.id} ({'not reachable' if node.unreachable else node.info.missing or 'busy'})"
        for node in nodes
    )
