"""The PREFILLs that a decode node has sent, and what each holds beside its pages (R5).

An attempt is *awaiting* until its prefill is over, well or not; it holds its slot and its context
buffer until its request's pages go back to the pool.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from jaxdisagg.active import ActiveRequest
from jaxdisagg.group.decode_fabric import DecodeFabric
from jaxdisagg.landings import Destination
from jaxdisagg.prefill_peers import PrefillPeer
from jaxdisagg.slots import SlotAllocator


@dataclass(eq=False)
class Attempt:
    """One PREFILL: what it holds and what it expects. Times are of `time.monotonic`.

    `expected` has a number for each process of this node. `sent` once the PREFILL is out: before,
    nothing can be written for it.
    """

    id: str
    active: ActiveRequest
    peer: PrefillPeer
    slot: int
    context: int
    expected: tuple[int, ...]
    pages: int
    deadline: float
    sent: bool = False
    cancelled_at: float | None = None
    resend_at: float = field(default=float("inf"))


class Attempts:
    """All attempts of a node. `context_rows` are those of the context buffer of each dp rank."""

    def __init__(
        self, fabric: DecodeFabric, epoch: int, first_slot: int, dp: int, context_rows: int
    ) -> None:
        self._fabric = fabric
        self._epoch = epoch
        self._slots = SlotAllocator(first_slot, fabric.slot_bits)
        self._contexts = [list(range(1, context_rows)) for _ in range(dp)]
        self._awaiting: dict[str, Attempt] = {}
        self._by_slot: dict[int, Attempt] = {}
        self._by_request: dict[str, Attempt] = {}
        self._sequence = 0

    @property
    def has_room(self) -> bool:
        """Whether a slot and, on every dp rank, a context buffer are free."""
        return bool(self._slots.free) and all(self._contexts)

    @property
    def pages(self) -> int:
        """Pages held by awaiting attempts."""
        return sum(a.pages for a in self._awaiting.values())

    def open(
        self,
        active: ActiveRequest,
        peer: PrefillPeer,
        expected: tuple[int, ...],
        deadline: float,
    ) -> Attempt:
        """Take a slot and a context buffer for a request with leased pages."""
        assert active.lease is not None
        self._sequence += 1
        attempt = Attempt(
            id=f"{self._epoch:016x}-{self._sequence}",
            active=active,
            peer=peer,
            slot=self._slots.take(),
            context=self._contexts[active.rank].pop(),
            expected=expected,
            pages=len(active.lease.pages),
            deadline=deadline,
        )
        self._awaiting[attempt.id] = attempt
        self._by_slot[attempt.slot] = attempt
        self._by_request[active.id] = attempt
        peer.outstanding += active.prompt_length
        return attempt

    def arm(
        self, attempt: Attempt, destination: Destination, then: Callable[[str | None], None]
    ) -> None:
        """Arm the attempt's counters; `then` is told None when all of them wait, or why not."""
        self._fabric.arm(attempt.slot, attempt.expected, destination, then)

    def settle(self, attempt: Attempt) -> None:
        """The prefill is over: nobody waits for it any more."""
        attempt.peer.outstanding -= attempt.active.prompt_length
        del self._awaiting[attempt.id]

    def release(self, active: ActiveRequest) -> None:
        """Give back slot and context buffer of a request whose pages go back.

        Until then the slot stays armed: a duplicate that made the count early would otherwise pass
        unseen, since the unit that it stood for would only be stale (R6).
        """
        attempt = self._by_request.pop(active.id, None)
        if attempt is None:
            return  # a prompt of one token
        self._fabric.disarm(attempt.slot)
        self._slots.give(attempt.slot)
        del self._by_slot[attempt.slot]
        self._contexts[active.rank].append(attempt.context)

    def awaiting(self, attempt_id: str) -> Attempt | None:
        """An attempt whose prefill is not over."""
        return self._awaiting.get(attempt_id)

    def of_slot(self, slot: int) -> Attempt | None:
        """The attempt that holds a slot."""
        return self._by_slot.get(slot)

    def of_request(self, active: ActiveRequest) -> Attempt:
        """The present attempt of a request; KeyError if it has none."""
        return self._by_request[active.id]

    def seen(self, attempt: Attempt) -> tuple[int, ...]:
        """Units that were counted on its slot, by process."""
        return self._fabric.seen(attempt.slot)

    def arrived(self, attempt: Attempt) -> str:
        """How many of its page-writes had come, in words; by process where the node has several."""
        seen = self.seen(attempt)
        text = f"{sum(seen)} of {sum(attempt.expected)} page-writes had arrived"
        if len(seen) == 1:
            return text
        each = zip(seen, attempt.expected, strict=True)
        shares = (f"{n} of {total} in process {i}" for i, (n, total) in enumerate(each) if total)
        return f"{text}, {', '.join(shares)}"

    def state(self) -> list[dict[str, Any]]:
        """The awaiting attempts in /debug/state. For any thread."""
        return [
            {
                "request": attempt.active.id,
                "prefill_node": attempt.peer.name,
                "expected": list(attempt.expected),
                "seen": list(self.seen(attempt)),
                "cancelled": attempt.cancelled_at is not None,
            }
            for attempt in self
        ]

    def __iter__(self) -> Iterator[Attempt]:
        """The awaiting attempts, as they are now: they may end while they are gone through."""
        return iter(list(self._awaiting.values()))
