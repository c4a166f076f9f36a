"""Two nodes of several processes each, as fabrics alone: links, counters, transfers, fences."""

import time

import numpy as np
import pytest
from group_nodes import CONTEXT_BYTES, PAGES, Side, at_once, run_until

from ffi_transport import _native
from ffi_transport.errors import PeerLost, TransferTimeout
from ffi_transport.types import (
    CounterOvershoot,
    CounterReached,
    MessageReceived,
    PeerConnected,
    PeerLostEvent,
    TransferEnded,
    TriggerFault,
)
from jaxdisagg.cache_layout import CacheLayout
from jaxdisagg.hello import MemberHello, NodeHello
from jaxdisagg.messages import decode_greeting, encode, pack
from jaxdisagg.planned_request import PlannedRequest
from jaxdisagg.process_shares import ranks_of
from jaxdisagg.transfer_plan import plan

TOKENS = 36  # of prompt; 35 are sent, in 3 pages of 16
TOTAL = TOKENS - 1


def gqa(tp=2, dp=1, heads=4):
    return CacheLayout("gqa", layers=2, kv_heads=heads, head_dim=8, page_size=16, itemsize=4,
                       tp=tp, dp=dp)  # fmt: skip


def mla(tp=2, dp=1):
    return CacheLayout("mla", layers=2, kv_heads=1, head_dim=24, page_size=16, itemsize=4,
                       tp=tp, dp=dp)  # fmt: skip


class Both:
    """A prefill side and a decode side, connected as the messengers would."""

    def __init__(self, source, destination, processes=(2, 2), *, link=True, **more):
        self.prefill = Side("prefill", source, processes[0], **more.get("prefill", {}))
        self.decode = Side("decode", destination, processes[1], **more.get("decode", {}))
        self.sides = (self.prefill, self.decode)
        self.steps = 0
        self.peer = self.at_prefill = None
        self.prefill.on_event = self._greet
        if link:
            self.connect()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        at_once([side.close for side in self.sides])

    def _greet(self, event):
        """What the prefill side's messenger does with who greets it."""
        if not isinstance(event, PeerConnected):
            self.prefill.events.append(event)
            return
        hello = decode_greeting(event.hello)
        if isinstance(hello, NodeHello):
            self.prefill.prefill.know(event.peer, hello, event.hello)
            self.at_prefill = event.peer
        else:
            self.prefill.prefill.member(0, event.peer, hello.node, hello.epoch, hello.process)

    def run_until(self, condition, what):
        run_until(self.sides, condition, what)

    def connect(self):
        """Returns once the prefill side knows all of the decode side's processes."""
        fabric = self.decode.decode
        peer = fabric.connect(self.prefill.address, 5.0)
        links = fabric.link(peer, self.prefill.address, self.prefill.hello, 5.0)
        fabric.admit(peer, self.prefill.hello, links)
        self.peer = peer
        self.run_until(self.whole, "all links stand")

    def whole(self):
        known = self.at_prefill in self.prefill.prefill._peers
        return known and self.prefill.prefill.missing(self.at_prefill) is None

    def request(self, seed=7, rank=0, dp_rank=0, **changes):
        values = {
            "rank": rank,
            "dp_rank": dp_rank,
            "seed": seed,
            "total": TOTAL,
            "source_pages": pack([3, 9, 4]),
            "destination_pages": pack([11, 2, 7]),
            "context_row": 1,
            "context": 2,
        }
        return PlannedRequest(**(values | changes))

    def expected(self, request):
        moves = plan(self.prefill.layout, self.decode.layout, request.seed)
        count = self.decode.hello.process_count
        return tuple(
            moves.expected_units(
                TOKENS,
                context=True,
                destination_ranks=ranks_of(self.decode.layout, request.dp_rank, process, count),
            )
            for process in range(count)
        )

    def arm(self, slot, expected):
        told = []
        self.decode.decode.arm(slot, expected, told.append)
        self.run_until(lambda: told, "the counters are armed")
        assert told == [None]

    def begin(self, request, slot=5):
        """Arm, open and file two chunks; their triggers have not fired."""
        expected = self.expected(request)
        self.arm(slot, expected)
        fabric = self.prefill.prefill
        transfer = fabric.open_transfer(self.at_prefill, slot, request)
        for begin, end in ((0, 20), (20, TOTAL)):
            self.steps += 1
            fabric.file_step(self.steps, [(transfer, begin, end)])
        return transfer, expected

    def fire_all(self, processes=None):
        self.filed(self.steps)
        for step in (self.steps - 1, self.steps):
            self.prefill.fire(step, processes)

    def filed(self, step):
        """Wait until every follower has filed the plan: a step comes behind it in its queue."""
        filed = self.prefill.group.filed
        self.run_until(lambda: all(number >= step for number in filed.values()), "plans are filed")


def content(layout, rank, layer, page):
    """A rank's part of a page: by which byte of the whole page each is, heads coming first."""
    shards = 1 if layout.kind == "mla" else min(layout.tp, layout.kv_heads)
    first = rank * shards // layout.tp * layout.shard_bytes
    ids = np.arange(first, first + layout.shard_bytes)
    return ((ids * 31 + layer * 7 + page * 101) % 251 + 1).astype(np.uint8)


def fill(side, dp_rank):
    for rank in range(side.layout.tp):
        ordinal = side.layout.ordinal(dp_rank, rank)
        for layer in range(side.layout.layers):
            for index, page in enumerate((3, 9, 4)):
                side.bytes(ordinal, layer)[page] = content(side.layout, rank, layer, index)
        side.bytes(ordinal, side.layout.layers)[1] = np.arange(1, CONTEXT_BYTES + 1)


def arrived(side, dp_rank):
    """Every byte of the request's pages is where it belongs, and no other byte was touched."""
    for ordinal in range(side.layout.devices):
        rank, mine = ordinal % side.layout.tp, ordinal // side.layout.tp == dp_rank
        for layer in range(side.layout.layers):
            wanted = np.zeros((PAGES, side.layout.shard_bytes), np.uint8)
            for index, page in enumerate((11, 2, 7) if mine else ()):
                wanted[page] = content(side.layout, rank, layer, index)
            np.testing.assert_array_equal(side.bytes(ordinal, layer), wanted)
        context = side.bytes(ordinal, side.layout.layers)
        assert context[2].tolist() == (list(range(1, CONTEXT_BYTES + 1)) if mine else [0] * 64)
        assert not np.delete(context, 2, axis=0).any()


@pytest.mark.parametrize(
    ("source", "destination", "processes", "ranks"),
    [
        (gqa(2), gqa(2), (2, 2), (0, 0)),
        (gqa(2), gqa(4), (2, 2), (0, 0)),
        (gqa(4), gqa(2), (2, 2), (0, 0)),
        (gqa(4, heads=2), gqa(4, heads=2), (4, 2), (0, 0)),
        (gqa(2), gqa(1), (2, 1), (0, 0)),
        (gqa(1), gqa(2), (1, 2), (0, 0)),
        (mla(2), mla(2), (2, 2), (0, 0)),
        (mla(2), mla(4), (2, 4), (0, 0)),
        (gqa(1, dp=2), gqa(2, dp=2), (2, 2), (1, 0)),
        (mla(2, dp=2), mla(1, dp=2), (2, 2), (0, 1)),
        (gqa(2), gqa(2), (1, 1), (0, 0)),
    ],
    ids=lambda v: f"{v.kind}-tp{v.tp}-dp{v.dp}" if isinstance(v, CacheLayout) else None,
)
def test_every_byte_arrives_and_is_counted_where_it_landed(source, destination, processes, ranks):
    with Both(source, destination, processes) as both:
        request = both.request(rank=ranks[0], dp_rank=ranks[1])
        fill(both.prefill, request.rank)
        _, expected = both.begin(request)
        both.fire_all()
        both.run_until(lambda: both.decode.of(CounterReached), "the count is reached")
        both.run_until(lambda: both.prefill.of(TransferEnded), "the transfer has ended")
        assert both.decode.of(CounterReached) == [CounterReached(5, sum(expected))]
        (ended,) = both.prefill.of(TransferEnded)
        assert (ended.status, ended.error) == ("completed", "")
        assert ended.units_done == ended.units_planned == sum(expected)
        pages = 3 * destination.layers * destination.shard_bytes * destination.tp
        assert ended.bytes == pages + destination.tp * CONTEXT_BYTES
        arrived(both.decode, request.dp_rank)
        assert both.decode.decode.seen(5) == expected
        counted = [engine.counters()["units_received"] for engine in both.decode.engines]
        assert tuple(counted) == expected, "each process counts its own"
        both.decode.decode.disarm(5)
        wait = both.decode.group.followers.values()
        both.run_until(lambda: not any(f._armed for f in wait), "disarmed everywhere")


def test_prefill_waits_for_the_counter_of_every_process():
    with Both(gqa(2), gqa(2)) as both:
        hearing = both.decode.group.hearing[1]
        hearing.clear()
        told = []
        both.decode.decode.arm(5, (3, 4), told.append)
        both.run_until(lambda: True, "-")
        assert not told
        hearing.set()
        both.run_until(lambda: told, "the other process has armed")
        assert told == [None]


def test_a_process_that_does_not_arm_in_time_is_named():
    with Both(gqa(2), gqa(2), decode={"arm_s": 0.05}) as both:
        both.decode.group.hearing[1].clear()
        told = []
        both.decode.decode.arm(5, (3, 4), told.append)
        deadline = both.decode.decode.next_deadline()
        assert deadline is not None
        both.decode.decode.tick(deadline - 0.001)
        assert not told
        both.decode.decode.tick(deadline)
        assert told == ["process 1 of decode-0 did not arm its counter within 0.05 s"]
        assert both.decode.decode.next_deadline() is None
        both.decode.decode.disarm(5)  # goes after the Arm, whenever that is heard
        both.decode.group.hearing[1].set()
        both.arm(5, (3, 4))


def test_a_counter_that_cannot_be_armed_is_told_with_its_process():
    with Both(gqa(2), gqa(2)) as both:
        both.decode.engines[1].arm(5, 1)
        told = []
        both.decode.decode.arm(5, (3, 4), told.append)
        both.run_until(lambda: told, "an answer")
        assert told == ["process 1 of decode-0: slot 5 is already armed"]


def test_a_request_is_ready_when_every_process_has_its_count():
    with Both(gqa(2), gqa(2)) as both:
        request = both.request()
        _, expected = both.begin(request)
        both.fire_all([0])
        both.run_until(
            lambda: both.decode.engines[0].seen(5) == expected[0], "the first process has all"
        )
        both.run_until(lambda: both.decode.decode.seen(5) == (expected[0], 0), "and says so")
        assert not both.decode.of(CounterReached)
        both.fire_all([1])
        both.run_until(lambda: both.decode.of(CounterReached), "the count is reached")
        assert both.decode.of(CounterReached) == [CounterReached(5, sum(expected))]


def test_what_a_follower_counted_so_far_is_told_before_it_is_all():
    with Both(gqa(2), gqa(2)) as both:
        _, expected = both.begin(both.request())
        both.filed(1)
        both.prefill.fire(1)  # the first of two chunks
        first = 1 * both.decode.layout.layers  # a page of each layer
        both.run_until(lambda: both.decode.decode.seen(5) == (first, first), "told by its tally")
        assert first < min(expected)


def test_a_unit_too_many_in_any_process_is_told():
    with Both(gqa(2), gqa(2)) as both:
        both.arm(5, (1, 1))
        both.prefill.prefill.open_transfer(both.at_prefill, 5, both.request())
        both.prefill.prefill.file_step(1, [(1, 0, TOTAL)])
        both.filed(1)
        both.prefill.fire(1, [1])
        both.run_until(lambda: both.decode.of(CounterOvershoot), "an overshoot")
        assert not both.decode.of(CounterReached)
        assert both.decode.of(CounterOvershoot)[0].expected == 1


def test_a_cancelled_transfer_ends_when_every_process_has_drained():
    with Both(gqa(2), gqa(2)) as both:
        transfer, _ = both.begin(both.request())
        both.filed(2)
        both.prefill.group.hearing[1].clear()
        both.prefill.prefill.cancel_transfer(transfer)
        both.prefill.prefill.cancel_transfer(transfer)  # as often as one likes
        both.run_until(lambda: (0, 0) not in parts(both, transfer), "the leader's part has ended")
        assert not both.prefill.of(TransferEnded), "the other process may still write"
        both.prefill.group.hearing[1].set()
        both.run_until(lambda: both.prefill.of(TransferEnded), "all parts have ended")
        assert [e.status for e in both.prefill.of(TransferEnded)] == ["cancelled"]
        both.fire_all()
        assert not any(both.decode.bytes(r, 0).any() for r in range(2)), "nothing was posted"


def parts(both, transfer):
    return both.prefill.prefill._transfers[transfer].open


def test_the_end_of_one_part_before_its_time_ends_the_others():
    with Both(gqa(2), gqa(2)) as both:
        both.begin(both.request())
        both.filed(2)
        (native,) = both.prefill.group.followers[1]._native
        both.prefill.engines[1].cancel_transfer(native)
        both.run_until(lambda: both.prefill.of(TransferEnded), "all parts have ended")
        assert [e.status for e in both.prefill.of(TransferEnded)] == ["cancelled"]


def test_a_plan_that_one_process_refuses_fails_the_transfer_in_all():
    with Both(gqa(2), gqa(2)) as both:
        both.arm(5, (1, 1))
        fabric = both.prefill.prefill
        follower = both.prefill.group.followers[1]

        def refuse(*_):
            raise ValueError("a page leaves its region")

        follower._engine.add_plan = refuse
        transfer = fabric.open_transfer(both.at_prefill, 5, both.request())
        fabric.file_step(1, [(transfer, 0, 20)])
        both.run_until(lambda: both.prefill.of(TransferEnded), "it has ended")
        (ended,) = both.prefill.of(TransferEnded)
        assert (ended.status, ended.error) == ("failed", "process 1: a page leaves its region")


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
            peer = fabric.connect(both.prefill.address, 5.0)
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
        peer = fabric.connect(both.prefill.address, 5.0)
        links = fabric.link(peer, both.prefill.address, both.prefill.hello, 5.0)
        both.decode.engines[process].fence(links[process, 1])
        both.run_until(lambda: fabric._lost, "its loss is told")
        with pytest.raises(PeerLost, match=f"between process {process} here and process 1 there"):
            fabric.admit(peer, both.prefill.hello, links)
        both.run_until(lambda: not fabric._peers, "its other links are closed too")


def test_a_follower_that_does_not_answer_is_named_and_its_late_links_are_left():
    with Both(gqa(2), gqa(2), link=False) as both:
        fabric = both.decode.decode
        both.decode.group.hearing[1].clear()
        peer = fabric.connect(both.prefill.address, 5.0)
        with pytest.raises(TransferTimeout, match="decode-0: process 1 did not answer"):
            fabric.link(peer, both.prefill.address, both.prefill.hello, 0.1)
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
            link = stranger.engines[0].connect(address, 5.0)

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
        both.decode.decode.connect(both.prefill.address, 5.0)
        both.run_until(lambda: both.at_prefill, "its leader came")
        missing = both.prefill.prefill.missing(both.at_prefill)
        assert "process 0 of prefill-0 has not been greeted by process 1 of decode-0" in missing
        assert "process 1 of prefill-0 has not been greeted by process 0 of decode-0" in missing


def test_members_may_come_before_their_leader():
    with Both(gqa(2), gqa(2), link=False) as both:
        follower = both.decode.engines[1]
        for engine in both.prefill.engines:
            follower.connect(engine.control_address, 5.0)
        strangers = both.prefill.prefill._strangers
        both.run_until(lambda: len(strangers) == 2, "both wait for their leader")
        for engine in both.prefill.engines:
            both.decode.engines[0].connect(engine.control_address, 5.0)
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


def test_a_trigger_fault_of_a_follower_is_told_with_its_process():
    with Both(gqa(2), gqa(2)) as both:
        both.begin(both.request())
        both.filed(2)
        shard = both.prefill.caches[1].shards()[0]
        moved = shard.address + 64
        _native.fire_trigger(both.prefill.engines[1].index, 1, shard.ordinal, 0, moved)
        both.run_until(lambda: both.prefill.of(TriggerFault), "the fault is told")
        (fault,) = both.prefill.of(TriggerFault)
        assert fault.kind == "address_changed"
        assert fault.detail.startswith("in process 1: ")


def test_state_sums_the_processes_and_shows_each():
    with Both(gqa(2), gqa(2)) as both:
        _, expected = both.begin(both.request())
        both.fire_all()
        both.run_until(lambda: both.decode.of(CounterReached), "the count is reached")

        def told():
            return both.decode.decode.state()["units_received"] == sum(expected)

        both.run_until(told, "the follower's tally")
        state = both.decode.decode.state()
        each = [state["processes"][str(p)]["units_received"] for p in (0, 1)]
        assert each == list(expected)
        assert [d["process"] for d in state["domains"]] == [0, 1]
        assert [d["units_counted"] for d in state["domains"]] == list(expected)
