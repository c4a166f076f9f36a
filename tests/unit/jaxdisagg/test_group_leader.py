"""The leader's side of a group against followers that are channels alone."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from nodes import wait_until

from jaxdisagg.config import MeshConfig, NodeConfig, Timeouts
from jaxdisagg.group.channel import FollowerChannel
from jaxdisagg.group.errors import GroupError
from jaxdisagg.group.leader import LeaderGroup
from jaxdisagg.group.messages import Failed, Loaded, Status, Step, Stop
from jaxdisagg.loop import StepLoop

KEY = b"0123456789abcdef"
WAIT = 60.0


class Member:
    """A follower that answers Stop by ending, if it is told to be polite."""

    def __init__(self, group: LeaderGroup, process: int, *, polite: bool = True) -> None:
        self.stopped = threading.Event()
        self.reason: str | None = None
        self._polite = polite
        self.channel = FollowerChannel(
            group.address,
            process,
            key=KEY,
            silence=10.0,
            timeout=WAIT,
            on_message=self._take,
            on_lost=lambda _: None,
        )

    def _take(self, message: object) -> None:
        if isinstance(message, Stop):
            self.reason = message.reason
            self.stopped.set()
            if self._polite:
                threading.Thread(target=self.channel.close).start()


@contextmanager
def group_of(processes: int, **more) -> Iterator[LeaderGroup]:
    node = NodeConfig(
        role="mixed",
        model=Path("m"),
        mesh=MeshConfig(tp=processes, processes=processes),
        timeouts=Timeouts(member=10.0),
        **more,
    )
    group = LeaderGroup(node, KEY)
    try:
        yield group
    finally:
        group.stop("", 0.1)


def joined(group: LeaderGroup, *processes: int) -> list[Member]:
    members = [Member(group, process) for process in processes]
    group.wait_joined(WAIT)
    return members


def test_collect_takes_one_message_of_each_and_leaves_the_rest():
    with group_of(3) as group:
        one, two = joined(group, 1, 2)
        for i, member in enumerate((one, two)):
            member.channel.send(Loaded(f"weights {i}", "rules"))
        found = group.collect(Loaded, WAIT)
        assert found == {1: Loaded("weights 0", "rules"), 2: Loaded("weights 1", "rules")}
        one.channel.send(Loaded("again", ""))
        one.channel.send(Status(3, 0))
        wait_until(lambda: group.state(0, 0)["1"]["steps"] == 3, "what came before is kept")
        with pytest.raises(GroupError, match=r"no Loaded from process 2 of node within 0\.2 s"):
            group.collect(Loaded, 0.2)
        two.channel.send(Loaded("late", ""))
        assert group.collect(Loaded, WAIT)[1] == Loaded("again", "")


def test_nobody_comes():
    with group_of(3) as group, pytest.raises(GroupError, match="no word from process 1, 2 of 3"):
        group.begin(0.1)


def test_the_first_loss_is_the_reason_and_ends_every_wait():
    heard = []
    with group_of(3) as group:
        one, two = joined(group, 1, 2)
        waiting = threading.Timer(0.2, one.channel.send, [Failed("the cache moved")])
        waiting.start()
        with pytest.raises(GroupError, match="process 1: the cache moved"):
            group.collect(Loaded, WAIT)
        group.when_lost(heard.append)
        two.channel.close()
        assert group.explain("a broken pipe") == "process 1: the cache moved"
        assert heard == ["process 1: the cache moved"]
        with pytest.raises(GroupError, match="process 1: the cache moved"):
            group.check()


def test_a_loss_without_a_word_is_told_to_who_asked_before():
    told = threading.Event()
    with group_of(2) as group:
        (one,) = joined(group, 1)
        group.when_lost(lambda _: told.set())
        one.channel.close()
        assert told.wait(WAIT)
        assert group.lost == "process 1 closed its connection (end of file)"


def test_a_step_that_failed_by_itself_keeps_its_reason():
    with group_of(2) as group:
        joined(group, 1)
        assert group.explain("ValueError: x", 0.1) == "ValueError: x"


def test_state_shows_every_process():
    with group_of(2) as group:
        (one,) = joined(group, 1)
        one.channel.send(Status(7, 1))
        one.channel.send(Loaded("", ""))
        group.collect(Loaded, WAIT)
        found = group.state(9, 0)
    assert found["0"] | {"pid": 0} == {
        "pid": 0, "devices": [0, 0], "steps": 9, "compiles_after_warm_up": 0,
    }  # fmt: skip
    assert found["1"]["devices"] == [1, 1]
    assert (found["1"]["steps"], found["1"]["compiles_after_warm_up"]) == (7, 1)


def test_stop_waits_for_followers_to_end():
    with group_of(3) as group:
        members = joined(group, 1, 2)
        group.stop("the reason", WAIT)
        assert [m.stopped.is_set() for m in members] == [True, True]
        assert [m.reason for m in members] == ["the reason"] * 2
        assert group.lost is None


def test_stop_leaves_a_follower_that_does_not_end():
    with group_of(2) as group:
        rude = Member(group, 1, polite=False)
        group.wait_joined(WAIT)
        group.stop("", 0.2)
        assert rude.stopped.wait(WAIT)
        rude.channel.close()


def test_a_taken_port_is_named():
    with group_of(2) as group:
        second = group_of(2, group=group.address)
        refused = pytest.raises(GroupError, match=f"group: cannot listen at {group.address}")
        with refused, second:
            pass


class Hanging(StepLoop):
    """A loop whose tick may hang, as a collective does when another process has."""

    def __init__(self) -> None:
        super().__init__("hanging")
        self.hang = threading.Event()
        self.hanging = threading.Event()
        self.free = threading.Event()
        self.failures: list[tuple[str, str]] = []
        self.fenced: list[str] = []

    def tick(self, now: float) -> bool:
        if self.hang.is_set():
            self.hanging.set()
            self.free.wait(WAIT)
            raise RuntimeError("connection reset")
        return False

    def next_deadline(self) -> float | None:
        return None

    def fence(self, reason: str) -> None:
        assert self.failure is None, "the fence comes first"
        self.fenced.append(reason)

    def on_failure(self, reason: str) -> None:
        self.failures.append((threading.current_thread().name, reason))


def test_a_loop_that_hangs_is_failed_from_outside_once():
    loop = Hanging()
    loop.start()
    loop.hang.set()
    loop.post(lambda: None)
    assert loop.hanging.wait(WAIT)
    loop.abandon("process 1 said nothing", 0.2)
    here = threading.current_thread().name
    assert loop.failure == "process 1 said nothing"
    assert loop.failures == [(here, "process 1 said nothing")]
    loop.free.set()
    assert loop.stop(WAIT)
    assert len(loop.failures) == 1
    assert loop.failure == "process 1 said nothing"


def test_a_loop_that_runs_fails_by_itself():
    loop = Hanging()
    loop.start()
    loop.abandon("process 1 has gone", WAIT)
    assert loop.failures == [("hanging", "RuntimeError: process 1 has gone")]
    assert loop.stop(WAIT)


def test_an_exception_is_explained():
    loop = Hanging()
    loop.explain = lambda reason: f"process 2 is why ({reason}), {loop.fenced}"
    loop.hang.set()
    loop.free.set()
    loop.start()
    loop.post(lambda: None)
    assert loop.hanging.wait(WAIT)
    assert loop.stop(WAIT)
    reason = "RuntimeError: connection reset"
    assert loop.failure == f"process 2 is why ({reason}), ['{reason}']"


def test_a_message_that_no_handler_wants_is_kept_by_kind():
    seen = []
    with group_of(2) as group:
        group.on(Step, lambda process, step: seen.append((process, step)))
        (one,) = joined(group, 1)
        one.channel.send(Step("decode", 0, 2, ()))
        one.channel.send(Loaded("w", "r"))
        assert group.collect(Loaded, WAIT) == {1: Loaded("w", "r")}
    assert seen == [(1, Step("decode", 0, 2, ()))]
