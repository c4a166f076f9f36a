"""Connecting, refusing, choosing and losing prefill nodes, with a fabric that does as told."""

import time
from collections import deque

import pytest
from nodes import wait_until

from ffi_transport.errors import PeerLost, TransferTimeout
from jaxdisagg.cache_layout import CacheLayout
from jaxdisagg.hello import NodeHello
from jaxdisagg.messages import encode
from jaxdisagg.prefill_peers import PrefillPeers


def hello(role="prefill", name="p0", **more):
    layout = CacheLayout("gqa", 2, 4, 16, more.pop("page_size", 16), 4, 1)
    values = {"num_pages": 100, "max_model_len": 512, "model": "m", "dtype": "float32"} | more
    return NodeHello(role=role, node=name, epoch=1, layout=layout, **values)


class FakeFabric:
    """Answers `connect` from a script: address -> hello, or an exception; `link` likewise."""

    def __init__(self):
        self.answers = {}
        self.lost = set()
        self.links = {}
        self.connects = []
        self.disconnected = []
        self._hellos = {}

    def connect(self, address, timeout):
        self.connects.append(address)
        answer = self.answers.get(address, TransferTimeout("nobody answers"))
        if isinstance(answer, Exception):
            raise answer
        peer = len(self.connects)
        self._hellos[peer] = encode(answer)
        return peer

    def peer_hello(self, peer):
        if peer in self.lost:
            raise PeerLost("gone")
        return self._hellos[peer]

    def link(self, peer, address, hello, timeout):
        answer = self.links.get(address, {(0, 0): peer})
        if isinstance(answer, Exception):
            raise answer
        return answer

    def admit(self, peer, hello, links):
        assert links == {(0, 0): peer}
        self.peer_hello(peer)

    def disconnect(self, peer):
        self.disconnected.append(peer)


@pytest.fixture
def world():
    """(peers, engine, run): `run` executes what was posted to the loop."""
    engine = FakeFabric()
    calls = deque()
    peers = PrefillPeers("d0", engine, hello("decode", "d0"), 1.0, calls.append)

    def run(until, what="the connection came to its end"):
        def step():
            while calls:
                calls.popleft()()
            return until()

        wait_until(step, what)

    return peers, engine, run


def settled(peers, problem):
    return lambda: problem in (peers.missing() or "")


def test_an_announced_node_is_connected_and_told_of(world):
    peers, engine, run = world
    told = []
    peers.on_change = lambda: told.append(peers.missing())
    assert "no prefill node has announced itself to d0" in peers.missing()
    engine.answers["a:1"] = hello()
    peers.refresh([("a:1", 0)])
    run(lambda: peers.missing() is None)
    assert told == [None]
    assert [p.name for p in peers.connected()] == ["p0"]
    assert peers.next_deadline() is None


def test_a_node_that_does_not_fit_is_refused_by_field_and_let_go(world):
    peers, engine, run = world
    engine.answers["a:1"] = hello(page_size=1 << 20 | 1)
    peers.refresh([("a:1", 0)])
    run(settled(peers, "refused: page_size: 1048577 on the prefill node, 16 on the decode node"))
    assert engine.disconnected == [1]
    assert peers.next_deadline() > time.monotonic() + 5


@pytest.mark.parametrize(
    "answer", [TransferTimeout("nobody answers"), ValueError("'a:1' is no address"), OSError("odd")]
)
@pytest.mark.parametrize("where", ["answers", "links"])
def test_a_failed_connection_is_told_and_tried_again(world, answer, where):
    """To its first process, or to one of the others."""
    peers, engine, run = world
    engine.answers["a:1"] = hello()
    getattr(engine, where)["a:1"] = answer
    peers.refresh([("a:1", 0)])
    run(settled(peers, str(answer)))
    engine.answers["a:1"] = hello()
    engine.links.clear()
    peers.tick(time.monotonic() + 2)
    run(lambda: peers.missing() is None)


def test_a_loss_that_was_told_before_the_connection_is_not_missed(world):
    peers, engine, run = world
    engine.answers["a:1"] = hello()
    engine.lost = {1}
    peers.refresh([("a:1", 0)])
    run(settled(peers, "gone"))
    engine.lost = set()
    # the hello is read in the thread, then the peer is lost before the loop hears of it
    original = engine.peer_hello

    def lost_after_first(peer):
        found = original(peer)
        engine.lost.add(peer)
        return found

    engine.peer_hello = lost_after_first
    peers.tick(time.monotonic() + 2)
    run(lambda: len(engine.connects) == 2 and settled(peers, "gone")())
    assert peers.connected() == []


def test_a_node_that_is_lost_at_once_is_not_tried_again_at_once(world):
    peers, engine, run = world
    engine.answers["a:1"] = hello()
    peers.refresh([("a:1", 0)])
    run(lambda: peers.missing() is None)
    (peer,) = peers.connected()
    peer.since = time.monotonic() + 10  # however long ago it was
    peers.lost(1, "greeted twice")
    assert peers.next_deadline() == peer.since + 1.0
    peers.tick(peer.since + 1.0)
    run(lambda: peers.missing() is None)
    peers.connected()[0].since -= 10
    peers.lost(2, "the peer restarted")
    assert peers.next_deadline() <= time.monotonic(), "it may be back"


def test_a_node_that_left_is_not_connected_to_for_ever(world):
    peers, engine, run = world
    engine.answers["a:1"] = hello()
    peers.refresh([("a:1", 0)])
    run(lambda: peers.missing() is None)
    peers.refresh([])
    run(lambda: True)
    assert peers.connected(), "it goes on serving while it is connected"
    peers.lost(1, "goodbye")
    assert peers.state() == {}
    assert peers.next_deadline() is None


def test_a_node_that_left_while_it_was_connected_to_is_forgotten(world):
    peers, _, run = world
    peers.refresh([("a:1", 0)])
    peers.refresh([])
    run(lambda: peers.state() == {})
    assert peers.next_deadline() is None


def test_the_least_loaded_node_that_fits_and_is_not_busy_is_chosen(world):
    peers, engine, run = world
    for i, pages in enumerate((100, 100, 5)):
        engine.answers[f"a:{i}"] = hello(name=f"p{i}", num_pages=pages)
    peers.refresh([("a:0", 50), ("a:1", 10), ("a:2", 0)])
    run(lambda: len(peers.connected()) == 3)
    now = time.monotonic()
    assert peers.choose(40, now).name == "p2"
    assert peers.choose(100, now).name == "p1"
    by_name = {p.name: p for p in peers.connected()}
    by_name["p1"].outstanding = 60
    assert peers.choose(100, now).name == "p0"
    by_name["p0"].busy_until = now + 1
    assert peers.choose(100, now).name == "p1"
    by_name["p1"].busy_until = now + 1
    assert peers.choose(100, now) is None
    assert peers.next_deadline() == now + 1
    assert peers.choose(100, now + 2).name == "p0"


def test_what_no_node_can_take_is_told_with_the_limit(world):
    peers, engine, run = world
    assert peers.never_fits(10_000) is None, "nobody is there: nothing is known"
    engine.answers["a:1"] = hello(num_pages=5)
    engine.answers["a:2"] = hello(name="p1", max_model_len=60)
    peers.refresh([("a:1", 0), ("a:2", 0)])
    run(lambda: len(peers.connected()) == 2)
    assert peers.never_fits(60) is None
    reason = peers.never_fits(100)
    assert "7 source pages, p0 has 4" in reason
    assert "a prompt of at most 60 tokens at p1" in reason
    assert peers.choose(100, time.monotonic()) is None
