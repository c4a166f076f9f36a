"""A follower without a model, led by a real leader: the order of what it does, and how it ends."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from nodes import wait_until

from jaxdisagg.config import MeshConfig, NodeConfig
from jaxdisagg.group import follower as module
from jaxdisagg.group import leader as leader_module
from jaxdisagg.group.errors import GroupError
from jaxdisagg.group.follower import Follower
from jaxdisagg.group.leader import LeaderGroup
from jaxdisagg.group.messages import Loaded, Step, Stop, WarmedUp

KEY = b"0123456789abcdef"
WAIT = 60.0
NODE = NodeConfig(role="mixed", model=Path("m"), mesh=MeshConfig(tp=2, processes=2))


class Runner:
    """Notes its steps; `moved` is what its cache says, and `broken` what a step raises."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.steps = 0
        self.compiles_after_warm_up = 0
        self.moved: str | None = None
        self.broken: Exception | None = None
        self.cache = SimpleNamespace(check_addresses=lambda: self.moved)

    def follow(self, step: Step) -> tuple[()]:
        if self.broken is not None:
            raise self.broken
        self.steps += 1
        self.log.append(f"{step.kind} {step.number}")
        return ()

    def end_warm_up(self) -> None:
        self.log.append("warm")


class Engine:
    """Notes its end."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def close(self) -> None:
        self.log.append("closed")


class Case:
    """A follower that has loaded, its leader, and what happened in which order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.runner = Runner(self.log)
        model = SimpleNamespace(fingerprint="weights", rules="rules")
        for where in (module, leader_module):
            monkeypatch.setattr(where, "initialize", lambda *_: self.log.append("initialized"))
        monkeypatch.setattr(module, "EXPLAIN_SECONDS", 0.3)
        monkeypatch.setattr(module, "load_model", lambda _: model)
        monkeypatch.setattr(module, "make_runner", lambda *_: self.runner)
        self.leader = LeaderGroup(NODE, KEY)
        self.ended: list[int | str] = []

    def follow(self, **other) -> None:
        node = replace(NODE, process=1, group=self.leader.address, **other)
        follower = Follower(node, KEY, Engine(self.log), lambda _: None)  # type: ignore[arg-type]

        def run() -> None:
            try:
                self.ended.append(follower.run())
            except GroupError as error:
                self.ended.append(str(error))

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def begin(self) -> None:
        self.leader.begin(WAIT)
        assert self.leader.collect(Loaded, WAIT) == {1: Loaded("weights", "rules")}

    def end(self) -> int | str:
        self.thread.join(WAIT)
        (how,) = self.ended
        return how


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    with made(monkeypatch) as case:
        yield case


@contextmanager
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    case = Case(monkeypatch)
    try:
        yield case
    finally:
        case.leader.stop("the test is over", 1.0)
        case.thread.join(WAIT)


def test_steps_run_in_the_order_in_which_they_were_sent(case, monkeypatch):
    monkeypatch.setattr(Follower, "_open_fabric", lambda *_: case.log.append("fabric"))
    case.follow()
    case.begin()
    for i in range(3):
        case.leader.broadcast(Step("decode", i, 2, ()))
    case.leader.broadcast(WarmedUp())
    case.leader.collect(WarmedUp, WAIT)
    for i in range(3, 40):
        case.leader.broadcast(Step("prefill" if i % 2 else "decode", i, 2, ()))
    case.leader.broadcast(WarmedUp())
    case.leader.collect(WarmedUp, WAIT)
    case.leader.stop("", WAIT)
    assert case.end() == 0
    before = ["initialized"] * 2 + [f"decode {i}" for i in range(3)] + ["warm", "fabric"]
    after = [f"{'prefill' if i % 2 else 'decode'} {i}" for i in range(3, 40)]
    assert case.log == [*before, *after, "warm", "fabric", "closed"]


def test_a_cache_that_moved_ends_the_engine_before_anybody_is_told(case):
    case.follow()
    case.begin()
    told = threading.Event()

    def note(_: str) -> None:
        case.log.append("told")
        told.set()

    case.leader.when_lost(note)
    case.runner.moved = "the cache buffer of layer 1 moved"
    case.leader.broadcast(Step("decode", 1, 2, ()))
    assert told.wait(WAIT)
    assert case.log[-2:] == ["closed", "told"]
    reason = "RuntimeError: the cache buffer of layer 1 moved"
    assert case.leader.lost == f"process 1: {reason}"
    assert case.end() == reason


def test_a_step_broken_by_another_process_is_blamed_on_that(case, monkeypatch):
    """The leader says so within the time that the follower waits for a word."""
    monkeypatch.setattr(module, "EXPLAIN_SECONDS", WAIT)
    case.follow()
    case.begin()
    case.runner.broken = ValueError("Gloo all-reduce failed: Connection reset by peer")
    case.leader.broadcast(Step("decode", 1, 2, ()))
    wait_until(lambda: "closed" in case.log, "the follower has noticed")
    case.leader.broadcast(Stop("process 2 closed its connection"))
    assert case.end() == "process 2 closed its connection"
    assert case.leader.lost is None or "closed its connection" in case.leader.lost


def test_another_configuration_ends_the_start(case):
    case.follow(max_requests=7)
    reason = "max_requests: 7 here, 256 at process 0; they must be the same"
    with pytest.raises(GroupError, match=f"process 1: {reason}"):
        case.leader.begin(WAIT)
    assert case.end() == reason
    assert case.log == ["initialized", "closed"]
