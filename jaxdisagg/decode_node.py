"""The decode side of a request's life: admit, have it prefilled, decode it, stream its tokens.

`DecodeNode` is the engine behind the HTTP server. Where a prompt is prefilled is its `Prefiller`'s
business: a remote node's (decode_messenger.py) or its own (local_prefiller.py).
"""

import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from jaxdisagg.active import ActiveRequest
from jaxdisagg.admission import Admission
from jaxdisagg.api import (
    EngineInfo,
    GenerationRequest,
    RequestError,
    RequestTiming,
    TokenOutput,
)
from jaxdisagg.config import NodeConfig
from jaxdisagg.decode_steps import DecodeSteps, Drawn
from jaxdisagg.loop import StepLoop
from jaxdisagg.page_pool import PageState
from jaxdisagg.prefiller import Prefiller
from jaxdisagg.request import DecodeState, decode_life
from jaxdisagg.runner import ModelRunner, RowSampling
from jaxdisagg.step_results import DecodeResult
from jaxdisagg.token_stream import TokenStream

KEPT_TIMINGS = 1024


class DecodeNode(StepLoop):
    """Continuous batching over one runner. Public methods are for the server's event loop."""

    def __init__(self, node: NodeConfig, runner: ModelRunner, info: EngineInfo) -> None:
        super().__init__(f"{node.role}-loop")
        self.node = node
        self.runner = runner
        self.prefiller: Prefiller | None = None
        self._info = info
        self._steps = DecodeSteps(runner, node.batch.decode_rows, drafting=node.mtp)
        self._admission = Admission(node, runner.dp)
        self.pools = self._admission.pools
        self._active: dict[str, ActiveRequest] = {}
        self._release_later: list[ActiveRequest] = []
        self._timings: OrderedDict[str, ActiveRequest] = OrderedDict()
        self._outcomes: Counter[str] = Counter()

    # ---- for the server's event loop -------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """The model and the limits."""
        return self._info

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenOutput]:
        """Stream the tokens of a request; see `api.Engine`."""
        self._admission.check(request, self.prefiller)
        seed = request.sampling.seed
        sampling = RowSampling(
            request.sampling.temperature,
            min(request.sampling.top_k, self._info.vocab_size),
            request.sampling.top_p,
            secrets.randbits(32) if seed is None else seed & 0xFFFFFFFF,
        )
        stream = TokenStream()
        active = ActiveRequest(
            request, stream, decode_life(request.id), sampling, arrived=time.monotonic()
        )
        self.post(lambda: self._submit(active))
        try:
            async for output in stream:
                yield output
        finally:
            self.post(lambda: self._client_left(active))

    def finish(self, request_id: str) -> None:
        """End a request that is being decoded as answered; see `api.Engine`."""
        self.post(lambda: self._finish_early(request_id))

    def timing(self, request_id: str) -> RequestTiming | None:
        """Where the time of a request went; None until it is all known, or when forgotten."""
        active = self._timings.get(request_id)
        return None if active is None else active.timing()

    def ready(self) -> tuple[bool, str]:
        """Whether requests can be served now, and if not, what is missing."""
        if self.failure is not None:
            return False, f"the node has failed: {self.failure}"
        missing = self.prefiller.unavailable() if self.prefiller else "not started"
        return missing is None, missing or ""

    def state(self) -> Mapping[str, Any]:
        """The JSON document of /debug/state: a consistent enough copy for a person or a test."""
        pages = Counter[str]()
        for pool in self.pools:
            pages.update(pool.counts()._asdict())
        states = Counter(a.life.state.value for a in list(self._active.values()))
        return {
            "node": self.node.id,
            "role": self.node.role,
            "pages": dict(pages),
            "requests": dict(states),
            "outcomes": dict(self._outcomes),
            **({"drafts": dict(self._steps.drafts)} if self._steps.drafts else {}),
            "compiles_after_warm_up": self.runner.compiles_after_warm_up,
            "failure": self.failure,
            **({"processes": self.processes()} if self.processes else {}),
            **(self.prefiller.state() if self.prefiller else {}),
        }

    def outstanding_tokens(self) -> int:
        """Prompt and answer tokens not yet run, for the router."""
        return sum(a.outstanding_tokens for a in list(self._active.values()))

    # ---- on the step loop ------------------------------------------------------------------

    def _submit(self, active: ActiveRequest) -> None:
        error = None
        if self.failure is not None:
            error = RequestError(503, f"the node has failed: {self.failure}", code="node_failed")
        elif active.id in self._active:
            error = RequestError(400, f"request id {active.id!r} is in use", param="request_id")
        elif len(self._active) >= self.node.max_requests:
            error = RequestError(
                429,
                f"{len(self._active)} requests are in this node, max_requests is "
                f"{self.node.max_requests}",
                code="overloaded",
            )
        if error is not None:
            active.stream.fail(error)
            return
        self._active[active.id] = active
        self._admission.add(active)

    def _client_left(self, active: ActiveRequest) -> None:
        """The stream was closed: by its end, or by a client that left before."""
        if self._active.get(active.id) is not active:
            return
        state = active.life.state
        if state is DecodeState.QUEUED:
            self._admission.remove(active)
            self._end(active, DecodeState.CANCELLED)
        elif state is DecodeState.AWAITING_PREFILL:
            self._revoke(active)
        elif state in (DecodeState.READY, DecodeState.DECODING):
            self._end(active, DecodeState.CANCELLED)

    def _finish_early(self, request_id: str) -> None:
        active = self._active.get(request_id)
        if active is not None and active.life.state is DecodeState.DECODING:
            self._end(active, DecodeState.FINISHED)

    def _revoke(self, active: ActiveRequest) -> None:
        assert active.lease is not None
        assert self.prefiller is not None
        active.life.advance(DecodeState.CANCELLING)
        self.pools[active.rank].revoke(active.lease)
        self.prefiller.cancel(active)

    def fail_request(self, active: ActiveRequest, error: RequestError) -> None:
        """Report an error for a request; nothing may be able to write its pages any more."""
        active.stream.fail(error)
        self._admission.remove(active)
        self._end(active, DecodeState.FAILED)

    def fail_and_cancel(self, active: ActiveRequest, error: RequestError) -> None:
        """Report an error for a request whose prefill is under way, and stop that."""
        active.stream.fail(error)
        active.failed = True
        self._revoke(active)

    def prefilled(self, active: ActiveRequest, now: float) -> None:
        """Every row of the prompt but the last is in the cache: the request is READY."""
        assert active.lease is not None
        active.life.advance(DecodeState.READY)
        active.ready_at = now
        self.pools[active.rank].mark_ready(active.lease)
        self._steps.add(active)
        active.life.advance(DecodeState.DECODING)

    def prefill_over(self, active: ActiveRequest) -> None:
        """A CANCELLING request's pages cannot be written any more."""
        self._end(active, DecodeState.FAILED if active.failed else DecodeState.CANCELLED)

    def hold(self, active: ActiveRequest) -> None:
        """Something may still write its pages: keep them, however it ends, until `let_go`."""
        active.held = True

    def let_go(self, active: ActiveRequest) -> None:
        """Nothing can write its pages any more; if it has ended they go back."""
        active.held = False
        if active.life.over and active.lease is not None and active not in self._release_later:
            self._release(active)

    def requeue(self, active: ActiveRequest) -> None:
        """The prefill node was busy and wrote nothing: take new pages and a new slot later."""
        self._release(active)
        active.life.advance(DecodeState.QUEUED)
        self._admission.requeue(active)

    def _end(self, active: ActiveRequest, state: DecodeState) -> None:
        """The last transition of a request; its pages go back, after the step in flight if any."""
        decoding = active.row is not None
        active.life.advance(state)
        self._outcomes[state.value] += 1
        del self._active[active.id]
        self._timings[active.id] = active
        while len(self._timings) > KEPT_TIMINGS:
            self._timings.popitem(last=False)
        if active.row is not None:
            self._steps.remove(active.row)
        if active.lease is None:
            return
        if decoding and self._steps.in_flight:
            # The step in flight may still write a row into its last page, and a remote write to
            # that page is not ordered after it.
            self._release_later.append(active)
        else:
            self._release(active)

    def _release(self, active: ActiveRequest) -> None:
        if active.held:
            return
        assert active.lease is not None
        assert self.prefiller is not None
        pool = self.pools[active.rank]
        if active.lease.state is PageState.LEASED and active.lease.exposed:
            pool.revoke(active.lease)
        self.prefiller.release(active)  # first: it waits for what still lands in a GPU
        pool.release(active.lease)
        active.lease = None

    def _admit(self, now: float) -> None:
        """Begin what can begin, and end what has waited too long."""
        assert self.prefiller is not None
        for active, error in self._admission.expired(now, self.prefiller.unavailable()):
            self.fail_request(active, error)
        for active in self._admission.admit(self.prefiller):
            if active.prompt_length == 1:
                self.prefilled(active, now)
            else:
                active.life.advance(DecodeState.AWAITING_PREFILL)
                self.prefiller.begin(active)

    def tick(self, now: float) -> bool:
        """Admit, prefill (mixed), dispatch one decode step, and read the one before it."""
        assert self.prefiller is not None
        self._admit(now)
        busy = self.prefiller.tick(now)
        previous = self._steps.dispatch(self._active)
        if previous is not None:
            self._finish(previous)
        if not self._steps.in_flight:
            self._release_all()
        return busy or self._steps.in_flight

    def _release_all(self) -> None:
        for active in self._release_later:
            self._release(active)
        self._release_later.clear()

    def _finish(self, result: DecodeResult) -> None:
        """Read a step's tokens and hand them out; rows that ended meanwhile are discarded."""
        drawn = self._steps.read(result, self._active)
        # What ended before this step was dispatched is released now that it has run.
        ended, self._release_later = self._release_later, []
        now = time.monotonic()
        for active, tokens in drawn:
            if active.first_token_at is None:
                active.first_token_at = now
                self._timings[active.id] = active
            for token in tokens:
                self._take(active, token)
                if active.life.over:
                    break  # the rest was drawn after the end
        for active in ended:
            self._release(active)

    def _take(self, active: ActiveRequest, drawn: Drawn) -> None:
        """Hand out one token, with the logprobs if they were asked for."""
        request = active.request
        if drawn.token < 0:
            text = (
                f"the model gave logits that are not finite for token {active.generated + 1} of "
                "the answer; are the weights damaged?"
            )
            self.fail_request(active, RequestError(500, text, code="not_finite"))
            return
        if drawn.token in request.stop_token_ids:
            self._end(active, DecodeState.FINISHED)
            active.stream.deliver(TokenOutput(None, finish_reason="stop"))
            return
        active.generated += 1
        done = active.generated >= request.max_tokens
        if done:
            self._end(active, DecodeState.FINISHED)
        reason = "length" if done else None
        active.stream.deliver(TokenOutput(drawn.token, drawn.logprob, drawn.top, reason))

    def next_deadline(self) -> float | None:
        """When something is due without a call: the prefiller's next time, or a waiter's end."""
        assert self.prefiller is not None
        times = (
            self.prefiller.next_deadline(),
            self._admission.next_deadline(self.prefiller.unavailable()),
        )
        return min((t for t in times if t is not None), default=None)

    def fence(self, reason: str) -> None:
        """A step failed: its donated cache is gone. Stop all writers."""
        if self.prefiller is not None:
            self.prefiller.close(reason)

    def on_failure(self, reason: str) -> None:
        """Fail every request."""
        error = RequestError(503, f"the node has failed: {reason}", code="node_failed")
        for active in list(self._active.values()):
            active.stream.fail(error)
