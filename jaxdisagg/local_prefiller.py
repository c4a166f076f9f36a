"""The prefiller of a mixed node: the baseline to compare with, and the tests' oracle.

The same scheduler, step programs and cache as the split nodes, without a transfer. It too leaves
the last prompt token to a decode step, so that it is the same computation.
"""

import time
from typing import Any

from jaxdisagg.active import ActiveRequest
from jaxdisagg.decode_node import DecodeNode
from jaxdisagg.prefiller import Prefiller
from jaxdisagg.scheduler import PrefillJob, PrefillScheduler
from jaxdisagg.step_results import PrefillResult


class LocalPrefiller(Prefiller):
    """Prefills on the decode node's own runner, one chunked step between two decode steps."""

    def __init__(self, node: DecodeNode) -> None:
        batch = node.node.batch
        self._node = node
        self._scheduler = PrefillScheduler(node.runner.dp, batch.chunks, batch.prefill_rows)
        self._jobs: dict[str, tuple[ActiveRequest, PrefillJob]] = {}
        # Rows of the context buffer by dp rank, to draft from; a node that never drafts has none.
        rows = node.runner.cache.context_rows
        self._contexts = [list(range(1, rows)) for _ in range(node.runner.dp)]
        self._drafts = node.node.mtp
        self._in_flight: PrefillResult | None = None

    def unavailable(self) -> str | None:
        """Never: the node itself prefills."""
        return None

    def never_fits(self, prompt_length: int) -> str | None:
        """Never: the decode side's own limits are the same."""
        return None

    def has_room(self, active: ActiveRequest) -> bool:
        """Whether a context row is free on every dp rank, if the node drafts."""
        return not self._drafts or all(self._contexts)

    def begin(self, active: ActiveRequest) -> None:
        """Queue the prompt's chunks."""
        assert active.lease is not None
        if self._drafts:
            active.context = self._contexts[active.rank].pop()
        job = PrefillJob(
            active.id,
            active.rank,
            active.request.prompt,
            active.lease.pages,
            active.prompt_length - 1,
        )
        active.account.node = self._node.node.id
        active.account.pages = -(-job.total // self._node.node.cache.page_size)
        self._jobs[active.id] = (active, job)
        self._scheduler.add(job)

    def cancel(self, active: ActiveRequest) -> None:
        """Drop the chunks that wait. Steps in flight run before any later use of the pages."""
        _, job = self._jobs.pop(active.id)
        self._scheduler.remove(job)
        self._node.prefill_over(active)

    def release(self, active: ActiveRequest) -> None:
        """Give back the context row, if there was one."""
        if active.context >= 0:
            self._contexts[active.rank].append(active.context)
            active.context = -1

    def tick(self, now: float) -> bool:
        """Dispatch one prefill step; wait for the one before it, so that few are in flight."""
        step = self._scheduler.next_step()
        previous, self._in_flight = self._in_flight, None
        if step is not None:
            contexts = {}
            for chunk in step.chunks:
                active, _ = self._jobs[chunk.job.id]
                if active.sent_at is None:
                    active.sent_at = now
                if self._drafts:
                    contexts[active.id] = active.context
            self._in_flight = self._node.runner.prefill(step, contexts or None)
        if previous is not None:
            previous.wait()
            self._finish(previous)
        return self._in_flight is not None

    def _finish(self, result: PrefillResult) -> None:
        now = time.monotonic()
        for chunk in result.step.chunks:
            if not chunk.last or chunk.job.id not in self._jobs:
                continue
            active, _ = self._jobs.pop(chunk.job.id)
            assert active.sent_at is not None
            active.account.compute = now - active.sent_at
            active.account.reported = True
            self._node.prefilled(active, now)

    def next_deadline(self) -> float | None:
        """None: it acts only when the loop is busy."""
        return None

    def close(self, reason: str) -> None:
        """Nothing to stop."""

    def state(self) -> dict[str, Any]:
        """Nothing beyond what the node itself shows."""
        return {}
