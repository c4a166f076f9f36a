"""One process's links to those of other nodes: made, left, fenced.

Whoever answers must say that it is who it should be.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from ffi_transport.engine import TransferEngine
from ffi_transport.errors import TransportError
from jaxdisagg.group.fabric_messages import Linked
from jaxdisagg.hello import MemberHello
from jaxdisagg.messages import decode_greeting

log = logging.getLogger(__name__)

MAX_AT_ONCE = 16


def link_all(
    engine: TransferEngine, node: str, epoch: int, addresses: Mapping[int, str], timeout_s: float
) -> tuple[dict[int, int], dict[int, str]]:
    """Connect to processes of a node, all at once; returns links and problems, by process."""
    if not addresses:
        return {}, {}
    deadline = time.monotonic() + timeout_s
    links: dict[int, int] = {}
    problems: dict[int, str] = {}

    def link(process: int) -> None:
        try:
            left = max(deadline - time.monotonic(), 0.1)
            links[process] = _link(engine, node, epoch, process, addresses[process], left)
        except (TransportError, ValueError, OSError) as error:
            problems[process] = str(error) or type(error).__name__

    with ThreadPoolExecutor(min(len(addresses), MAX_AT_ONCE), "link") as pool:
        list(pool.map(link, addresses))
    return links, problems


def _link(
    engine: TransferEngine, node: str, epoch: int, process: int, address: str, timeout_s: float
) -> int:
    """A link to one process. Raises ValueError if somebody else answers there."""
    found = engine.connect(address, timeout_s)
    try:
        hello = decode_greeting(engine.peer_hello(found))
        number = hello.process if isinstance(hello, MemberHello) else 0
        if (hello.node, hello.epoch, number) != (node, epoch, process):
            raise ValueError(
                f"at {address} process {number} of {hello.node} answers, in its life "
                f"{hello.epoch:x}; process {process} of {node}, in its life {epoch:x}, was wanted"
            )
    except (TransportError, ValueError):
        engine.disconnect(found)
        raise
    return found


def leave_links(engine: TransferEngine, links: Iterable[int]) -> None:
    """Take leave of links that nothing was written over; of one that is gone already, too."""
    _each(engine.disconnect, links)


def fence_links(engine: TransferEngine, links: Iterable[int]) -> None:
    """Close links at once; of one that is gone already, too."""
    _each(engine.fence, links)


def _each(end: Callable[[int], None], links: Iterable[int]) -> None:
    for link in links:
        try:
            end(link)
        except TransportError as error:
            log.debug("%s of link %d: %s", end.__name__, link, error)


class LinkAnswers:
    """What followers say to one LinkTo; waited for by the thread that connects."""

    def __init__(self, size: int) -> None:
        self._wanted = set(range(1, size))
        self._changed = threading.Condition()
        self.closed = False
        self.found: dict[int, Linked] = {}

    def put(self, process: int, word: Linked) -> bool:
        """Take an answer; False if nobody waits for it any more."""
        with self._changed:
            if self.closed:
                return False
            self.found[process] = word
            self._changed.notify_all()
            return True

    def wait(self, timeout_s: float) -> set[int]:
        """Wait for all; returns who did not answer. From now on answers are refused."""
        with self._changed:
            self._changed.wait_for(lambda: self._wanted <= set(self.found), timeout_s)
            self.closed = True
            return self._wanted - set(self.found)
