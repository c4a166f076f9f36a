"""The page pool against a model of it, and its guards against a pool that was tampered with."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from jaxdisagg.page_pool import IllegalPageTransition, Lease, PageCounts, PagePool, PageState

NUM_PAGES = 24


class PoolMachine(RuleBasedStateMachine):
    """Any order of calls; `held` is the plain record that the pool is compared with."""

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES, 16, seed=3)
        self.held: dict[int, tuple[frozenset[int], PageState]] = {}

    def forget_or_keep(self, lease: Lease, allowed: bool, act, state: PageState | None) -> None:
        before = self.held[lease.id]
        if not allowed:
            with pytest.raises(IllegalPageTransition, match=before[1].name):
                act(lease)
            return
        act(lease)
        if state is None:
            del self.held[lease.id]
        else:
            self.held[lease.id] = (before[0], state)

    @rule(target=live, n=st.integers(0, NUM_PAGES + 1))
    def lease(self, n: int):
        free = NUM_PAGES - 1 - sum(len(pages) for pages, _ in self.held.values())
        lease = self.pool.lease(n)
        if n > free:
            assert lease is None
            return None
        assert lease is not None
        assert lease.pages.dtype == np.uint32
        pages = frozenset(lease.pages.tolist())
        assert len(pages) == n == len(lease.pages)
        assert 0 not in pages, "the scratch page was leased"
        for other, _ in self.held.values():
            assert not pages & other, "a page was leased twice"
        self.held[lease.id] = (pages, PageState.LEASED)
        return lease

    @rule(lease=live)
    def expose(self, lease: Lease | None):
        if lease is not None and lease.id in self.held:
            allowed = self.held[lease.id][1] is PageState.LEASED
            self.forget_or_keep(lease, allowed, self.pool.expose, PageState.LEASED)

    @rule(lease=live)
    def mark_ready(self, lease: Lease | None):
        if lease is not None and lease.id in self.held:
            allowed = self.held[lease.id][1] is PageState.LEASED
            self.forget_or_keep(lease, allowed, self.pool.mark_ready, PageState.READY)

    @rule(lease=live)
    def revoke(self, lease: Lease | None):
        if lease is not None and lease.id in self.held:
            allowed = self.held[lease.id][1] in (PageState.LEASED, PageState.READY)
            self.forget_or_keep(lease, allowed, self.pool.revoke, PageState.REVOKING)

    @rule(lease=live)
    def release(self, lease: Lease | None):
        if lease is not None and lease.id in self.held:
            allowed = not (lease.exposed and self.held[lease.id][1] is PageState.LEASED)
            self.forget_or_keep(lease, allowed, self.pool.release, None)

    @rule(lease=consumes(live))
    def release_twice(self, lease: Lease | None):
        if lease is not None and lease.id not in self.held:
            with pytest.raises(IllegalPageTransition, match="FREE"):
                self.pool.release(lease)

    @invariant()
    def counts_agree(self) -> None:
        by_state = dict.fromkeys(PageState, 0)
        for pages, state in self.held.values():
            by_state[state] += len(pages)
        used = sum(by_state.values())
        assert self.pool.counts() == PageCounts(
            NUM_PAGES - 1 - used,
            by_state[PageState.LEASED],
            by_state[PageState.READY],
            by_state[PageState.REVOKING],
        )
        assert self.pool.revoking_share == by_state[PageState.REVOKING] / (NUM_PAGES - 1)
        assert {lease.id for lease in self.pool.leases()} == set(self.held)
        self.pool.check()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def leased(pool: PagePool, n: int) -> Lease:
    lease = pool.lease(n)
    assert lease is not None
    return lease


def test_fresh_pool_hands_out_neighbours_and_reuses_the_last_freed():
    pool = PagePool(10, 16)
    first, second = leased(pool, 3), leased(pool, 2)
    assert first.pages.tolist() == [1, 2, 3]
    assert second.pages.tolist() == [4, 5]
    pool.release(first)
    assert leased(pool, 3).pages.tolist() == [1, 2, 3]


def test_seed_shuffles_the_first_order_repeatably():
    orders = [leased(PagePool(100, 16, seed=s), 99).pages.tolist() for s in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(1, 100))


def test_a_lease_is_all_or_nothing():
    pool = PagePool(5, 16)
    assert pool.lease(5) is None
    assert pool.counts() == PageCounts(4, 0, 0, 0)
    leased(pool, 4)
    assert pool.lease(1) is None


def test_pages_a_remote_knows_of_never_go_straight_to_free():
    pool = PagePool(5, 16)
    lease = leased(pool, 2)
    pool.expose(lease)
    with pytest.raises(IllegalPageTransition, match="LEASED and a remote was told"):
        pool.release(lease)
    pool.revoke(lease)
    assert pool.revoking_share == 0.5
    assert pool.lease(3) is None, "REVOKING pages were leased again"
    pool.release(lease)
    assert pool.counts().free == 4


@pytest.mark.parametrize(
    ("steps", "last"),
    [
        (["mark_ready"], "mark_ready"),
        (["mark_ready"], "expose"),
        (["revoke"], "mark_ready"),
        (["revoke"], "revoke"),
        (["release"], "mark_ready"),
        (["release"], "revoke"),
        (["release"], "release"),
    ],
)
def test_illegal_transitions_name_the_action_and_the_state(steps, last):
    pool = PagePool(5, 16)
    lease = leased(pool, 1)
    for step in steps:
        getattr(pool, step)(lease)
    with pytest.raises(IllegalPageTransition, match=f"{last}: lease 1 is {lease.state.name}"):
        getattr(pool, last)(lease)
    pool.check()


def test_a_lease_of_another_pool_is_refused():
    lease = leased(PagePool(5, 16), 1)
    other = PagePool(5, 16)
    leased(other, 1)
    with pytest.raises(IllegalPageTransition, match="another pool"):
        other.release(lease)


def test_pages_cannot_be_edited():
    lease = leased(PagePool(5, 16), 2)
    with pytest.raises(ValueError, match="read-only"):
        lease.pages[0] = 4


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((1, 16), "num_pages"), ((0, 16, 0), "num_pages"), ((4, 0), "page_size"), ((4, 1, -1), "scr")],
)
def test_sizes_that_make_no_pool_are_refused_by_name(arguments, name):
    with pytest.raises(ValueError, match=name):
        PagePool(*arguments)


def test_negative_lease_is_refused():
    with pytest.raises(ValueError, match="n: -1"):
        PagePool(4, 16).lease(-1)


@pytest.mark.parametrize(
    "tamper",
    [
        lambda pool, lease: pool._stack.__setitem__(0, pool._stack[1]),
        lambda pool, lease: pool._state.__setitem__(lease.pages[0], PageState.FREE),
        lambda pool, lease: pool._leases.pop(lease.id),
        lambda pool, lease: setattr(lease, "state", PageState.READY),
        lambda pool, lease: pool._held.__setitem__(PageState.LEASED, 7),
    ],
)
def test_check_sees_a_tampered_pool(tamper):
    pool = PagePool(8, 16)
    lease = leased(pool, 3)
    pool.check()
    tamper(pool, lease)
    with pytest.raises(RuntimeError):
        pool.check()
