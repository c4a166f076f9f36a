"""The channel between the processes of a node, against honest, silent, dead and hostile others."""

import queue
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection
from typing import Any

import pytest

from jaxdisagg.group.channel import FollowerChannel, LeaderChannel
from jaxdisagg.group.errors import GroupError
from jaxdisagg.group.messages import Failed, Join, Ping, Step, Stop, encode

KEY = b"the key of this node"
WAIT = 60.0  # seconds after which a test has failed


class Inbox:
    """What one side was told, in order."""

    def __init__(self) -> None:
        self.messages: queue.Queue[Any] = queue.Queue()
        self.lost: queue.Queue[Any] = queue.Queue()

    def on_message(self, *what: Any) -> None:
        self.messages.put(what if len(what) > 1 else what[0])

    def on_lost(self, *what: Any) -> None:
        self.lost.put(what if len(what) > 1 else what[0])


@contextmanager
def leader(size: int = 2, silence: float = 10.0) -> Iterator[tuple[LeaderChannel, Inbox]]:
    inbox = Inbox()
    channel = LeaderChannel(
        size, key=KEY, silence=silence, on_message=inbox.on_message, on_lost=inbox.on_lost
    )
    try:
        yield channel, inbox
    finally:
        channel.close()


@contextmanager
def follower(
    channel: LeaderChannel, process: int, *, key: bytes = KEY, silence: float = 10.0
) -> Iterator[tuple[FollowerChannel, Inbox]]:
    inbox = Inbox()
    mine = FollowerChannel(
        channel.address,
        process,
        key=key,
        silence=silence,
        timeout=WAIT,
        on_message=inbox.on_message,
        on_lost=inbox.on_lost,
    )
    try:
        yield mine, inbox
    finally:
        mine.close()


def raw(channel: LeaderChannel, process: int | None = None) -> Connection:
    """A connection that no FollowerChannel serves; joined as `process`."""
    host, _, port = channel.address.rpartition(":")
    connection = Client((host, int(port)), authkey=KEY)
    if process is not None:
        connection.send_bytes(encode(Join(process, 0)))
    return connection


def test_messages_keep_their_order_both_ways_whatever_their_size() -> None:
    big = bytes(range(256)) * (8 << 12)  # 8 MiB, more than any socket buffer
    steps = [Step("decode", i, 2, (big if i % 7 == 3 else b"x",)) for i in range(20)]
    with (
        leader(3) as (channel, heard),
        follower(channel, 2) as (two, of_two),
        follower(channel, 1) as (_, of_one),
    ):
        channel.wait_joined(WAIT)
        for step in steps:
            channel.broadcast(step)
            two.send(step)
        channel.send(1, Stop("just you"))
        assert [of_one.messages.get(timeout=WAIT) for _ in steps] == steps
        assert of_one.messages.get(timeout=WAIT) == Stop("just you")
        assert [of_two.messages.get(timeout=WAIT) for _ in steps] == steps
        assert [heard.messages.get(timeout=WAIT) for _ in steps] == [(2, s) for s in steps]


def test_what_was_sent_before_close_arrives() -> None:
    with leader() as (channel, heard), follower(channel, 1) as (one, _):
        channel.wait_joined(WAIT)
        for _ in range(50):
            one.send(Failed("x" * 100_000))
        one.close()
        assert [heard.messages.get(timeout=WAIT)[1].reason[:1] for _ in range(50)] == ["x"] * 50
        assert heard.lost.get(timeout=WAIT) == (1, "closed its connection (end of file)")


def test_pings_keep_an_idle_link() -> None:
    with leader(silence=2.0) as (channel, heard), follower(channel, 1, silence=2.0) as (_, told):
        channel.wait_joined(WAIT)
        time.sleep(2.5)  # longer than silence is borne; a ping goes every 0.5 s
        channel.broadcast(Stop("later"))
        assert told.messages.get(timeout=WAIT) == Stop("later")
        assert heard.lost.empty()
        assert told.lost.empty()


def test_a_leader_that_ends_is_lost() -> None:
    with leader() as (channel, _), follower(channel, 1) as (_, told):
        channel.wait_joined(WAIT)
        channel.close()
        assert "closed its connection" in told.lost.get(timeout=WAIT)


def test_a_process_that_says_nothing_is_lost() -> None:
    with leader(silence=0.5) as (channel, heard), raw(channel, 1):
        assert heard.lost.get(timeout=WAIT) == (1, "said nothing for 0.5 s")


def test_a_process_that_reads_nothing_is_lost() -> None:
    with leader(silence=2.0) as (channel, heard), raw(channel, 1) as stuck:
        channel.wait_joined(WAIT)
        for _ in range(8):
            channel.broadcast(Failed("x" * (4 << 20)))
        until = time.monotonic() + WAIT
        while heard.lost.empty() and time.monotonic() < until:
            try:
                stuck.send_bytes(encode(Ping()))
            except OSError:
                break
            time.sleep(0.1)
        assert heard.lost.get(timeout=WAIT) == (1, "took no message for 2 s")


def test_garbage_after_joining_loses_the_process() -> None:
    with leader(3) as (channel, heard), raw(channel, 1) as one, raw(channel, 2) as two:
        channel.wait_joined(WAIT)
        one.send_bytes(b"\xc1 no msgpack")
        assert "sent what is no message" in heard.lost.get(timeout=WAIT)[1]
        two.send_bytes(encode(Stop("x")).replace(b"Stop", b"Halt"))
        assert "sent what is no message" in heard.lost.get(timeout=WAIT)[1]


def test_a_length_beyond_reason_loses_the_process() -> None:
    with leader() as (channel, heard), raw(channel, 1) as one:
        channel.wait_joined(WAIT)
        with socket.socket(fileno=socket.dup(one.fileno())) as naked:
            naked.sendall(b"\x7f\xff\xff\xff" + bytes(64))
        assert "closed its connection" in heard.lost.get(timeout=WAIT)[1]


def test_a_handler_that_fails_loses_the_process() -> None:
    inbox = Inbox()

    def fail(process: int, message: Any) -> None:
        raise KeyError(message.reason)

    channel = LeaderChannel(2, key=KEY, silence=5.0, on_message=fail, on_lost=inbox.on_lost)
    with follower(channel, 1) as (one, _):
        one.send(Failed("what"))
        lost = inbox.lost.get(timeout=WAIT)
        assert lost == (1, "sent what could not be handled: KeyError: 'what'")
    channel.close()


@pytest.mark.parametrize("junk", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(3), b"\xff" * 4096])
def test_strangers_keep_nobody_from_joining(junk: bytes) -> None:
    with leader() as (channel, heard):
        host, _, port = channel.address.rpartition(":")
        strangers = [socket.create_connection((host, int(port))) for _ in range(3)]
        for stranger in strangers:
            stranger.sendall(junk)
        with follower(channel, 1):
            channel.wait_joined(WAIT)
        for stranger in strangers:
            stranger.close()
        assert heard.messages.empty()


def test_another_key_is_refused_and_the_right_one_still_joins() -> None:
    with leader() as (channel, _):
        refused = follower(channel, 1, key=b"another key")
        with pytest.raises(GroupError, match="did not let process 1 join"), refused:
            pass
        with follower(channel, 1):
            channel.wait_joined(WAIT)


@pytest.mark.parametrize("process", [0, 2, -1])
def test_a_process_that_the_node_has_not_is_turned_away(process: int) -> None:
    with leader() as (channel, _), follower(channel, process) as (_, told):
        assert "closed its connection" in told.lost.get(timeout=WAIT)
        with pytest.raises(GroupError, match=r"no word from process 1 of 2 at 127.0.0.1:\d+"):
            channel.wait_joined(0.05)


def test_a_process_joins_once() -> None:
    with leader(3) as (channel, heard), follower(channel, 1), follower(channel, 1) as (_, told):
        assert "closed its connection" in told.lost.get(timeout=WAIT)
        assert heard.lost.empty()


def test_a_first_message_that_is_no_join_is_turned_away() -> None:
    with leader() as (channel, heard), raw(channel) as one:
        one.send_bytes(encode(Failed("hello")))
        with pytest.raises(EOFError):
            one.recv_bytes()
        assert heard.messages.empty()


def test_no_leader_is_an_error_with_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(GroupError, match=f"no leader at {address} within 0.3 s"):
        FollowerChannel(
            address,
            1,
            key=KEY,
            silence=1.0,
            timeout=0.3,
            on_message=print,
            on_lost=print,
        )


def test_one_process_needs_no_channel() -> None:
    with pytest.raises(ValueError, match="size=1 must be at least 2"):
        LeaderChannel(1, key=KEY, silence=1.0, on_message=print, on_lost=print)
