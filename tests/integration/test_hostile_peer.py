"""A peer that greets wrongly or asks for nonsense is answered; others are served on."""

import dataclasses

import numpy as np
import pytest
from msgspec.structs import replace
from nodes import Pair, engine_for, generate_all, wait_until

from ffi_transport.events import MessageReceived, PeerLostEvent
from jaxdisagg import messages
from jaxdisagg.api import RequestError
from jaxdisagg.hello import ContextBuffers, MemberHello, Region
from jaxdisagg.messages import Busy, Cancel, CancelAck, Failed, Prefill, encode

PROMPT = list(range(60))


@pytest.fixture(scope="module")
def pair(golden_folder):
    with Pair(golden_folder("qwen3_untied")) as pair:
        yield pair


class Peer:
    """A decode node's engine without a decode node behind it."""

    def __init__(self, pair, raw=None, **changes):
        self.pair = pair
        self.engine = engine_for(pair.decode.node.node)
        self.memory = np.zeros(1 << 22, np.uint8)
        self.region = self.engine.register_memory(self.memory.ctypes.data, self.memory.nbytes)
        mine = pair.decode.messenger._hello
        announced = Region(self.region.descriptor, self.memory.nbytes)
        layout = changes.get("layout", mine.layout)
        shard = layout.shard_bytes
        pages = self.memory.nbytes // shard
        hello = replace(
            mine,
            node="hostile",
            num_pages=pages,
            layout=layout,
            regions=((announced,) * layout.layers,) * layout.devices,
            contexts=(ContextBuffers(announced, mine.contexts[0].buffer_bytes, 16),)
            * layout.devices,
        )
        self.engine.set_hello(raw or encode(replace(hello, **changes)))
        self.peer = self.engine.connect(pair.prefill.engine.control_address, 60.0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.close()

    def ask(self, **changes):
        """A PREFILL for PROMPT, with some fields changed, and the answer to it."""
        message = Prefill(
            request="x",
            slot=5,
            expected=(13,),
            tokens=messages.pack(PROMPT),
            pages=messages.pack([1, 2, 3, 4]),
            dp_rank=0,
            seed=0,
            deadline_ms=20_000,
            context=1,
        )
        return self.tell(replace(message, **changes))

    def tell(self, message):
        self.engine.send(self.peer, message if isinstance(message, bytes) else encode(message))
        found = []

        def answered():
            events = self.engine.poll(0.2)
            found.extend(
                messages.decode(e.payload) for e in events if isinstance(e, MessageReceived)
            )
            return bool(found)

        wait_until(answered, "an answer")
        return found[0]


def serves(pair):
    found = generate_all(pair.decode.node, [PROMPT], 3)
    assert found[0].finish_reason == "length"
    pair.idle()
    assert pair.prefill.node.failure is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": messages.pack([2**31] * 60)}, "token"),
        ({"tokens": messages.pack([255] * 59 + [256])}, "tokens: 256, the model has"),
        ({"pages": messages.pack([1, 2, 3])}, "pages: 3, a prompt of 60 tokens fills 4"),
        ({"pages": messages.pack([1, 2, 3, 2**30])}, "pages: page 1073741824"),
        ({"pages": messages.pack([1, 2, 2, 3])}, "a page is listed twice"),
        ({"expected": (12,)}, "expected: (12,) there, (13,) by prefill-0"),
        ({"expected": (13, 13)}, "expected: (13, 13) there"),
        ({"dp_rank": 1}, "dp_rank: 1"),
        ({"context": 99}, "context: buffer 99"),
        (
            {"tokens": messages.pack([1] * 5000), "pages": messages.pack(range(1, 314))},
            "tokens: 5000",
        ),
    ],
)
def test_a_prefill_that_makes_no_sense_is_refused_by_field(pair, changes, reason):
    with Peer(pair) as peer:
        answer = peer.ask(**changes)
        assert isinstance(answer, Failed)
        assert answer.code == "refused"
        assert reason in answer.reason
    serves(pair)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"regions": ()}, "regions: none"),
        ({"contexts": ()}, "no buffers at hostile"),
        ({"model": "another"}, "model: "),
    ],
)
def test_a_node_that_does_not_fit_is_told_why(pair, changes, reason):
    with Peer(pair, **changes) as peer:
        answer = peer.ask()
        assert isinstance(answer, Failed)
        assert reason in answer.reason
    serves(pair)


def test_processes_that_do_not_share_the_devices_are_refused_by_field(pair):
    """Such a HELLO cannot be made here, so its bytes are changed."""
    one = encode(replace(pair.decode.messenger._hello, node="hostile", processes=("a:1",)))
    two = one.replace(b"\xa9processes\x91\xa3a:1", b"\xa9processes\x92\xa3a:1\xa3b:1")
    assert len(two) == len(one) + 4
    with Peer(pair, raw=two) as peer:
        answer = peer.ask()
        assert isinstance(answer, Failed)
        assert "processes: 2, must share the layout's 1 devices equally" in answer.reason
    serves(pair)


def test_a_node_whose_other_process_has_not_come_is_answered_busy(pair):
    """The numbers are right: 4 pages of 3 layers and the context, in each of two processes."""
    layout = dataclasses.replace(pair.decode.messenger._hello.layout, tp=2)
    with Peer(pair, layout=layout, processes=("a:1", "b:1")) as peer:
        answer = peer.ask(expected=(13, 13))
        assert isinstance(answer, Busy)
        text = "process 0 of prefill-0 has not been greeted by process 1 of hostile"
        assert answer.reason == text
        wrong = peer.ask(request="y", expected=(26,))
        assert isinstance(wrong, Failed)
        assert "expected: (26,) there, (13, 13) by prefill-0" in wrong.reason
    serves(pair)


def test_a_member_without_its_node_is_served_nothing_and_turned_away(pair, monkeypatch):
    monkeypatch.setattr(pair.prefill.node.messenger._fabric, "_stranger_s", 0.2)
    with Peer(pair, raw=encode(MemberHello("nobody", 5, 1))) as peer:
        answer = peer.ask()
        assert isinstance(answer, Failed)
        assert "it did not greet" in answer.reason
        wait_until(
            lambda: any(isinstance(e, PeerLostEvent) for e in peer.engine.poll(0.1)),
            "it is turned away",
        )
    refused = pair.prefill.node.state()["refused"]
    assert "process 1 of nobody, a node that is not known: turned away by prefill-0" in refused
    serves(pair)


def test_a_stranger_that_calls_itself_a_served_nodes_process_is_turned_away(pair):
    mine = pair.decode.messenger._hello
    with Peer(pair, raw=encode(MemberHello(mine.node, mine.epoch, 1))) as peer:
        wait_until(
            lambda: any(isinstance(e, PeerLostEvent) for e in peer.engine.poll(0.1)),
            "it is turned away",
        )
    text = "process 1 of decode-0, which announced 1 processes: turned away by prefill-0"
    assert text in pair.prefill.node.state()["refused"]
    serves(pair)


def test_a_hello_whose_descriptor_is_garbage_is_refused(pair):
    mine = pair.decode.messenger._hello
    region = Region(b"garbage", mine.regions[0][0].length)
    with Peer(pair, regions=((region,) * mine.layout.layers,), num_pages=mine.num_pages) as peer:
        answer = peer.ask()
        assert isinstance(answer, Failed)
        assert "descriptor: 7 bytes" in answer.reason
    serves(pair)


def test_noise_and_messages_of_the_wrong_side_are_dropped(pair):
    with Peer(pair) as peer:
        for noise in (b"\x01", b"\x07hello", bytes(300), encode(CancelAck("x"))):
            peer.engine.send(peer.peer, noise)
        assert isinstance(peer.tell(Cancel("never seen")), CancelAck)
    serves(pair)


def test_a_cancel_overtakes_its_prefill(pair):
    """A CANCEL of an unknown request leaves a tombstone that refuses the PREFILL behind it."""
    with Peer(pair) as peer:
        assert peer.tell(Cancel("late")) == CancelAck("late")
        assert peer.ask(request="late") == CancelAck("late")
    serves(pair)


def test_a_prefill_that_comes_twice_gets_no_terminal_word(pair):
    with Peer(pair) as peer:
        message = Prefill("twice", 5, (13,), messages.pack(PROMPT), messages.pack([1, 2, 3, 4]),
                          0, 0, 20_000, 1)  # fmt: skip
        peer.engine.arm(5, 13)
        peer.engine.send(peer.peer, encode(message))
        first = peer.tell(message)
        assert isinstance(first, messages.Telemetry), "nothing but the report of the one request"
        wait_until(lambda: peer.engine.seen(5) == 13, "its writes")
    serves(pair)


def test_a_cancel_from_a_stranger_stops_nothing(pair):
    with Peer(pair) as owner, Peer(pair, node="stranger") as stranger:
        owner.engine.arm(5, 13)
        owner.engine.send(owner.peer, encode(
            Prefill("mine", 5, (13,), messages.pack(PROMPT), messages.pack([1, 2, 3, 4]),
                    0, 0, 20_000, 1)))  # fmt: skip
        assert stranger.tell(Cancel("mine")) == CancelAck("mine")
        wait_until(lambda: owner.engine.seen(5) == 13, "all writes came")
    serves(pair)


def test_a_deadline_that_passed_is_told_with_what_was_done(pair):
    with Peer(pair) as peer:
        answer = peer.ask(deadline_ms=0)
        assert isinstance(answer, Failed)
        assert answer.code == "deadline"
        assert "of 59 tokens prefilled" in answer.reason
    serves(pair)


@pytest.mark.parametrize("length", [60, 150])
def test_a_plan_that_is_refused_fails_its_requests_alone(pair, monkeypatch, length):
    """With one chunk, and in the first of several."""
    refuse = [True]
    original = pair.prefill.engine.add_plan

    def add_plan(*arguments):
        if refuse.pop() if refuse else False:
            raise ValueError("a page leaves its region")
        return original(*arguments)

    monkeypatch.setattr(pair.prefill.engine, "add_plan", add_plan)
    with pytest.raises(RequestError, match="a page leaves its region") as caught:
        generate_all(pair.decode.node, [list(range(length))], 3)
    assert caught.value.status == 502
    serves(pair)
