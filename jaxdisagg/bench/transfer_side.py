"""One side of the transfer benchmark, and its receiving process.

`python -m jaxdisagg.bench.transfer_side SIDE_JSON BUFFER_BYTES STREAMS` takes JSON commands from
stdin, one a line, and answers each on stdout; the end of stdin ends it.
"""

import base64
import contextlib
import ipaddress
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ffi_transport import _native
from ffi_transport.engine import TransferEngine
from ffi_transport.errors import PeerLost, TransportError
from ffi_transport.events import CounterReached, PeerLostEvent, TransferEnded
from ffi_transport.types import EngineConfig

SLOT = 1
WAIT_SECONDS = 60.0


@dataclass(frozen=True)
class TransferSide:
    """Where one side runs and how its engine is opened; the fields are EngineConfig's.

    `core` is the one that the side is pinned to; None: it is not pinned.
    """

    provider: str = "auto"
    bind: str = "127.0.0.1"
    domains: tuple[str, ...] = ()
    bytes_in_flight: int = 0
    posts_in_flight: int = 128
    spin_us: int = 50
    core: int | None = None

    def engine(self) -> TransferEngine:
        """The side's engine. Raises FabricUnavailable naming what is missing."""
        return TransferEngine(
            EngineConfig(
                provider=self.provider,
                bind=self.bind,
                domains=self.domains,
                bytes_in_flight=self.bytes_in_flight,
                posts_in_flight=self.posts_in_flight,
                spin_us=self.spin_us,
            )
        )

    def pin(self) -> None:
        """Keep this thread on the side's core; threads and processes that it starts inherit it."""
        if self.core is not None:
            os.sched_setaffinity(0, {self.core})

    def stream_addresses(self, streams: int) -> list[str]:
        """Where raw TCP streams end: at the domains in turn, if they are addresses, or at bind."""
        hosts = [d for d in self.domains if _is_address(d)] or [self.bind]
        return [hosts[i % len(hosts)] for i in range(streams)]


def _is_address(text: str) -> bool:
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


def two_cores() -> tuple[int, int] | tuple[None, None]:
    """A core for each side, or none where they would have to share one."""
    cores = sorted(os.sched_getaffinity(0))
    return (cores[0], cores[1]) if len(cores) > 1 else (None, None)


def allocate(length: int) -> np.ndarray:
    """Memory whose every page exists, so that no measurement pays for its first touch."""
    return np.full(length, 1, np.uint8)


def wait_for(engine: TransferEngine, kind: type) -> Any:
    """The next event of a kind; a transfer that failed or a lost peer ends the benchmark."""
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end:
        for event in engine.poll(1.0):
            if isinstance(event, TransferEnded) and event.status == "failed":
                raise TransportError(f"the transfer failed: {event.error}")
            if isinstance(event, PeerLostEvent):
                raise PeerLost(f"the other side is gone: {event.reason}")
            if isinstance(event, kind):
                return event
    raise TimeoutError(f"no {kind.__name__} in {WAIT_SECONDS} s")


def on_streams(
    streams: Sequence[socket.socket], work: Callable[[int, socket.socket], None]
) -> None:
    """`work(i, stream)` for every stream at once, in threads where there are several.

    Raises the first error of them.
    """
    if len(streams) == 1:
        work(0, streams[0])
        return
    errors: list[BaseException] = []

    def one(i: int) -> None:
        try:
            work(i, streams[i])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(streams))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def receive(side: TransferSide, buffer_bytes: int, streams: int) -> None:
    """Be the receiving process until stdin ends."""
    side.pin()
    memory = allocate(buffer_bytes)
    engine = side.engine()
    region = engine.register_memory(memory.ctypes.data, memory.nbytes)
    listeners = [socket.create_server((host, 0)) for host in side.stream_addresses(streams)]
    say(
        address=engine.control_address,
        descriptor=base64.b64encode(region.descriptor).decode(),
        streams=[listener.getsockname()[:2] for listener in listeners],
    )
    raw = [listener.accept()[0] for listener in listeners]
    with engine:
        for stream in raw:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for line in sys.stdin:
            command = json.loads(line)
            if command["op"] == "expect":
                engine.arm(SLOT, command["pages"])
                say()
            elif command["op"] == "reached":
                wait_for(engine, CounterReached)
                engine.disarm(SLOT)
                say(units=[domain["units_counted"] for domain in engine.domain_counters()])
            else:
                say()
                size, counts = command["page_bytes"], command["pages"]
                on_streams(
                    raw,
                    lambda i, stream, size=size, counts=counts: _native.stream_receive(
                        stream.fileno(), memory.ctypes.data, buffer_bytes // size, counts[i], size
                    ),
                )
    for one in (*raw, *listeners):
        one.close()


def say(**what: Any) -> None:
    """Answer the sending side."""
    print(json.dumps(what), flush=True)


def main() -> None:
    """Receive as the arguments say; Ctrl-C is the sending side's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        side = msgspec.json.decode(sys.argv[1], type=TransferSide)
        receive(side, int(sys.argv[2]), int(sys.argv[3]))
    except (TransportError, ValueError, OSError) as error:
        with contextlib.suppress(BrokenPipeError):  # the sending side is gone: nobody to tell
            say(error=str(error))
        os._exit(2)  # an exit of Python's would try to flush what is left


if __name__ == "__main__":
    main()
