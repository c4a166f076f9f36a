"""The decode steps of a node: one is dispatched before the one before it is read.

Sampled tokens stay on the device and feed the next step, so the host learns one step late what was
drawn, and which rows have ended.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxdisagg.active import ActiveRequest
from jaxdisagg.runner import ModelRunner
from jaxdisagg.scheduler import DecodeRow, DecodeScheduler
from jaxdisagg.step_results import DecodeResult


class Drawn(NamedTuple):
    """A token, with its logprob and those of the best (id, logprob) if they were asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class DecodeSteps:
    """On the node's step loop alone, but for `drafts`, which any thread may read.

    `buckets` are the batch buckets of a dp rank, ascending. `drafts` counts the tokens that the
    model proposed for others to check and those that were right; None where it does not draft.
    """

    def __init__(self, runner: ModelRunner, buckets: Sequence[int], *, drafting: bool) -> None:
        self._runner = runner
        self._scheduler = DecodeScheduler(runner.dp, buckets)
        self._in_flight: DecodeResult | None = None
        self.drafts = {"proposed": 0, "accepted": 0} if drafting else None

    @property
    def in_flight(self) -> bool:
        """Whether a step was dispatched and not handed out to be read."""
        return self._in_flight is not None

    def add(self, active: ActiveRequest) -> None:
        """Decode a request from its last prompt token on; the rows before it are in the cache."""
        assert active.lease is not None
        last = active.prompt_length - 1
        active.row = DecodeRow(
            active.id,
            active.rank,
            active.lease.pages,
            token=active.request.prompt[last],
            position=last,
            limit=last + active.request.max_tokens - 1,
            context=active.context,
        )
        self._scheduler.add(active.row)

    def remove(self, row: DecodeRow) -> None:
        """A request has ended; the step in flight may still write a row into its last page."""
        self._scheduler.remove(row)

    def dispatch(self, active: Mapping[str, ActiveRequest]) -> DecodeResult | None:
        """Dispatch the next step, if anything is to be run; returns the one before, to be read.

        `active` has the requests by id. Raises RuntimeError if the cache has moved.
        """
        step = self._scheduler.next_step()
        previous, self._in_flight = self._in_flight, None
        if step is not None:
            self._in_flight = self._runner.decode(step, lambda id: active[id].sampling)
            moved = self._runner.cache.check_addresses()
            if moved is not None:
                raise RuntimeError(moved)
        return previous

    def read(
        self, result: DecodeResult, active: Mapping[str, ActiveRequest]
    ) -> list[tuple[ActiveRequest, list[Drawn]]]:
        """Wait until a step has run; what it drew. Rows that ended meanwhile are discarded."""
        tokens, drafts = result.tokens(), result.drafts()
        running = [active.get(run.row.id) for run in result.step.runs]
        wanted = any(a is not None and a.request.sampling.logprobs is not None for a in running)
        scores = result.scores() if wanted else None
        drawn: list[tuple[ActiveRequest, list[Drawn]]] = []
        for i, (run, request, found) in enumerate(
            zip(result.step.runs, running, tokens, strict=True)
        ):
            if request is None or request.row is not run.row:
                continue
            self._scheduler.ran_ahead(run.row, len(found) - 1)
            if self.drafts is not None:
                self.drafts["proposed"] += drafts[i] >= 0
                self.drafts["accepted"] += len(found) - 1
            shown = request.request.sampling.logprobs
            if shown is None or scores is None:
                drawn.append((request, [Drawn(token) for token in found]))
            else:
                scored = [Drawn(token, *scores.of(i, j, shown)) for j, token in enumerate(found)]
                drawn.append((request, scored))
        return drawn
