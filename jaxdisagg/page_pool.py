"""The pages of one dp rank's cache: who holds them and when they may be used again.

    FREE -> LEASED -> READY | REVOKING -> FREE

A page that a remote may still write is never FREE: after `expose` (a remote was told of the
pages) a lease returns to the pool only through READY (every write was counted) or REVOKING
(writes may still come) followed by proof that none will: a drained terminal message or a hard
fence. Pure bookkeeping; no jax, no clock, no threads of its own (one thread calls it).
"""

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class PageState(enum.IntEnum):
    """What a page is doing; all pages of a lease are in one state."""

    FREE = 0
    LEASED = 1
    READY = 2
    REVOKING = 3
    SCRATCH = 4


class IllegalPageTransition(RuntimeError):
    """A lease was moved where the life cycle does not lead; the message names both states."""


class PageCounts(NamedTuple):
    """Pages by state. `total` leaves out the scratch pages, which are never leased."""

    free: int
    leased: int
    ready: int
    revoking: int

    @property
    def total(self) -> int:
        """All pages that can be leased."""
        return sum(self)


@dataclass(eq=False)
class Lease:
    """Pages held together: one request's. Only the pool that made a lease changes it.

    `pages` is a read-only uint32[n] of page ids in the order of the tokens they will hold.
    `exposed` says that a remote was told of the pages and may write them.
    """

    id: int
    pages: np.ndarray = field(repr=False)
    state: PageState = PageState.LEASED
    exposed: bool = False


class PagePool:
    """Leases the pages of one dp rank.

    Pages 0..scratch-1 take the writes of padding rows and are never leased. The free list is a
    stack: a lease takes the pages that were freed last (their lines may still be in a CPU's
    cache) and a fresh pool hands out 1, 2, 3, ..., so that neighbours can be sent as one write.
    With a `seed` the first order is shuffled instead, for tests that must not depend on it.

    Raises ValueError, naming the argument, for sizes that make no pool.
    """

    def __init__(
        self, num_pages: int, page_size: int, scratch: int = 1, *, seed: int | None = None
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size: {page_size}, must be at least 1")
        if scratch < 0:
            raise ValueError(f"scratch: {scratch}, must not be negative")
        if not scratch < num_pages <= 2**32:
            raise ValueError(
                f"num_pages: {num_pages}, must be more than the {scratch} scratch pages"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self.scratch = scratch
        self._stack = np.arange(num_pages - 1, scratch - 1, -1, dtype=np.uint32)
        if seed is not None:
            np.random.default_rng(seed).shuffle(self._stack)
        self._free = num_pages - scratch
        self._state = np.full(num_pages, PageState.FREE, dtype=np.uint8)
        self._state[:scratch] = PageState.SCRATCH
        self._held = dict.fromkeys(PageState, 0)
        self._leases: dict[int, Lease] = {}
        self._next_id = 1

    def lease(self, n: int) -> Lease | None:
        """Take n pages (n = 0 gives an empty lease), all or nothing: None if fewer are free."""
        if n < 0:
            raise ValueError(f"n: {n}, must not be negative")
        if n > self._free:
            return None
        self._free -= n
        pages = self._stack[self._free : self._free + n][::-1].copy()
        pages.setflags(write=False)
        lease = Lease(self._next_id, pages)
        self._next_id += 1
        self._leases[lease.id] = lease
        self._state[pages] = PageState.LEASED
        self._held[PageState.LEASED] += n
        return lease

    def expose(self, lease: Lease) -> None:
        """Note that a remote is about to be told of these pages. Call before PREFILL is sent.

        From here LEASED pages cannot be released: only `mark_ready` or `revoke` lead on.
        """
        self._expect(lease, "expose", PageState.LEASED)
        lease.exposed = True

    def mark_ready(self, lease: Lease) -> None:
        """LEASED -> READY: every expected write was counted, or no remote writes these pages."""
        self._move(lease, "mark_ready", PageState.READY, PageState.LEASED)

    def revoke(self, lease: Lease) -> None:
        """To REVOKING: the request is over but a remote may still write its pages.

        From LEASED on a cancel or a failure; from READY when the count was overshot, since a
        sender that wrote once too often may do so again.
        """
        self._move(lease, "revoke", PageState.REVOKING, PageState.LEASED, PageState.READY)

    def release(self, lease: Lease) -> None:
        """Give the pages back: they are FREE.

        From LEASED if no remote was told of them, from READY, and from REVOKING once the
        remote's terminal message (sent after it drained) or a hard fence proves that no write
        will come. Raises IllegalPageTransition otherwise, and for a lease released before.
        """
        self._expect(lease, "release", PageState.LEASED, PageState.READY, PageState.REVOKING)
        if lease.state is PageState.LEASED and lease.exposed:
            raise IllegalPageTransition(
                f"release: lease {lease.id} is LEASED and a remote was told of its pages; "
                "it must become READY or REVOKING first"
            )
        n = len(lease.pages)
        self._held[lease.state] -= n
        self._state[lease.pages] = PageState.FREE
        self._stack[self._free : self._free + n] = lease.pages[::-1]
        self._free += n
        lease.state = PageState.FREE
        del self._leases[lease.id]

    def counts(self) -> PageCounts:
        """How many pages are in each state. O(1)."""
        return PageCounts(
            self._free,
            self._held[PageState.LEASED],
            self._held[PageState.READY],
            self._held[PageState.REVOKING],
        )

    @property
    def revoking_share(self) -> float:
        """The share of leasable pages that is REVOKING, 0.0 to 1.0; above a quarter, fence."""
        return self._held[PageState.REVOKING] / (self.num_pages - self.scratch)

    def leases(self) -> tuple[Lease, ...]:
        """The leases that are not released, oldest first."""
        return tuple(self._leases.values())

    def check(self) -> None:
        """Compare every record with every other; raises RuntimeError naming what is off. O(n)."""
        owner = np.full(self.num_pages, PageState.FREE, dtype=np.uint8)
        owner[: self.scratch] = PageState.SCRATCH
        held = np.zeros(self.num_pages, dtype=np.int64)
        held[: self.scratch] += 1
        np.add.at(held, self._stack[: self._free], 1)
        for lease in self._leases.values():
            np.add.at(held, lease.pages, 1)
            owner[lease.pages] = lease.state
        if (held != 1).any():
            page = int(np.argmax(held != 1))
            raise RuntimeError(f"page {page} is held {int(held[page])} times, must be once")
        if (owner != self._state).any():
            page = int(np.argmax(owner != self._state))
            raise RuntimeError(
                f"page {page} is recorded {PageState(self._state[page]).name} but is "
                f"{PageState(owner[page]).name} by its lease"
            )
        counted = tuple(int((owner == s).sum()) for s in list(PageState)[:4])
        if counted != self.counts():
            raise RuntimeError(f"the counts say {self.counts()}, the pages {counted}")

    def _expect(self, lease: Lease, action: str, *allowed: PageState) -> None:
        if lease.state not in allowed or self._leases.get(lease.id) is not lease:
            raise IllegalPageTransition(
                f"{action}: lease {lease.id} is {lease.state.name}"
                + ("" if lease.state is PageState.FREE else ", or of another pool")
                + f"; allowed from {', '.join(s.name for s in allowed)}"
            )

    def _move(self, lease: Lease, action: str, to: PageState, *allowed: PageState) -> None:
        self._expect(lease, action, *allowed)
        n = len(lease.pages)
        self._held[lease.state] -= n
        self._held[to] += n
        self._state[lease.pages] = to
        lease.state = to
