"""Links between nodes of several processes: made, refused, lost and fenced; as fabrics alone."""

import time

import pytest
from group_nodes import SECONDS, Side
from group_pair import Both, arrived, fill, gqa

from ffi_transport.errors import PeerLost, TransferTimeout
from ffi_transport.events import CounterReached, MessageReceived, PeerLostEvent, TransferEnded
from jaxdisagg.hello import MemberHello, NodeHello
from jaxdisagg.messages import decode_greeting, encode


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("process", [0, 1])
def test_a_fence_closes_every_link_before_anyone_is_told(side, process):
    with Both(gqa(2), gqa(2)) as both:
        both.begin(both.request())
        both.filed(2)
        mine, peer = getattr(both, side), both.peer if side == "decode" else both.at_prefill
        dumb = mine.group.speaking[1]
        dumb.clear()
        if process:
            mine.fabric.fence(peer, "for a test")
        else:  # the loss of one link of the leader ends the others too
            mine.engines[0].fence(peer)
        own = lambda: [pair for pair in mine.fabric._owner if pair[0] == 0]  # noqa: E731
        both.run_until(lambda: not own(), "the leader's links are closed")
        other = both.decode if side == "prefill" else both.prefill
        both.run_until(lambda: other.of(PeerLostEvent), "the other side has closed all of its own")
        assert not mine.of(PeerLostEvent), "process 1 has not answered"
        assert mine.fabric.next_deadline() is not None
        dumb.set()
        both.run_until(lambda: mine.of(PeerLostEvent), "every process has closed its links")
        (lost,) = mine.of(PeerLostEvent)
        assert lost.peer == peer
        if process:
            assert lost.reason == "for a test"
        else:
            assert "between process 0 here and process 0 there" in lost.reason
        assert [e.status for e in both.prefill.of(TransferEnded)] == ["failed"]
        assert both.prefill.events.index(both.prefill.of(TransferEnded)[0]) < (
            both.prefill.events.index(both.prefill.of(PeerLostEvent)[0])
        ), "a peer is gone after its transfers"
        both.fire_all()
        with pytest.raises(PeerLost):
            both.prefill.prefill.open_transfer(both.at_prefill, 6, both.request())


def test_a_process_that_does_not_fence_in_time_fails_the_node():
    with Both(gqa(2), gqa(2), prefill={"fence_s": 0.05}) as both:
        both.prefill.group.speaking[1].clear()
        both.prefill.prefill.fence(both.at_prefill, "for a test")
        owner = both.prefill.prefill._owner
        both.run_until(lambda: {p for p, _ in owner} == {1}, "the leader's links are closed")
        deadline = both.prefill.prefill.next_deadline()
        both.prefill.prefill.tick(deadline - 0.001)
        text = "process 1 of prefill-0 did not close its links to decode-0 within"
        with pytest.raises(RuntimeError, match=text):
            both.prefill.prefill.tick(deadline + 1)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_process_that_dies_takes_the_whole_peer_along(side):
    engine = {"engine": {"heartbeat_ms": 20, "peer_timeout_ms": 400}}
    with Both(gqa(2), gqa(2), prefill=engine, decode=engine) as both:
        both.begin(both.request())
        both.filed(2)
        dying, other = (both.prefill, both.decode) if side == "prefill" else (
            both.decode, both.prefill)  # fmt: skip
        dying.engines[1].close()
        both.run_until(lambda: other.of(PeerLostEvent), "the peer is lost as a whole")
        assert "process 1 there" in other.of(PeerLostEvent)[0].reason
        assert not other.fabric._owner


def test_nodes_connect_again_after_a_fence():
    with Both(gqa(2), gqa(2)) as both:
        first = both.peer
        both.decode.decode.fence(both.peer, "for a test")
        both.run_until(
            lambda: both.decode.of(PeerLostEvent) and both.prefill.of(PeerLostEvent), "all closed"
        )
        both.connect()
        assert both.peer != first
        request = both.request()
        fill(both.prefill, 0)
        both.begin(request)
        both.fire_all()
        both.run_until(lambda: both.decode.of(CounterReached), "the count is reached")
        arrived(both.decode, 0)


def test_the_loss_of_one_node_leaves_another_alone():
    with Both(gqa(2), gqa(2)) as both:
        gone, first = both.at_prefill, both.decode
        both.begin(both.request(), slot=5)
        both.decode = Side("decode", gqa(2), 2, hello={"node": "decode-1"})
        both.sides = (*both.sides, both.decode)
        both.connect()
        both.run_until(lambda: both.at_prefill != gone and both.whole(), "the other is known")
        fill(both.prefill, 0)
        both.begin(both.request(), slot=6)
        first.engines[1].fence(1)
        both.run_until(lambda: both.prefill.of(PeerLostEvent), "one is lost")
        assert [event.peer for event in both.prefill.of(PeerLostEvent)] == [gone]
        both.filed(both.steps)
        for step in range(1, both.steps + 1):
            both.prefill.fire(step)
        both.run_until(lambda: both.decode.of(CounterReached), "the other's count is reached")
        arrived(both.decode, 0)
        assert not first.bytes(0, 0).any(), "nothing was written to the one that was lost"


def test_a_link_that_does_not_come_about_is_named_and_the_others_are_closed():
    with Both(gqa(2), gqa(2), link=False) as both:
        stranger = Side("decode", gqa(2))
        both.sides = (*both.sides, stranger)
        fabric = both.decode.decode
        for address, reason in (
            ("loopback:60000", "no answer to HELLO"),
            (stranger.address, "process 0 of decode-0, in its life"),
        ):
            peer = fabric.connect(both.prefill.address, SECONDS)
            hello = both.prefill.hello
            wrong = NodeHello(
                **{f: getattr(hello, f) for f in hello.__struct_fields__}
                | {"processes": (both.prefill.address, address)}
            )
            with pytest.raises(TransferTimeout) as caught:
                fabric.link(peer, both.prefill.address, wrong, 0.3)
            text = str(caught.value)
            if "HELLO" in reason:
                assert reason in text
            for here in (0, 1):
                assert f"process {here} has no link to process 1 of prefill-0" in text
            both.run_until(lambda: not both.prefill.prefill._owner, "no link is left")
        assert not fabric._peers


@pytest.mark.parametrize("process", [0, 1])
def test_a_link_that_is_lost_before_its_peer_is_known_is_not_missed(process):
    with Both(gqa(2), gqa(2), link=False) as both:
        fabric = both.decode.decode
        peer = fabric.connect(both.prefill.address, SECONDS)
        links = fabric.link(peer, both.prefill.address, both.prefill.hello, SECONDS)
        both.decode.engines[process].fence(links[process, 1])
        both.run_until(lambda: fabric._lost, "its loss is told")
        with pytest.raises(PeerLost, match=f"between process {process} here and process 1 there"):
            fabric.admit(peer, both.prefill.hello, links)
        both.run_until(lambda: not fabric._peers, "its other links are closed too")


def test_a_follower_that_does_not_answer_is_named_and_its_late_links_are_left():
    with Both(gqa(2), gqa(2), link=False) as both:
        fabric = both.decode.decode
        both.decode.group.hearing[1].clear()
        peer = fabric.connect(both.prefill.address, SECONDS)
        with pytest.raises(TransferTimeout, match="decode-0: process 1 did not answer"):
            fabric.link(peer, both.prefill.address, both.prefill.hello, 1.0)
        both.decode.group.hearing[1].set()
        engine = both.prefill.engines[1]
        # One of them was the leader's.
        both.run_until(lambda: engine.counters()["peers_connected"] == 2, "it connects late")
        both.run_until(lambda: engine.counters()["peers_lost"] == 2, "and takes its leave")


@pytest.mark.parametrize("process", [0, 1])
def test_members_that_do_not_belong_are_turned_away_and_harm_nobody(process):
    """At the leader of the prefill node and at its follower."""
    with Both(gqa(2), gqa(2), prefill={"stranger_s": 0.2}) as both:
        fabric = both.prefill.prefill
        epoch, node = both.decode.hello.epoch, both.decode.hello.node
        address = both.prefill.engines[process].control_address
        for hello, reason in (
            (MemberHello(node, epoch, 2), "process 2 of decode-0, which announced 2 processes"),
            (MemberHello(node, epoch, 1), "process 1 of decode-0 greeted twice"),
            (MemberHello(node, epoch ^ 1, 1), "process 1 of decode-0, a node that is not known"),
            (MemberHello("nobody", 9, 1), "process 1 of nobody, a node that is not known"),
        ):
            stranger = Side("decode", gqa(2))
            stranger.engines[0].set_hello(encode(hello))
            both.sides = (*both.sides, stranger)
            link = stranger.engines[0].connect(address, SECONDS)

            def away(stranger=stranger, link=link):
                fabric.tick(time.monotonic())
                try:
                    stranger.engines[0].peer_hello(link)
                except PeerLost:
                    return True
                return False

            both.run_until(away, f"{hello} is turned away")
            assert fabric.turned_away[-1] == f"{reason}: turned away by process {process}"
        assert both.whole()
        fill(both.prefill, 0)
        both.begin(both.request())
        both.fire_all()
        both.run_until(lambda: both.decode.of(CounterReached), "the count is reached")
        arrived(both.decode, 0)


def test_a_node_whose_members_have_not_all_come_is_missing_some():
    with Both(gqa(2), gqa(2), link=False) as both:
        both.decode.decode.connect(both.prefill.address, SECONDS)
        both.run_until(lambda: both.at_prefill, "its leader came")
        missing = both.prefill.prefill.missing(both.at_prefill)
        assert "process 0 of prefill-0 has not been greeted by process 1 of decode-0" in missing
        assert "process 1 of prefill-0 has not been greeted by process 0 of decode-0" in missing


def test_members_may_come_before_their_leader():
    with Both(gqa(2), gqa(2), link=False) as both:
        follower = both.decode.engines[1]
        for engine in both.prefill.engines:
            follower.connect(engine.control_address, SECONDS)
        strangers = both.prefill.prefill._strangers
        both.run_until(lambda: len(strangers) == 2, "both wait for their leader")
        for engine in both.prefill.engines:
            both.decode.engines[0].connect(engine.control_address, SECONDS)
        both.run_until(both.whole, "all are known")
        assert not strangers


def test_messages_come_from_leaders_alone():
    with Both(gqa(2), gqa(2)) as both:
        links = both.prefill.prefill._peers[both.at_prefill].links
        follower, leader = both.decode.engines[1], both.decode.engines[0]
        (to_leader,) = (link for link in (1, 2) if follower_peer(follower, link) == "prefill")
        follower.send(to_leader, b"from a follower")
        leader.send(both.peer, b"from the leader")
        both.run_until(lambda: both.prefill.of(MessageReceived), "a message")
        received = both.prefill.engines[0]
        both.run_until(lambda: received.counters()["messages_received"] == 2, "both came")
        both.run_until(lambda: True, "both were taken")
        assert both.prefill.of(MessageReceived) == [
            MessageReceived(links[0, 0], b"from the leader")
        ]


def follower_peer(engine, link):
    """What kind of process a link of a decode node's follower leads to."""
    hello = decode_greeting(engine.peer_hello(link))
    return hello.role if isinstance(hello, NodeHello) else "member"
