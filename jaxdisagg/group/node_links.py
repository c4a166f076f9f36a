"""A decode node's links to a prefill node: from each of its processes to each one there.

All of them are made, or none: what came about is closed again where one is missing.
"""

import threading
import time
from collections.abc import Mapping

from ffi_transport.engine import TransferEngine
from ffi_transport.errors import TransferTimeout
from jaxdisagg.group.connecting import LinkAnswers, leave_links, link_all
from jaxdisagg.group.fabric_messages import Linked, LinkTo, Unlink
from jaxdisagg.group.node_fabric import Pair
from jaxdisagg.group.processes import Group
from jaxdisagg.hello import NodeHello

LATE_SECONDS = 1.0
"""How much later than its own deadline a follower's answer may come."""


class NodeLinks:
    """Makes links from the leader's process; for the threads that connect, several at once."""

    def __init__(self, engine: TransferEngine, group: Group, name: str) -> None:
        self._engine = engine
        self._group = group
        self._name = name
        self._asked: dict[int, LinkAnswers] = {}
        self._lock = threading.Lock()
        self._asks = 0
        group.on(Linked, self._on_linked)

    def make(
        self, peer_id: int, address: str, hello: NodeHello, timeout_s: float
    ) -> dict[Pair, int]:
        """Every link to a node whose leader, at `address`, was greeted.

        Raises TransferTimeout that says which process has no link to which, and why; then all of
        them are closed again.
        """
        links: dict[Pair, int] = {(0, 0): peer_id}
        if hello.process_count == 1 and self._group.size == 1:
            return links
        addresses = (address, *hello.processes[1:])
        answers = LinkAnswers(self._group.size)
        with self._lock:
            self._asks += 1
            number = self._asks
            self._asked[number] = answers
        deadline = time.monotonic() + timeout_s
        self._group.broadcast(LinkTo(number, hello.node, hello.epoch, addresses, timeout_s))
        own, wrong = link_all(
            self._engine, hello.node, hello.epoch, dict(enumerate(addresses[1:], 1)), timeout_s
        )
        silent = answers.wait(max(deadline - time.monotonic(), 0.0) + LATE_SECONDS)
        with self._lock:
            del self._asked[number]
        links |= {(0, process): link for process, link in own.items()}
        problems = {(0, process): problem for process, problem in wrong.items()}
        for process, word in answers.found.items():
            for there, (link, problem) in enumerate(zip(word.links, word.problems, strict=True)):
                if problem:
                    problems[process, there] = problem
                else:
                    links[process, there] = link
        texts = [
            f"process {here} has no link to process {there} of {hello.node}: {problem}"
            for (here, there), problem in sorted(problems.items())
        ]
        texts += [f"process {process} did not answer" for process in sorted(silent)]
        if texts:
            self._unlink(links)
            raise TransferTimeout(f"{self._name}: {'; '.join(texts)}", peer=peer_id)
        return links

    def _on_linked(self, process: int, word: Linked) -> None:
        """A follower's answer, on its reader thread."""
        with self._lock:
            answers = self._asked.get(word.number)
        if answers is None or not answers.put(process, word):
            late = tuple(link for link in word.links if link >= 0)
            self._group.send(process, Unlink(late))

    def _unlink(self, links: Mapping[Pair, int]) -> None:
        """Take leave of links that nothing was written over."""
        theirs: dict[int, list[int]] = {}
        for (process, _), link in links.items():
            theirs.setdefault(process, []).append(link)
        for process, ids in theirs.items():
            if process:
                self._group.send(process, Unlink(tuple(ids)))
        leave_links(self._engine, theirs.get(0, ()))
