"""Steps that were dispatched: what the host reads of them, once they have run."""

from dataclasses import dataclass

import jax
import numpy as np

from jaxdisagg.scheduler import DecodeStep, PrefillStep
from jaxdisagg.step import DecodeOutputs


@dataclass(frozen=True)
class Scores:
    """Logprobs of a step's tokens by (run, place in the run): [runs, k], best ones [runs, k, n]."""

    chosen: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray

    def of(self, run: int, place: int, n: int) -> tuple[float, tuple[tuple[int, float], ...]]:
        """The logprob of one token, and the best n (id, logprob) of its distribution."""
        ids, logprobs = self.top_ids[run, place, :n], self.top_logprobs[run, place, :n]
        best = tuple(zip(ids.tolist(), logprobs.tolist(), strict=True))
        return float(self.chosen[run, place]), best


@dataclass(frozen=True)
class DecodeResult:
    """A dispatched decode step; `index[i]` is where the output of its i-th run is.

    A run gives k tokens at most: 1, or 2 with drafts. Reading blocks until the step has run.
    """

    step: DecodeStep
    index: np.ndarray
    outputs: DecodeOutputs

    def tokens(self) -> list[list[int]]:
        """The tokens of each run, in order; none of a run whose row had reached its limit."""
        tokens = self._of_runs(self.outputs.tokens).tolist()
        if self.outputs.counts is None:
            return tokens
        counts = np.asarray(self.outputs.counts)[self.index].tolist()
        return [found[:n] for found, n in zip(tokens, counts, strict=True)]

    def scores(self) -> Scores:
        """The logprobs of all tokens."""
        out = self.outputs
        return Scores(*map(self._of_runs, (out.logprobs, out.top_ids, out.top_logprobs)))

    def drafts(self) -> list[int]:
        """The token that each run proposed as its second, -1 where none."""
        if self.outputs.drafts is None:
            return [-1] * len(self.index)
        return np.asarray(self.outputs.drafts)[self.index].tolist()

    def _of_runs(self, array: jax.Array) -> np.ndarray:
        k = 1 if self.outputs.counts is None else 2
        return np.asarray(array).reshape(-1, k, *array.shape[1:])[self.index]


@dataclass(frozen=True)
class PrefillResult:
    """A dispatched prefill step."""

    step: PrefillStep
    states: jax.Array

    def wait(self) -> None:
        """Block until the step has run."""
        self.states.block_until_ready()
