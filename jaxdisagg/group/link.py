"""One authenticated connection between two processes of a node, with a deadline on every wait."""

import contextlib
import logging
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import msgspec

from jaxdisagg.group.messages import MAX_MESSAGE, Message, Ping, decode, encode

log = logging.getLogger(__name__)


class Link:
    """A thread that reads and one that writes what was queued.

    `silence` seconds in which nothing came, or in which the other took nothing, mean that it is
    lost. So a link that has nothing to say sends a Ping every quarter of that.
    """

    def __init__(self, sock: socket.socket, silence: float) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(None)
        # A second descriptor of the same socket, for what Connection does not offer.
        self._socket = socket.socket(fileno=os.dup(sock.fileno()))
        self._connection = Connection(sock.detach())
        self._silence = silence
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ended = False
        self._threads: list[threading.Thread] = []

    def prove(self, key: bytes, *, listener: bool, seconds: float) -> None:
        """Prove to each other that both know the key; each step may take `seconds`.

        Raises AuthenticationError, OSError (the time is over, among others) or EOFError.
        """
        self._set_deadline(seconds)
        steps = (deliver_challenge, answer_challenge)
        for step in steps if listener else reversed(steps):
            try:
                step(self._connection, key)
            except (AssertionError, ValueError) as error:  # bytes of something else
                raise AuthenticationError(f"no peer of ours: {error}") from None

    def receive(self) -> Message:
        """The next message, before `start`. Raises OSError, EOFError or msgspec.DecodeError."""
        return decode(self._connection.recv_bytes(MAX_MESSAGE))

    def start(
        self, name: str, on_message: Callable[[Message], None], on_lost: Callable[[str], None]
    ) -> None:
        """Start the threads; `on_lost` is called once at most, and never after `close`."""
        self._set_deadline(self._silence)
        for run in (lambda: self._read(on_message, on_lost), lambda: self._write(on_lost)):
            thread = threading.Thread(target=run, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def send(self, data: bytes) -> None:
        """Queue an encoded message; for any thread, in order, without waiting."""
        self._queue.put(data)

    def close(self, timeout: float) -> None:
        """Send what is queued, within `timeout` seconds, and end."""
        self._first()
        self._queue.put(None)
        deadline = time.monotonic() + timeout
        mine = threading.current_thread()
        for thread in reversed(self._threads):  # the writer, then the reader
            if thread is not mine:
                thread.join(max(deadline - time.monotonic(), 0.0))
            self._wake()
        for thread in self._threads:
            if thread is not mine:
                thread.join(1.0)
        self._connection.close()
        self._socket.close()

    def _set_deadline(self, seconds: float) -> None:
        """How long one read or write may take; it then raises BlockingIOError."""
        value = struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, value)

    def _first(self) -> bool:
        """Mark the link as ended; whether it was not."""
        with self._lock:
            first, self._ended = not self._ended, True
        return first

    def _wake(self) -> None:
        """End what the threads wait for."""
        with contextlib.suppress(OSError):  # the other side has closed it
            self._socket.shutdown(socket.SHUT_RDWR)

    def _lose(self, reason: str, on_lost: Callable[[str], None]) -> None:
        if self._first():
            self._wake()
            self._queue.put(None)
            on_lost(reason)

    def _read(self, on_message: Callable[[Message], None], on_lost: Callable[[str], None]) -> None:
        try:
            while True:
                message = self.receive()
                if not isinstance(message, Ping):
                    on_message(message)
        except BlockingIOError:
            reason = f"said nothing for {self._silence:g} s"
        except msgspec.DecodeError as error:
            reason = f"sent what is no message: {error}"
        except (EOFError, OSError) as error:
            reason = f"closed its connection ({str(error) or 'end of file'})"
        except Exception as error:
            log.exception("a message could not be handled")
            reason = f"sent what could not be handled: {type(error).__name__}: {error}"
        self._lose(reason, on_lost)

    def _write(self, on_lost: Callable[[str], None]) -> None:
        ping = encode(Ping())
        try:
            while True:
                try:
                    data = self._queue.get(timeout=self._silence / 4)
                except queue.Empty:
                    data = ping
                if data is None:
                    return
                self._connection.send_bytes(data)
        except BlockingIOError:
            reason = f"took no message for {self._silence:g} s"
        except OSError as error:
            reason = f"closed its connection ({error})"
        self._lose(reason, on_lost)
