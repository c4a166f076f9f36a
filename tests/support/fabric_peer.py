"""A transfer engine in a process of its own, driven by a test through JSON lines.

The file is both sides: `Peer` in the test, and the child's main program.
"""

import base64
import ctypes
import json
import select
import signal
import subprocess
import sys
import threading
import time
import zlib
from types import TracebackType
from typing import Any, Self

import numpy as np
from proc import wake_ups

from ffi_transport.engine import TransferEngine
from ffi_transport.events import Event
from ffi_transport.types import EngineConfig, MemoryRegion, PageUnit, RemoteRegion

DEADLINE = 60.0
PAGE = 4096


def wait_for[E: Event](engine: TransferEngine, kind: type[E], seen: list[Event]) -> E:
    """The next event of a kind; all that came, in order, are appended to `seen`."""
    end = time.monotonic() + DEADLINE
    looked_at = 0
    while True:
        for event in seen[looked_at:]:
            looked_at += 1
            if isinstance(event, kind):
                return event
        if time.monotonic() > end:
            raise TimeoutError(f"no {kind.__name__} in {DEADLINE} s, only {seen}")
        seen += engine.poll(0.2)


def wait_for_all[E: Event](engine: TransferEngine, kind: type[E], count: int) -> list[E]:
    """The next `count` events of a kind; others are dropped."""
    end = time.monotonic() + DEADLINE
    found: list[E] = []
    while len(found) < count:
        if time.monotonic() > end:
            raise TimeoutError(f"{len(found)} {kind.__name__} in {DEADLINE} s, not {count}")
        found += [event for event in engine.poll(0.2) if isinstance(event, kind)]
    return found


def page_sums(memory: np.ndarray) -> list[int]:
    """A checksum of each page of PAGE bytes."""
    return [zlib.crc32(page.tobytes()) for page in memory.reshape(-1, PAGE)]


class Peer:
    """A child process with one engine and one registered buffer. A context manager."""

    def __init__(self, provider: str, buffer_bytes: int = 1 << 20, **config: Any) -> None:
        arguments = {"buffer_bytes": buffer_bytes, "config": {"provider": provider, **config}}
        self.process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._partial = b""
        try:
            started = self._read()
        except BaseException:
            self.kill()
            raise
        self.address: str = started["address"]
        self.epoch: int = started["epoch"]
        self.remote = RemoteRegion(base64.b64decode(started["descriptor"]), buffer_bytes)

    def call(self, op: str, **arguments: Any) -> Any:
        """Let the child do one thing and return its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        end = time.monotonic() + DEADLINE + 10
        descriptor = self.process.stdout.fileno()
        while b"\n" not in self._partial:
            if not select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError("the peer process does not answer")
            data = self.process.stdout.raw.read(1 << 16)  # type: ignore[attr-defined]
            if not data:
                raise EOFError("the peer process has ended")
            self._partial += data
        line, _, self._partial = self._partial.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    def stop(self) -> None:
        """SIGSTOP: alive, but silent."""
        self.process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()


class _Child:
    """The child's side."""

    def __init__(self, buffer_bytes: int, config: dict[str, Any]) -> None:
        self.memory = np.zeros(buffer_bytes, np.uint8)
        self.engine = TransferEngine(EngineConfig(**config), b"child")
        self.region: MemoryRegion = self.engine.register_memory(
            self.memory.ctypes.data, self.memory.nbytes
        )
        self.events: list[Event] = []
        self.peer = -1

    def describe(self) -> dict[str, Any]:
        return {
            "address": self.engine.control_address,
            "epoch": self.engine.epoch,
            "descriptor": base64.b64encode(self.region.descriptor).decode(),
        }

    def arm(self, slot: int, expected: int) -> None:
        self.engine.arm(slot, expected)

    def fill(self, value: int) -> None:
        self.memory[:] = value

    def sums(self) -> list[int]:
        return page_sums(self.memory)

    def counters(self) -> dict[str, int]:
        return self.engine.counters()

    def domain_counters(self) -> list[dict[str, Any]]:
        return self.engine.domain_counters()

    def wait(self, kind: str) -> dict[str, Any]:
        """The first event of a kind that no earlier wait returned."""
        types = {t.__name__: t for t in Event.__args__}
        event = wait_for(self.engine, types[kind], self.events)
        self.events.remove(event)
        values = dict(vars(event))
        return {k: v.decode("latin-1") if isinstance(v, bytes) else v for k, v in values.items()}

    def saw(self) -> list[str]:
        self.events += self.engine.poll(0)
        return [type(event).__name__ for event in self.events]

    def connect(self, address: str) -> int:
        self.peer = self.engine.connect(address, DEADLINE)
        return self.peer

    def send(self, peer: int, length: int) -> None:
        self.engine.send(peer, b"m" * length)

    def fence(self, peer: int) -> None:
        self.engine.fence(peer)

    def idle(self, seconds: float) -> tuple[int, float]:
        """While the process had nothing to do: wake-ups of its threads, processor seconds."""
        before = wake_ups(), time.process_time()
        time.sleep(seconds)
        return wake_ups() - before[0], time.process_time() - before[1]

    def echo(self, count: int) -> None:
        """Answer so many messages, in a thread, while commands are still taken."""

        def run() -> None:
            left = count
            while left:
                for event in self.engine.poll(0.2):
                    if type(event).__name__ == "MessageReceived":
                        self.engine.send(event.peer, event.payload)  # type: ignore[union-attr]
                        left -= 1

        threading.Thread(target=run, daemon=True).start()

    def blast(self, descriptor: str, length: int, pages: int, rounds: int) -> int:
        """Begin a long transfer of random pages to the connected peer; returns its units."""
        remote = RemoteRegion(base64.b64decode(descriptor), length)
        transfer = self.engine.open_transfer(self.peer, 1)
        random = np.random.default_rng(1)
        unit = PageUnit(PAGE, 0, PAGE, 0, PAGE)
        for _ in range(rounds):
            self.engine.write_paged(
                transfer, self.region, remote, random.permutation(pages), random.permutation(pages),
                unit,
            )  # fmt: skip
        return rounds * pages


def _main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no orphan of a killed test
    arguments = json.loads(sys.argv[1])
    try:
        child = _Child(arguments["buffer_bytes"], arguments["config"])
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        return
    print(json.dumps({"value": child.describe()}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        op = command.pop("op")
        try:
            answer = {"value": getattr(child, op)(**command)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main()
