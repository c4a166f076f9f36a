"""The tables of request states: what holds of every path, and a few paths by name."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdisagg.request import (
    DECODE_TRANSITIONS,
    PREFILL_TRANSITIONS,
    DecodeState,
    IllegalTransition,
    Life,
    PrefillState,
    decode_life,
    prefill_life,
)

D, P = DecodeState, PrefillState


@pytest.mark.parametrize(
    "path",
    [
        [D.AWAITING_PREFILL, D.READY, D.DECODING, D.FINISHED],
        [D.READY, D.DECODING, D.FINISHED],
        [D.AWAITING_PREFILL, D.QUEUED, D.AWAITING_PREFILL, D.READY],
        [D.AWAITING_PREFILL, D.CANCELLING, D.CANCELLED],
        [D.AWAITING_PREFILL, D.CANCELLING, D.FAILED],
        [D.AWAITING_PREFILL, D.FAILED],
        [D.READY, D.DECODING, D.CANCELLED],
    ],
)
def test_decode_paths(path):
    life = decode_life("r")
    for state in path:
        life.advance(state)
        assert life.state is state


@pytest.mark.parametrize(
    "path",
    [
        [P.RUNNING, P.DRAINING, P.DONE],
        [P.RUNNING, P.DRAINING, P.CANCELLED],
        [P.CANCELLED],
        [P.FAILED],
    ],
)
def test_prefill_paths(path):
    life = prefill_life("r")
    for state in path:
        life.advance(state)
    assert life.over


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (D.CANCELLING, D.READY),  # a count reached while REVOKING frees nothing
        (D.AWAITING_PREFILL, D.CANCELLED),  # writes may still come
        (D.AWAITING_PREFILL, D.DECODING),
        (D.QUEUED, D.DECODING),
        (D.FINISHED, D.QUEUED),
    ],
)
def test_shortcuts_of_the_decode_side_are_refused(before, after):
    life = Life("r7", before, DECODE_TRANSITIONS)
    with pytest.raises(IllegalTransition, match=rf"r7: {before} -> {after} "):
        life.advance(after)
    assert life.state is before


@pytest.mark.parametrize("after", [P.DONE, P.CANCELLED, P.FAILED])
def test_a_running_prefill_ends_only_through_draining(after):
    life = Life("r", P.RUNNING, PREFILL_TRANSITIONS)
    with pytest.raises(IllegalTransition):
        life.advance(after)


@pytest.mark.parametrize("table", [DECODE_TRANSITIONS, PREFILL_TRANSITIONS])
def test_every_state_is_reached_and_reaches_an_end(table):
    states = set(table)
    assert set().union(*table.values()) <= states
    first = next(iter(states)).__class__.QUEUED
    seen, todo = {first}, [first]
    while todo:
        for state in table[todo.pop()] - seen:
            seen.add(state)
            todo.append(state)
    assert seen == states
    ends = {s for s in states if not table[s]}
    for state in states:
        reach = {state}
        while (more := reach.union(*(table[s] for s in reach))) != reach:
            reach = more
        assert reach & ends


@given(st.lists(st.sampled_from(DecodeState), max_size=12))
def test_any_walk_stays_on_the_table(walk):
    life = decode_life("r")
    visited = [life.state]
    for state in walk:
        if life.can(state):
            life.advance(state)
            visited.append(state)
        else:
            with pytest.raises(IllegalTransition):
                life.advance(state)
    assert all(b in DECODE_TRANSITIONS[a] for a, b in pairwise(visited))
    assert life.over == (life.state in (D.FINISHED, D.CANCELLED, D.FAILED))
