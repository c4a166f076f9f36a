"""What a decode node does while another process has not answered yet: arming, and fencing.

The pair here has one process a side; its fabric is made to answer when the test says so.
"""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from nodes import Pair, generate_all, wait_until

from ffi_transport.events import CounterOvershoot
from jaxdisagg import messages
from jaxdisagg.api import GenerationRequest, RequestError
from jaxdisagg.config import BatchConfig

PROMPT = list(range(60))


@pytest.fixture(scope="module")
def whole(golden_folder):
    few = BatchConfig(chunks=(64,), decode_rows=(2,), max_model_len=512)
    with Pair(golden_folder("qwen3_untied"), batch=few) as pair:
        yield pair


@pytest.fixture
def pair(whole):
    """Serves before and after each test, with all pages free."""
    yield whole
    wait_until(lambda: whole.decode.messenger.unavailable() is None, "connected")
    assert len(generate_all(whole.decode.node, [PROMPT], 3)[0].tokens) == 3
    whole.idle()


@pytest.fixture
def arming(pair, monkeypatch):
    """Counters arm, but the answers wait here: a list of the calls that bring them.

    `sent` of it is what goes to the prefill node.
    """
    fabric, held = pair.decode.messenger._fabric, Answers()
    arm, send = fabric.arm, fabric.send

    def later(slot, expected, destination, then):
        arm(slot, expected, destination, lambda problem: held.append((then, problem)))

    def record(peer, payload):
        held.sent.append(type(messages.decode(payload)))
        send(peer, payload)

    monkeypatch.setattr(fabric, "arm", later)
    monkeypatch.setattr(fabric, "send", record)
    yield held
    monkeypatch.undo()


class Answers(list):
    def __init__(self):
        super().__init__()
        self.sent = []


def on_loop(pair, call):
    """Run a call on the decode node's loop; returns when it has run."""
    ran = threading.Event()
    pair.decode.node.post(lambda: (call(), ran.set()))
    assert ran.wait(30)


async def begun(pair, name, tokens=3):
    stream = pair.decode.node.generate(GenerationRequest(name, tuple(PROMPT), tokens))
    return stream, asyncio.create_task(anext(stream))


def test_prefill_is_sent_when_all_have_armed(pair, arming):
    async def run():
        stream, first = await begun(pair, "armed")
        await asyncio.to_thread(wait_until, lambda: arming, "armed")
        assert arming.sent == []
        ((then, problem),) = arming
        pair.decode.node.post(lambda: then(problem))
        await first
        await stream.aclose()

    asyncio.run(run())
    assert arming.sent[0] is messages.Prefill


def test_a_client_that_leaves_before_is_over_at_once(pair, arming):
    """There is nothing to cancel at the prefill node, and nothing goes out afterwards."""

    async def run():
        stream, first = await begun(pair, "left")
        await asyncio.to_thread(wait_until, lambda: arming, "armed")
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await stream.aclose()

    asyncio.run(run())
    pair.idle()
    ((then, problem),) = arming
    on_loop(pair, lambda: then(problem))
    assert arming.sent == []


def test_what_went_wrong_while_arming_is_the_requests_error(pair, arming):
    async def run():
        _, first = await begun(pair, "silent")
        await asyncio.to_thread(wait_until, lambda: arming, "armed")
        ((then, _),) = arming
        text = "process 1 of decode-0 did not arm its counter within 10 s"
        pair.decode.node.post(lambda: then(text))
        with pytest.raises(RequestError, match=text) as caught:
            await first
        assert caught.value.status == 504

    asyncio.run(run())
    pair.idle()
    assert arming.sent == []


def test_a_peer_lost_while_arming_ends_the_request(pair, arming):
    async def run():
        _, first = await begun(pair, "lost")
        await asyncio.to_thread(wait_until, lambda: arming, "armed")
        (peer,) = pair.decode.messenger.peers.connected()
        cancellation = pair.decode.messenger._cancellation
        pair.decode.node.post(lambda: cancellation.fence(peer, "for a test"))
        with pytest.raises(RequestError, match="for a test"):
            await first
        ((then, problem),) = arming
        on_loop(pair, lambda: then(problem))

    asyncio.run(run())
    pair.idle()
    assert arming.sent == []


def test_what_has_arrived_is_told_by_process(pair, monkeypatch):
    messenger = pair.decode.messenger
    monkeypatch.setattr(messenger._fabric, "seen", lambda slot: (4, 1, 0))
    attempt: Any = SimpleNamespace(slot=1, expected=(4, 6, 0))
    text = "5 of 10 page-writes had arrived, 4 of 4 in process 0, 1 of 6 in process 1"
    assert messenger._attempts.arrived(attempt) == text


@pytest.mark.parametrize("end", ["it is answered", "its client leaves", "the fence comes first"])
def test_pages_that_were_written_too_often_are_kept_until_every_process_has_fenced(
    pair, monkeypatch, end
):
    messenger = pair.decode.messenger
    fences = []
    fence = messenger._fabric.fence
    monkeypatch.setattr(messenger._fabric, "fence", lambda *what: fences.append(what))
    pool = pair.decode.node.pools[0]

    async def run():
        tokens = 400 if end == "the fence comes first" else 60
        stream, first = await begun(pair, "overshot", tokens)
        await first
        (attempt,) = messenger._attempts._by_request.values()
        event = CounterOvershoot(attempt.slot, attempt.expected[0], attempt.expected[0] + 1)
        pair.decode.node.post(lambda: messenger._handle(event))
        await asyncio.to_thread(wait_until, lambda: fences, "a fence was asked for")
        if end == "it is answered":
            async for _ in stream:
                pass
        elif end == "its client leaves":
            await stream.aclose()
        else:
            pair.decode.node.post(lambda: fence(*fences[0]))
            with pytest.raises(RequestError, match="page-writes were counted where"):
                async for _ in stream:
                    pass
            return
        node = pair.decode.node
        await asyncio.to_thread(wait_until, lambda: not node.state()["requests"], "it has ended")
        assert pool.counts().free < pool.counts().total, "its pages are still kept"
        node.post(lambda: fence(*fences[0]))

    asyncio.run(run())
    pair.idle()
