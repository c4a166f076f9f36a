"""Membership by heartbeats, and the client side of them."""

import asyncio
import itertools
import time
from collections import Counter

import httpx
import msgspec
import pytest
from ports import free_port

from jaxdisagg.announce import Announcer, NodeInfo
from jaxdisagg.membership import SILENCE_S, Membership, Node
from jaxdisagg.router import create_router_app
from jaxdisagg.server import bind

DEADLINE_S = 60.0
PREFILL = NodeInfo(id="p0", role="prefill", model="m", fabric_address="127.0.0.1:1")
DECODE = NodeInfo(id="d0", role="decode", model="m", url="http://127.0.0.1:2")


def changed(info: NodeInfo, **changes) -> NodeInfo:
    return msgspec.structs.replace(info, **changes)


def members_of(*infos: NodeInfo, silence_s: float = SILENCE_S) -> Membership:
    members = Membership(silence_s)
    for info in infos:
        members.announce(info, now=0.0)
    return members


@pytest.mark.parametrize(
    ("role", "field"), [("prefill", "fabric_address"), ("decode", "url"), ("mixed", "url")]
)
def test_a_node_must_say_where_it_is(role, field):
    with pytest.raises(ValueError, match=f"a {role} node must announce its {field}"):
        NodeInfo(id="x", role=role, model="m")


async def test_silent_nodes_are_dropped_by_their_own_heartbeat():
    slow = changed(DECODE, id="d1", heartbeat_s=10.0)
    members = members_of(DECODE, slow)
    members.drop_stale(3.4)
    assert [n.info.id for n in members.nodes] == ["d0", "d1"]
    members.drop_stale(3.6)
    assert [n.info.id for n in members.nodes] == ["d1"]


async def test_a_heartbeat_keeps_a_node_and_its_requests():
    members = members_of(DECODE)
    members.nodes[0].in_flight = 2
    members.nodes[0].unreachable = True
    members.announce(changed(DECODE, load=9), now=3.0)
    members.drop_stale(6.0)
    (node,) = members.nodes
    assert (node.in_flight, node.info.load, node.unreachable) == (2, 9, False)


async def wait_for(node: Node, event: asyncio.Event | None = None) -> None:
    async with node.wait(1e6):
        await (event or asyncio.Event()).wait()


async def test_a_restarted_node_replaces_the_old_one_and_ends_waits_for_it():
    members = members_of(DECODE, silence_s=0.05)
    (old,) = members.nodes
    waiting = asyncio.create_task(wait_for(old))
    await asyncio.sleep(0)
    members.announce(changed(DECODE, url="http://127.0.0.1:3"), now=1.0)
    done, _ = await asyncio.wait({waiting}, timeout=DEADLINE_S)
    assert done
    assert isinstance(waiting.exception(), TimeoutError)
    assert old.gone
    assert members.nodes[0] is not old
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(TimeoutError):
            await wait_for(old)  # as the node is gone already


async def test_a_node_that_owes_answers_is_remembered_while_it_is_gone():
    members = members_of(DECODE, silence_s=0.05)
    (node,) = members.nodes
    node.in_flight = 1
    event = asyncio.Event()
    waiting = asyncio.create_task(wait_for(node, event))
    await asyncio.sleep(0)
    members.drop_stale(10.0)
    members.drop_stale(20.0)
    assert (node.gone, members.nodes, members.candidates()) == (True, [], [])
    assert members.missing() == "no decode or mixed node has announced itself"
    members.announce(changed(DECODE, load=3), now=21.0)
    assert (node.gone, members.nodes) == (False, [node])
    await asyncio.sleep(0.1)  # longer than a node that is gone may be silent
    assert not waiting.done()
    event.set()
    async with asyncio.timeout(DEADLINE_S):
        await waiting
    node.in_flight = 0
    members.drop_stale(30.0)
    members.announce(DECODE, now=31.0)
    assert members.nodes[0] is not node


async def test_a_wait_that_just_ended_is_not_changed_any_more():
    members = members_of(DECODE, silence_s=0.01)
    (node,) = members.nodes
    node.in_flight = 1
    waiting = asyncio.create_task(wait_for(node))
    await asyncio.sleep(0)
    members.drop_stale(10.0)
    back = asyncio.get_running_loop().create_future()

    def come_back() -> None:
        members.announce(DECODE, 11.0)
        back.set_result(None)

    # Both are due in the loop's next turn: the end of the wait, then the heartbeat.
    asyncio.get_running_loop().call_later(0.01, come_back)
    time.sleep(0.05)  # noqa: ASYNC251
    async with asyncio.timeout(DEADLINE_S):
        await back
        with pytest.raises(TimeoutError):
            await waiting
    assert not node.gone


async def test_a_router_that_was_stopped_blames_no_node():
    members = members_of(DECODE)
    members.nodes[0].seen = 99.0
    members.excuse(60.0, now=160.0)
    members.drop_stale(160.0)
    assert len(members.nodes) == 1
    members.excuse(60.0, now=161.0)
    members.drop_stale(164.6)
    assert members.nodes == []


def test_models_are_those_of_the_nodes_that_serve():
    members = members_of(
        PREFILL, changed(DECODE, ready=False), changed(DECODE, id="d1", model="a", load=9)
    )
    assert members.models() == ["a", "m"]
    assert [n.info.id for n in members.candidates()] == ["d1"]
    assert [n.info.id for n in members.candidates("a")] == ["d1"]
    assert members.candidates("m") == []
    assert members.missing("a") == "no prefill node has announced itself"
    assert members.missing("m") == "no decode or mixed node is ready: d0 (busy)"


def test_the_late_farewell_of_a_replaced_node_changes_nothing():
    members = members_of(changed(DECODE, url="http://127.0.0.1:3"))
    members.leave(DECODE)
    assert len(members.nodes) == 1
    members.leave(changed(DECODE, url="http://127.0.0.1:3", load=5))
    assert members.nodes == []


def test_the_least_loaded_node_comes_first():
    infos = [changed(DECODE, id=f"d{i}", load=load) for i, load in enumerate((30, 10, 20))]
    members = members_of(*infos, PREFILL, changed(DECODE, id="d9", ready=False))
    order = lambda: [n.info.id for n in members.candidates()]  # noqa: E731
    assert order() == ["d1", "d2", "d0"]
    members.nodes[1].in_flight = 1  # counts before the announced load
    assert order() == ["d2", "d0", "d1"]
    members.nodes[2].unreachable = True
    assert order() == ["d0", "d1"]


@pytest.mark.parametrize(
    ("infos", "missing"),
    [
        ([], "no decode or mixed node has announced itself"),
        ([PREFILL], "no decode or mixed node has announced itself"),
        ([DECODE], "no prefill node has announced itself"),
        (
            [PREFILL, changed(DECODE, ready=False, missing="warm-up has not ended")],
            "no decode or mixed node is ready: d0 (warm-up has not ended)",
        ),
        (
            [DECODE, changed(PREFILL, ready=False, missing="warm-up")],
            "no prefill node is ready: p0 (warm-up)",
        ),
        ([DECODE, PREFILL], ""),
        ([changed(DECODE, role="mixed")], ""),
    ],
)
def test_what_is_missing_is_said(infos, missing):
    assert members_of(*infos).missing() == missing


async def test_announcers_learn_of_each_other_and_keep_the_list_when_the_router_is_down(
    serve, caplog, eventually
):
    """Heartbeats are missed after 1.75 s, or when the router itself stood still for 1.25 s."""
    lists, beats = [], Counter()

    def described(info: NodeInfo) -> NodeInfo:
        beats[info.id] += 1
        return info

    async def until(condition) -> None:
        """With heartbeats as fast as they are answered."""

        def met() -> bool:
            decode.changed()
            prefill.changed()
            return condition()

        await eventually(met)

    port = free_port()  # who connects to one of the kernel's choice may meet itself
    async with serve(create_router_app(), bind("127.0.0.1", port)) as url:
        decode = Announcer(url, lambda: described(DECODE), heartbeat_s=0.5, on_members=lists.append)
        prefill = Announcer(url, lambda: described(PREFILL), heartbeat_s=0.5)
        decode.start()
        prefill.start()
        await until(lambda: [n.id for n in decode.members] == ["d0", "p0"])
        assert decode.members[1].fabric_address == "127.0.0.1:1"
        assert decode.members[0].heartbeat_s == 0.5
        await until(lambda: prefill.members == decode.members)
    await until(lambda: not decode.connected and not prefill.connected)
    before = beats.copy()
    await until(lambda: all(beats[id] >= before[id] + 3 for id in ("d0", "p0")))
    assert len(decode.members) == 2
    assert caplog.text.count("does not answer") == 2  # once for each node, not for each heartbeat
    listener = bind("127.0.0.1", port)
    async with serve(create_router_app(), listener):
        await until(lambda: decode.connected and len(decode.members) == 2)
        await prefill.stop()
        await until(lambda: [n.id for n in decode.members] == ["d0"])
        await decode.stop()
    # Each change of the list was told once.
    assert all(a != b for a, b in itertools.pairwise(lists))
    assert [n.id for n in lists[-1]] == ["d0"]


async def test_an_announcer_without_a_router_stops_cleanly():
    with bind("127.0.0.1", 0) as nobody:
        port = nobody.getsockname()[1]
    announcer = Announcer(f"http://127.0.0.1:{port}", lambda: DECODE, heartbeat_s=0.05)
    announcer.start()
    await asyncio.sleep(0.1)
    async with asyncio.timeout(DEADLINE_S):
        await announcer.stop()
    assert announcer.members == ()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not an announcement"),
        (b'{"id": "x", "role": "boss", "model": "m"}', "$.role"),
        (b'{"id": "x", "role": "decode", "model": "m"}', "must announce its url"),
        (b'{"id": "x", "role": "mixed", "model": "m", "url": "u", "foo": 1}', "foo"),
    ],
)
async def test_a_malformed_announcement_is_refused(body, message):
    transport = httpx.ASGITransport(create_router_app())
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        response = await client.post("/internal/announce", content=body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
