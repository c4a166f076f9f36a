"""Who may begin: requests wait here, in order, until there are pages and a prefiller for them."""

from collections import deque
from collections.abc import Iterator

from jaxdisagg.active import ActiveRequest
from jaxdisagg.api import GenerationRequest, RequestError
from jaxdisagg.config import NodeConfig
from jaxdisagg.page_pool import PagePool
from jaxdisagg.prefiller import Prefiller


class Admission:
    """The queue of a decode or mixed node, and the pools that it leases from.

    First come, first served for pages. Prompts of one token pass those that wait for the prefill
    side, since they need none of it.
    """

    def __init__(self, node: NodeConfig, dp: int) -> None:
        self.pools = [PagePool(node.cache.pages, node.cache.page_size) for _ in range(dp)]
        self._node = node
        self._queue: deque[ActiveRequest] = deque()

    def check(self, request: GenerationRequest, prefiller: Prefiller | None) -> None:
        """Raise RequestError(400) for a request that can never be served, naming the limit."""
        prompt, total = len(request.prompt), len(request.prompt) + request.max_tokens
        limit = self._node.batch.max_model_len
        pages, most = self._pages(total - 1), self.pools[0].counts().total
        problem = prefiller.never_fits(prompt) if prefiller and prompt > 1 else None
        if total > limit:
            problem = (
                f"the prompt's {prompt} tokens and max_tokens={request.max_tokens} exceed the "
                f"{limit} tokens of a request"
            )
        elif pages > most:
            problem = (
                f"the request needs {pages} cache pages of {self._node.cache.page_size} tokens, "
                f"the node has {most}"
            )
        elif problem is not None:
            problem = f"the prompt's {prompt} tokens need {problem}"
        if problem is not None:
            raise RequestError(
                400,
                problem,
                code="context_length_exceeded",
                param="max_tokens" if prompt < limit and total > limit else "prompt",
            )

    def add(self, active: ActiveRequest) -> None:
        """Queue a new request."""
        self._queue.append(active)

    def requeue(self, active: ActiveRequest) -> None:
        """Queue a request anew whose prefill node was busy: it has waited its turn already."""
        self._queue.appendleft(active)

    def remove(self, active: ActiveRequest) -> None:
        """Take a request out; no effect if it does not wait."""
        if active in self._queue:
            self._queue.remove(active)

    def expired(self, now: float, missing: str | None) -> list[tuple[ActiveRequest, RequestError]]:
        """Requests that have waited too long, and what for. `missing`: why none is prefilled."""
        found: list[tuple[ActiveRequest, RequestError]] = []
        for active in self._queue:
            waited = now - active.arrived
            if missing is not None and active.prompt_length > 1:
                if waited > self._node.timeouts.connect:
                    found.append((active, RequestError(503, missing, code="no_prefill_node")))
            elif waited > self._node.timeouts.queue:
                found.append((active, self._waited_for_pages(active, waited)))
        return found

    def admit(self, prefiller: Prefiller) -> Iterator[ActiveRequest]:
        """Yield requests that may begin, one at a time, with `rank` and `lease` set."""
        waits_for_prefill = False
        for active in list(self._queue):
            alone = active.prompt_length == 1
            if not alone and (waits_for_prefill or not prefiller.has_room(active)):
                waits_for_prefill = True
                continue
            rank = max(range(len(self.pools)), key=lambda r: self.pools[r].counts().free)
            lease = self.pools[rank].lease(self._pages(active.cache_tokens))
            if lease is None:
                return
            self._queue.remove(active)
            active.rank, active.lease = rank, lease
            yield active

    def next_deadline(self, missing: str | None) -> float | None:
        """When the first request will have waited too long."""
        timeouts = self._node.timeouts
        patience = timeouts.queue if missing is None else min(timeouts.queue, timeouts.connect)
        return min((a.arrived + patience for a in self._queue), default=None)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._node.cache.page_size)

    def _waited_for_pages(self, active: ActiveRequest, waited: float) -> RequestError:
        free = max(pool.counts().free for pool in self.pools)
        return RequestError(
            503,
            f"the request waited {waited:.1f} s for {self._pages(active.cache_tokens)} cache "
            f"pages; {free} are free",
            code="overloaded",
        )
