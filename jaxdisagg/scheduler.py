"""Which tokens run in the next step: chunks of prompts, and one token of each decoding request.

Pure bookkeeping for one node: no jax, no clock. Every dp rank has its own queues; a step takes from
all of them at once, because one program serves all ranks.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


def bucket_for(buckets: Sequence[int], needed: int) -> int:
    """The smallest bucket that holds `needed`; ValueError if none does."""
    for bucket in buckets:
        if bucket >= needed:
            return bucket
    raise ValueError(f"{needed} exceeds the largest bucket {buckets[-1]}")


@dataclass(eq=False)
class PrefillJob:
    """A prompt being prefilled: rows [0, total) of it, of which `scheduled` were put into steps.

    `tokens` is the whole prompt, one more than `total`; `pages` are its page ids on dp rank `rank`,
    in the order of the tokens.
    """

    id: str
    rank: int
    tokens: Sequence[int] | np.ndarray
    pages: np.ndarray
    total: int
    scheduled: int = 0

    @property
    def left(self) -> int:
        """Rows that no step has yet."""
        return self.total - self.scheduled


@dataclass(frozen=True)
class Chunk:
    """Rows [begin, end) of a job in one step; `last` when the prompt is then prefilled."""

    job: PrefillJob
    begin: int
    end: int

    @property
    def last(self) -> bool:
        """Whether the job has no rows after this chunk."""
        return self.end == self.job.total


@dataclass(frozen=True)
class PrefillStep:
    """The chunks of one prefill step and its token bucket per dp rank."""

    bucket: int
    chunks: tuple[Chunk, ...]


class PrefillScheduler:
    """First come, first served per dp rank; a step is filled with as many rows as its bucket has.

    `buckets` are the token buckets per rank, ascending; at most `rows` jobs share a step of a rank.
    """

    def __init__(self, dp: int, buckets: Sequence[int], rows: int) -> None:
        self._buckets = tuple(buckets)
        self._rows = rows
        self._queues: list[deque[PrefillJob]] = [deque() for _ in range(dp)]

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def add(self, job: PrefillJob) -> None:
        """Queue a job on its rank."""
        if job.total < 1:
            raise ValueError(f"job {job.id}: total={job.total}, there is nothing to prefill")
        self._queues[job.rank].append(job)

    def remove(self, job: PrefillJob) -> None:
        """Take a job out; nothing more of it is scheduled. No effect if it is not queued."""
        queue = self._queues[job.rank]
        if job in queue:
            queue.remove(job)

    def next_step(self) -> PrefillStep | None:
        """The next step, its rows marked as scheduled; None when nothing waits."""
        chunks: list[Chunk] = []
        most = 0
        for queue in self._queues:
            room, rows = self._buckets[-1], self._rows
            while queue and room and rows:
                job = queue[0]
                begin, end = job.scheduled, job.scheduled + min(room, job.left)
                job.scheduled = end
                chunks.append(Chunk(job, begin, end))
                room -= end - begin
                rows -= 1
                if not job.left:
                    queue.popleft()
            most = max(most, self._buckets[-1] - room)
        if not chunks:
            return None
        return PrefillStep(bucket_for(self._buckets, most), tuple(chunks))


@dataclass(eq=False)
class DecodeRow:
    """A request in the decode batch: its seat, and the position that its next step runs.

    `token` is what that step takes if the host must tell it (the last prompt token, once); after
    that the token sampled at the seat feeds the next step. `limit` is the last position to run,
    `context` the row of the context buffer with the hidden state before it (-1: there is none).

    With drafts a step may give two tokens, and the scheduler learns so one step late: `position` is
    then the least that the row may be at, and the device, which knows, keeps to `limit`.
    """

    id: str
    rank: int
    pages: np.ndarray
    token: int
    position: int
    limit: int
    context: int = -1
    seat: int = -1
    token_given: bool = False


@dataclass(frozen=True)
class DecodeRun:
    """One row of one decode step. `token` is -1 where the seat holds it."""

    row: DecodeRow
    token: int
    position: int


@dataclass(frozen=True)
class DecodeStep:
    """The rows of one decode step and its batch bucket per dp rank."""

    bucket: int
    runs: tuple[DecodeRun, ...]


@dataclass(eq=False)
class _Rank:
    seats: list[int]
    waiting: deque[DecodeRow] = field(default_factory=deque)
    seated: list[DecodeRow] = field(default_factory=list)


class DecodeScheduler:
    """Continuous batching: rows join when a seat is free and leave when they end.

    A rank has as many seats as the largest bucket; seat number `seats` is scratch, for padding.
    """

    def __init__(self, dp: int, buckets: Sequence[int]) -> None:
        self._buckets = tuple(buckets)
        self.seats = self._buckets[-1]
        self._ranks = [_Rank(list(range(self.seats))[::-1]) for _ in range(dp)]

    def __len__(self) -> int:
        return sum(len(r.waiting) + len(r.seated) for r in self._ranks)

    def load(self, rank: int) -> int:
        """Rows that are seated or wait for a seat on a rank."""
        return len(self._ranks[rank].waiting) + len(self._ranks[rank].seated)

    def add(self, row: DecodeRow) -> None:
        """Let a READY request join as soon as a seat is free."""
        self._ranks[row.rank].waiting.append(row)

    def remove(self, row: DecodeRow) -> None:
        """End a row: its seat is free at once (steps in flight run in order before a successor)."""
        rank = self._ranks[row.rank]
        if row in rank.seated:
            rank.seated.remove(row)
            rank.seats.append(row.seat)
        elif row in rank.waiting:
            rank.waiting.remove(row)

    def ran_ahead(self, row: DecodeRow, tokens: int) -> None:
        """A step of the row gave this many tokens more than the one that was counted on."""
        row.position += tokens

    def next_step(self) -> DecodeStep | None:
        """One run of every seated row that has not reached its limit; None if there is none."""
        runs: list[DecodeRun] = []
        most = 0
        for rank in self._ranks:
            while rank.waiting and rank.seats:
                row = rank.waiting.popleft()
                row.seat = rank.seats.pop()
                rank.seated.append(row)
            before = len(runs)
            for row in rank.seated:
                if row.position <= row.limit:
                    runs.append(DecodeRun(row, -1 if row.token_given else row.token, row.position))
                    row.token_given = True
                    row.position += 1
            most = max(most, len(runs) - before)
        if not runs:
            return None
        return DecodeStep(bucket_for(self._buckets, most), tuple(runs))
