"""The prefill side of a request's life: chunks, steps, and pages freed after the last write.

The node's loop takes PREFILLs from its messenger, leases source pages, announces each step's chunks
to the messenger before it runs (so that the trigger finds its plan), and frees the pages when the
transfer has ended. It never samples.
"""

import math
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from jaxdisagg.config import NodeConfig
from jaxdisagg.loop import StepLoop
from jaxdisagg.messages import Prefill
from jaxdisagg.page_pool import Lease, PagePool
from jaxdisagg.page_spans import pages_for
from jaxdisagg.prefill_messenger import PrefillMessenger
from jaxdisagg.request import Life, PrefillState, prefill_life
from jaxdisagg.runner import ModelRunner
from jaxdisagg.scheduler import PrefillJob, PrefillScheduler
from jaxdisagg.step_results import PrefillResult

STEPS_IN_FLIGHT = 2

Outcome = Literal["done", "cancelled", "failed"]


@dataclass(eq=False)
class PrefillRequest:
    """One PREFILL being served. Changed by the node's loop alone; times of `time.monotonic`.

    `bytes` is what its writes were acknowledged to have landed, once its transfer has ended.
    """

    message: Prefill
    peer: int
    life: Life[PrefillState]
    arrived: float
    deadline: float
    tokens: np.ndarray
    rank: int = 0
    lease: Lease | None = None
    context: int = 0
    job: PrefillJob | None = None
    transfer: int | None = None
    started: float | None = None
    computed: float | None = None
    bytes: int = 0
    ended_by: tuple[Outcome, str, str] | None = field(default=None)

    @property
    def id(self) -> str:
        """The attempt's id, unique over both nodes."""
        return self.message.request


class PrefillNode(StepLoop):
    """Chunked prefill over one runner, driven by PREFILL messages."""

    def __init__(self, node: NodeConfig, runner: ModelRunner, messenger: PrefillMessenger) -> None:
        super().__init__("prefill-loop")
        self.node = node
        self.runner = runner
        self.messenger = messenger
        self.pools = [PagePool(node.cache.pages, node.cache.page_size) for _ in range(runner.dp)]
        self._contexts = [list(range(1, runner.cache.context_rows)) for _ in range(runner.dp)]
        self._scheduler = PrefillScheduler(runner.dp, node.batch.chunks, node.batch.prefill_rows)
        self._queue: deque[PrefillRequest] = deque()
        self._requests: dict[str, PrefillRequest] = {}
        self._in_flight: deque[PrefillResult] = deque()
        self._outcomes: Counter[str] = Counter()

    # ---- what the messenger asks; on the loop ------------------------------------------------

    def accept(self, message: Prefill, peer: int, now: float) -> str | None:
        """Queue a PREFILL; a reason to answer BUSY otherwise."""
        if len(self._requests) >= self.node.max_requests:
            return f"{len(self._requests)} requests are here, max_requests={self.node.max_requests}"
        request = PrefillRequest(
            message,
            peer,
            prefill_life(message.request),
            arrived=now,
            deadline=now + message.deadline_ms / 1000,
            tokens=message.token_ids(),
        )
        self._requests[request.id] = request
        self._queue.append(request)
        return None

    def owner(self, request_id: str) -> int | None:
        """The peer whose request this is, if it is open."""
        request = self._requests.get(request_id)
        return None if request is None else request.peer

    def never_fits(self, message: Prefill) -> str | None:
        """Why this prompt can never be prefilled here, or None."""
        limit = self.node.batch.max_model_len
        if message.prompt_length > limit:
            return f"tokens: {message.prompt_length}, max_model_len is {limit} at {self.node.id}"
        need, most = self._source_pages(message), self.pools[0].counts().total
        if need > most:
            return f"the prompt needs {need} source pages, {self.node.id} has {most}"
        return None

    def cancel(self, request_id: str) -> None:
        """Stop a request: nothing more is posted; the answer is sent when its writes drained."""
        self._abort(self._requests[request_id], ("cancelled", "cancelled", "cancelled"))

    def fail_request(self, request: PrefillRequest, code: str, reason: str) -> None:
        """Stop a request that cannot be completed."""
        self._abort(request, ("failed", code, reason))

    def drop_peer(self, peer: int, reason: str) -> None:
        """A decode node is gone: end its requests. Those with a transfer end with that."""
        for request in [r for r in self._requests.values() if r.peer == peer]:
            self._abort(request, ("failed", "peer_lost", reason))

    def transfer_ended(self, request: PrefillRequest, status: str, error: str, now: float) -> None:
        """Every posted write of a request was acknowledged, or none will come any more."""
        if request.life.state is PrefillState.RUNNING:
            self._stop_scheduling(request)
        if status == "completed" and request.ended_by is None:
            self._end(request, ("done", "", ""), now)
        elif request.ended_by is not None:
            self._end(request, request.ended_by, now)
        else:
            self._end(request, ("failed", "transfer", error or status), now)

    # ---- the loop ----------------------------------------------------------------------------

    def _abort(self, request: PrefillRequest, why: tuple[Outcome, str, str]) -> None:
        if request.ended_by is not None:
            return
        request.ended_by = why
        request.deadline = time.monotonic() + self.node.timeouts.cancel_fence
        if request.life.state is PrefillState.QUEUED:
            self._queue.remove(request)
            self._end(request, why, time.monotonic())
            return
        if request.life.state is PrefillState.RUNNING:
            self._stop_scheduling(request)
        assert request.transfer is not None
        self.messenger.cancel_transfer(request.transfer)

    def _stop_scheduling(self, request: PrefillRequest) -> None:
        assert request.job is not None
        self._scheduler.remove(request.job)
        request.life.advance(PrefillState.DRAINING)

    def _end(self, request: PrefillRequest, outcome: tuple[Outcome, str, str], now: float) -> None:
        """Free the source pages, then tell the decode node what it does not know by counting."""
        what, code, reason = outcome
        if request.lease is not None:
            pool = self.pools[request.rank]
            pool.release(request.lease)
            self._contexts[request.rank].append(request.context)
        del self._requests[request.id]
        states = {
            "done": PrefillState.DONE,
            "cancelled": PrefillState.CANCELLED,
            "failed": PrefillState.FAILED,
        }
        request.life.advance(states[what])
        self._outcomes[what] += 1
        if what == "done":
            self.messenger.report(request, now)
        elif what == "cancelled":
            self.messenger.acknowledge_cancel(request.peer, request.id)
        else:
            self.messenger.report_failure(request.peer, request.id, code, reason)

    def _source_pages(self, message: Prefill) -> int:
        """By this node's page size; the destination pages in the message are of the peer's."""
        return pages_for(message.prompt_length, self.node.cache.page_size)

    def _admit(self, now: float) -> None:
        """Lease all source pages and a context row for requests in order, while they last."""
        while self._queue:
            request = self._queue[0]
            rank = max(range(self.runner.dp), key=lambda r: self.pools[r].counts().free)
            pages = self._source_pages(request.message)
            lease = self.pools[rank].lease(pages) if self._contexts[rank] else None
            if lease is None:
                return
            self._queue.popleft()
            request.rank, request.lease = rank, lease
            request.context = self._contexts[rank].pop()
            request.transfer = self.messenger.open_transfer(request)
            if request.transfer is None:
                self._end(request, ("failed", "peer_lost", "its decode node is gone"), now)
                continue
            request.job = PrefillJob(
                request.id, rank, request.tokens, lease.pages, len(request.tokens) - 1
            )
            request.life.advance(PrefillState.RUNNING)
            self._scheduler.add(request.job)

    def _expire(self, now: float) -> None:
        """End what is late: a request by its own deadline, its draining by a fence."""
        for request in [r for r in self._requests.values() if r.deadline <= now]:
            if request.ended_by is not None:
                request.deadline = math.inf
                self.messenger.fence(request.peer, f"the writes of {request.id} did not drain")
                continue
            done = request.job.scheduled if request.job else 0
            reason = (
                f"its deadline passed at {self.node.id} with {done} of "
                f"{request.message.prompt_length - 1} tokens prefilled"
            )
            self._abort(request, ("failed", "deadline", reason))

    def tick(self, now: float) -> bool:
        """Announce and dispatch one step; wait for the oldest when enough are in flight."""
        self.messenger.tick(now)
        self._expire(now)
        self._admit(now)
        step = self._scheduler.next_step()
        if step is not None:
            requests = [self._requests[chunk.job.id] for chunk in step.chunks]
            number = self.runner.next_step_number()
            self.messenger.announce_step(number, step, requests)
            contexts = {}
            for chunk, request in zip(step.chunks, requests, strict=True):
                request.started = request.started or now
                if chunk.last:
                    contexts[request.id] = request.context
                    if request.ended_by is None:  # a refused plan has ended it already
                        request.life.advance(PrefillState.DRAINING)
            self._in_flight.append(self.runner.prefill(step, contexts))
            moved = self.runner.cache.check_addresses()
            if moved is not None:
                raise RuntimeError(moved)
        if len(self._in_flight) >= STEPS_IN_FLIGHT or (self._in_flight and step is None):
            self._finish(self._in_flight.popleft())
        return bool(self._in_flight) or step is not None

    def _finish(self, result: PrefillResult) -> None:
        result.wait()
        now = time.monotonic()
        for chunk in result.step.chunks:
            request = self._requests.get(chunk.job.id)
            if request is not None and chunk.last:
                request.computed = now

    def next_deadline(self) -> float | None:
        """The first deadline of an open request, or of the messenger's."""
        times = [r.deadline for r in self._requests.values()]
        other = self.messenger.next_deadline()
        return min([*times, *([] if other is None else [other])], default=None)

    def fence(self, reason: str) -> None:
        """A failed step may have unmapped the cache: fence all peers before anything else (R19)."""
        self.messenger.close(reason)

    def on_failure(self, reason: str) -> None:
        """Nothing waits here: decode nodes have lost this one by the fence."""

    # ---- for other threads -------------------------------------------------------------------

    def outstanding_tokens(self) -> int:
        """Prompt tokens accepted and not yet scheduled, for the choice of a prefill node."""
        return sum(
            len(r.tokens) - 1 - (r.job.scheduled if r.job else 0)
            for r in list(self._requests.values())
        )

    def ready(self) -> tuple[bool, str]:
        """Whether prompts can be prefilled, and if not, why."""
        if self.failure is not None:
            return False, f"the node has failed: {self.failure}"
        return True, ""

    def state(self) -> dict[str, Any]:
        """The JSON document of /debug/state."""
        pages = Counter[str]()
        for pool in self.pools:
            pages.update(pool.counts()._asdict())
        return {
            "node": self.node.id,
            "role": self.node.role,
            "pages": dict(pages),
            "requests": dict(Counter(r.life.state.value for r in list(self._requests.values()))),
            "outcomes": dict(self._outcomes),
            "compiles_after_warm_up": self.runner.compiles_after_warm_up,
            "failure": self.failure,
            **({"processes": self.processes()} if self.processes else {}),
            **self.messenger.state(),
        }
