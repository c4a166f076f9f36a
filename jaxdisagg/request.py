"""The states of a request on each side, and which may follow which.

The numbers are the steps of a request's life in docs/architecture.md. A state that is not in the
table cannot be reached: `advance` raises instead of guessing, because every wrong order seen in
serving systems (pages freed while a peer writes, a request decoded before its cache is whole)
begins with a state that was left too early.
"""

import enum
from collections.abc import Mapping


class DecodeState(enum.StrEnum):
    """A request on the node that answers it (decode, or mixed)."""

    QUEUED = "queued"
    """Steps 1, 2: validated and tokenized; holds no pages, no slot."""
    AWAITING_PREFILL = "awaiting_prefill"
    """Steps 2 to 9: pages, slot and context buffer leased, counter armed, PREFILL sent. On a
    mixed node: this node's own prefill chunks fill the pages."""
    READY = "ready"
    """Step 10: the counter reached the expected count (or nothing was to be prefilled)."""
    DECODING = "decoding"
    """Step 10: in the decode batch, beginning with the last prompt token."""
    CANCELLING = "cancelling"
    """Step 10: the client left, the deadline passed or the peer misbehaved while writes may still
    come: CANCEL was sent, the pages are REVOKING. A count reached now changes nothing."""
    FINISHED = "finished"
    """Step 10: answered to the end; pages released."""
    CANCELLED = "cancelled"
    """Step 10: the client left and nothing can write its pages any more."""
    FAILED = "failed"
    """Step 10: an error was reported for it and nothing can write its pages any more."""


class PrefillState(enum.StrEnum):
    """A request on the prefill node. A PREFILL that is answered BUSY never becomes one."""

    QUEUED = "queued"
    """Step 4: accepted; waits until all its source pages can be leased at once."""
    RUNNING = "running"
    """Steps 4 to 7: pages leased; chunks are planned, announced and run."""
    DRAINING = "draining"
    """Steps 8, 9: no further write will be planned (last chunk ran, or cancelled, or failed);
    posted writes are still to be acknowledged. The pages are still held."""
    DONE = "done"
    """Step 9: every write acknowledged; pages released."""
    CANCELLED = "cancelled"
    """Step 10: drained after a CANCEL and CANCEL_ACK sent, or cancelled before it ran."""
    FAILED = "failed"
    """Step 10: drained (or its peer fenced) and FAILED sent, if there is still one to tell."""


_D, _P = DecodeState, PrefillState

DECODE_TRANSITIONS: Mapping[DecodeState, frozenset[DecodeState]] = {
    # straight to READY: a prompt of one token needs no prefill
    _D.QUEUED: frozenset({_D.AWAITING_PREFILL, _D.READY, _D.CANCELLED, _D.FAILED}),
    # back to QUEUED on BUSY: another prefill node is tried, with a new slot and new pages;
    # straight to FAILED on a terminal message, which the prefill node sends once drained, or when
    # the peer was fenced
    _D.AWAITING_PREFILL: frozenset({_D.READY, _D.CANCELLING, _D.QUEUED, _D.FAILED}),
    _D.CANCELLING: frozenset({_D.CANCELLED, _D.FAILED}),
    _D.READY: frozenset({_D.DECODING, _D.CANCELLED, _D.FAILED}),
    _D.DECODING: frozenset({_D.FINISHED, _D.CANCELLED, _D.FAILED}),
    _D.FINISHED: frozenset(),
    _D.CANCELLED: frozenset(),
    _D.FAILED: frozenset(),
}

PREFILL_TRANSITIONS: Mapping[PrefillState, frozenset[PrefillState]] = {
    _P.QUEUED: frozenset({_P.RUNNING, _P.CANCELLED, _P.FAILED}),
    # nothing leaves RUNNING but through DRAINING: also a cancelled request has writes in flight
    _P.RUNNING: frozenset({_P.DRAINING}),
    _P.DRAINING: frozenset({_P.DONE, _P.CANCELLED, _P.FAILED}),
    _P.DONE: frozenset(),
    _P.CANCELLED: frozenset(),
    _P.FAILED: frozenset(),
}


class IllegalTransition(RuntimeError):
    """A request was moved to a state that may not follow its own; the message names both."""


class Life[S: enum.StrEnum]:
    """Where one request is. Build one with `decode_life` or `prefill_life`."""

    def __init__(
        self,
        request_id: str,
        first: S,
        transitions: Mapping[S, frozenset[S]],
    ) -> None:
        self.request_id = request_id
        self._transitions = transitions
        self._state = first

    @property
    def state(self) -> S:
        """The present state."""
        return self._state

    @property
    def over(self) -> bool:
        """Whether no state follows: the request holds nothing any more."""
        return not self._transitions[self._state]

    def can(self, state: S) -> bool:
        """Whether `state` may follow the present one."""
        return state in self._transitions[self._state]

    def advance(self, state: S) -> None:
        """Enter `state`. Raises IllegalTransition, changing nothing, if it may not follow."""
        if not self.can(state):
            allowed = ", ".join(sorted(self._transitions[self._state])) or "nothing"
            raise IllegalTransition(
                f"request {self.request_id}: {self._state} -> {state} is not allowed; "
                f"{self._state} is followed by {allowed}"
            )
        self._state = state


def decode_life(request_id: str) -> Life[DecodeState]:
    """A request newly QUEUED on a decode or mixed node."""
    return Life(request_id, DecodeState.QUEUED, DECODE_TRANSITIONS)


def prefill_life(request_id: str) -> Life[PrefillState]:
    """A request newly QUEUED on a prefill node."""
    return Life(request_id, PrefillState.QUEUED, PREFILL_TRANSITIONS)
