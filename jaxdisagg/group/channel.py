"""Messages between the processes of one node: a star, process 0 leading.

The leader listens; each other process joins with the node's key (HMAC both ways, by
`multiprocessing.connection`, before anything else is read). Handlers run on the reader thread of
their link, one message after the other; register them before the other side has a reason to send.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from typing import Any

import msgspec

from jaxdisagg.group.errors import GroupError
from jaxdisagg.group.link import Link
from jaxdisagg.group.messages import Join, Message, encode

log = logging.getLogger(__name__)

JOIN_SECONDS = 10.0  # for each step between a connection and the Join that it must bring
_RETRY_SECONDS = 0.2
_ACCEPT_SECONDS = 0.1


class LeaderChannel:
    """The leader's links to processes 1 .. size-1.

    `on_message(process, message)` and `on_lost(process, reason)` are called on reader threads; a
    process is lost once at most. `silence` is in seconds, see `Link`. Raises OSError when `host`
    and `port` (0: a free one) cannot be had. `pids` are what the processes said in joining.
    """

    def __init__(
        self,
        size: int,
        *,
        key: bytes,
        silence: float,
        on_message: Callable[[int, Message], None],
        on_lost: Callable[[int, str], None],
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        if size < 2:
            raise ValueError(f"size={size} must be at least 2: one process needs no channel")
        self._size, self._key, self._silence = size, key, silence
        self._on_message, self._on_lost = on_message, on_lost
        self.pids: dict[int, int] = {}
        self._links: dict[int, Link] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._listener = socket.create_server((host, port))
        self._listener.settimeout(_ACCEPT_SECONDS)
        self.address = "{}:{}".format(*self._listener.getsockname()[:2])
        self._accepting = threading.Thread(target=self._accept, name="group-accept", daemon=True)
        self._accepting.start()

    def wait_joined(self, timeout: float) -> None:
        """Return once all processes have joined; GroupError naming those that did not."""
        with self._changed:
            if self._changed.wait_for(lambda: len(self._links) == self._size - 1, timeout):
                return
            missing = sorted(set(range(1, self._size)) - set(self._links))
        raise GroupError(
            f"no word from process {', '.join(map(str, missing))} of {self._size} at "
            f"{self.address} within {timeout:g} s"
        )

    def send(self, process: int, message: Message) -> None:
        """Send to one process that has joined; for any thread, in order, without waiting."""
        self._links[process].send(encode(message))

    def broadcast(self, message: Message) -> None:
        """Send to all that have joined, as `send` does."""
        data = encode(message)
        for link in list(self._links.values()):
            link.send(data)

    def close(self, timeout: float = 5.0) -> None:
        """Send what is queued, within `timeout` seconds, and end all links."""
        with self._changed:
            self._closing = True
        self._accepting.join()
        for link in self._links.values():
            link.close(timeout)

    def _accept(self) -> None:
        with self._listener:
            while not self._closing and len(self._links) < self._size - 1:
                try:
                    sock, address = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError as error:
                    log.warning("no connection could be accepted: %s", error)
                    time.sleep(_RETRY_SECONDS)
                    continue
                # Each on a thread of its own: one that says nothing keeps nobody waiting.
                threading.Thread(
                    target=self._welcome, args=(sock, address), name="group-join", daemon=True
                ).start()

    def _welcome(self, sock: socket.socket, address: Any) -> None:
        link = Link(sock, self._silence)
        try:
            link.prove(self._key, listener=True, seconds=JOIN_SECONDS)
            join = link.receive()
            problem = self._take(link, join)
        except (AuthenticationError, OSError, EOFError, msgspec.DecodeError) as error:
            problem = str(error) or type(error).__name__
        if problem is not None:
            log.warning("%s: %s was turned away: %s", self.address, address, problem)
            link.close(0.0)

    def _take(self, link: Link, join: Message) -> str | None:
        """Make the link that of its process; or why not."""
        if not isinstance(join, Join):
            return f"it began with {type(join).__name__}"
        process = join.process
        with self._changed:
            if self._closing:
                return "the node ends"
            if not 1 <= process < self._size:
                return f"process={process} must be in 1..{self._size - 1}"
            if process in self._links:
                return f"process={process} has joined already"
            link.start(
                f"group-{process}",
                lambda message: self._on_message(process, message),
                lambda reason: self._on_lost(process, reason),
            )
            self._links[process], self.pids[process] = link, join.pid
            self._changed.notify_all()
        return None


class FollowerChannel:
    """A follower's link to its leader at `address` ("host:port").

    The leader is waited for, `timeout` seconds at most, as it may be started later. Raises
    GroupError if it is not there, or does not know the key, or turns this process away later.
    """

    def __init__(
        self,
        address: str,
        process: int,
        *,
        key: bytes,
        silence: float,
        timeout: float,
        on_message: Callable[[Message], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._link = Link(_connect(address, timeout), silence)
        try:
            self._link.prove(key, listener=False, seconds=JOIN_SECONDS)
        except (AuthenticationError, OSError, EOFError) as error:
            self._link.close(0.0)
            raise GroupError(
                f"the leader at {address} did not let process {process} join: "
                f"{error or type(error).__name__}"
            ) from None
        self.send(Join(process, os.getpid()))
        self._link.start("group-leader", on_message, on_lost)

    def send(self, message: Message) -> None:
        """Send to the leader; for any thread, in order, without waiting."""
        self._link.send(encode(message))

    def close(self, timeout: float = 5.0) -> None:
        """Send what is queued, within `timeout` seconds, and end."""
        self._link.close(timeout)


def _connect(address: str, timeout: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout
    while True:
        try:
            left = max(deadline - time.monotonic(), 0.1)
            return socket.create_connection((host, int(port)), timeout=left)
        except OSError as error:
            if time.monotonic() + _RETRY_SECONDS > deadline:
                raise GroupError(f"no leader at {address} within {timeout:g} s: {error}") from None
        time.sleep(_RETRY_SECONDS)
