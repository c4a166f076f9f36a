"""Chunks, buckets, seats: what a step takes and in which order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdisagg.scheduler import (
    DecodeRow,
    DecodeScheduler,
    PrefillJob,
    PrefillScheduler,
    bucket_for,
)


def job(name: str, total: int, rank: int = 0) -> PrefillJob:
    return PrefillJob(name, rank, range(total + 1), np.arange(1, total // 4 + 2), total)


def row(name: str, steps: int, rank: int = 0) -> DecodeRow:
    return DecodeRow(name, rank, np.arange(1, 9), token=7, position=10, limit=10 + steps - 1)


def test_bucket_is_the_smallest_that_holds_and_the_largest_is_the_limit():
    assert [bucket_for((4, 8), n) for n in (1, 4, 5, 8)] == [4, 4, 8, 8]
    with pytest.raises(ValueError, match="9 exceeds the largest bucket 8"):
        bucket_for((4, 8), 9)


def test_a_long_prompt_is_cut_at_the_largest_bucket_and_the_rest_shares_a_step():
    scheduler = PrefillScheduler(1, (4, 8), rows=8)
    scheduler.add(job("a", 19))
    scheduler.add(job("b", 2))
    seen = []
    while (step := scheduler.next_step()) is not None:
        seen.append((step.bucket, [(c.job.id, c.begin, c.end, c.last) for c in step.chunks]))
    assert seen == [
        (8, [("a", 0, 8, False)]),
        (8, [("a", 8, 16, False)]),
        (8, [("a", 16, 19, True), ("b", 0, 2, True)]),
    ]
    assert len(scheduler) == 0


def test_rows_limit_how_many_prompts_share_a_step():
    scheduler = PrefillScheduler(1, (64,), rows=2)
    for name in "abc":
        scheduler.add(job(name, 3))
    step = scheduler.next_step()
    assert step is not None
    assert [c.job.id for c in step.chunks] == ["a", "b"]


def test_a_removed_job_is_not_scheduled_again():
    scheduler = PrefillScheduler(1, (8,), rows=8)
    first = job("a", 20)
    scheduler.add(first)
    scheduler.next_step()
    scheduler.remove(first)
    scheduler.remove(first)
    assert scheduler.next_step() is None


def test_an_empty_job_is_refused():
    with pytest.raises(ValueError, match="nothing to prefill"):
        PrefillScheduler(1, (8,), rows=8).add(job("a", 0))


@given(
    totals=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 2)), min_size=1, max_size=12),
    buckets=st.sampled_from([(4,), (4, 16), (2, 8, 32)]),
    rows=st.integers(1, 4),
)
def test_every_row_of_every_prompt_is_scheduled_once_and_in_order(totals, buckets, rows):
    scheduler = PrefillScheduler(3, buckets, rows)
    for i, (total, rank) in enumerate(totals):
        scheduler.add(job(str(i), total, rank))
    done = {str(i): 0 for i in range(len(totals))}
    while (step := scheduler.next_step()) is not None:
        for rank in range(3):
            mine = [c for c in step.chunks if c.job.rank == rank]
            assert sum(c.end - c.begin for c in mine) <= step.bucket
            assert len(mine) <= rows
        for chunk in step.chunks:
            assert chunk.begin == done[chunk.job.id] < chunk.end
            done[chunk.job.id] = chunk.end
            assert chunk.last == (chunk.end == totals[int(chunk.job.id)][0])
    assert done == {str(i): total for i, (total, _) in enumerate(totals)}


def test_a_row_gives_its_token_once_and_stops_at_its_limit():
    scheduler = DecodeScheduler(1, (2, 4))
    scheduler.add(row("a", steps=3))
    seen = []
    while (step := scheduler.next_step()) is not None:
        seen.append((step.bucket, [(r.token, r.position) for r in step.runs]))
    assert seen == [(2, [(7, 10)]), (2, [(-1, 11)]), (2, [(-1, 12)])]


def test_a_row_that_ran_ahead_is_run_less_often():
    """Told one step late: after the step that it learns of, one more was already taken."""
    scheduler = DecodeScheduler(1, (2,))
    ahead = row("a", steps=6)
    scheduler.add(ahead)
    steps = 0
    while scheduler.next_step() is not None:
        steps += 1
        if steps > 1:  # each step gave two tokens
            scheduler.ran_ahead(ahead, 1)
    assert steps == 4  # three give six tokens; the fourth was taken before the third was read


def test_rows_wait_for_a_seat_and_take_the_one_that_is_freed():
    scheduler = DecodeScheduler(1, (2,))
    rows = [row(name, steps=9) for name in "abc"]
    for r in rows:
        scheduler.add(r)
    step = scheduler.next_step()
    assert step is not None
    assert [r.row.id for r in step.runs] == ["a", "b"]
    freed = rows[0].seat
    scheduler.remove(rows[0])
    step = scheduler.next_step()
    assert step is not None
    assert [r.row.id for r in step.runs] == ["b", "c"]
    assert rows[2].seat == freed
    assert len(scheduler) == 2


def test_ranks_have_seats_of_their_own_and_share_the_bucket():
    scheduler = DecodeScheduler(2, (2, 4))
    for name in "abc":
        scheduler.add(row(name, steps=2, rank=0))
    scheduler.add(row("d", steps=2, rank=1))
    step = scheduler.next_step()
    assert step is not None
    assert step.bucket == 4
    assert sorted({r.row.seat for r in step.runs if r.row.rank == 0}) == [0, 1, 2]
