"""The transfer benchmark's sending side: paged writes, raw TCP and memcpy of the same pages."""

import base64
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ffi_transport import _native
from ffi_transport.errors import TransportError
from ffi_transport.events import TransferEnded
from ffi_transport.types import MemoryRegion, PageUnit, RemoteRegion
from jaxdisagg.bench.transfer_side import (
    SLOT,
    WAIT_SECONDS,
    TransferSide,
    allocate,
    on_streams,
    wait_for,
)

Pages = NDArray[np.uint32]
Way = Callable[[int, Pages, Pages], float]
"""Moves pages of a size from source to destination indices; returns the seconds that it took."""

Place = Callable[[], AbstractContextManager[None]]
"""Enters where a side's sockets and processes are to be made, such as a network namespace."""


class Bench:
    """The sending side in this process, the receiving one in a child. A context manager.

    `streams` raw TCP streams stand beside the engine, between the sides' domains in turn. What a
    side opens is opened while its context (`sender_place`, `receiver_place`), such as a network
    namespace, is entered. Raises TransportError or ValueError naming what cannot be had.
    """

    def __init__(
        self,
        sender: TransferSide,
        receiver: TransferSide,
        buffer_bytes: int,
        *,
        streams: int = 1,
        sender_place: Place = nullcontext,
        receiver_place: Place = nullcontext,
    ) -> None:
        self._stack = ExitStack()
        with self._stack:
            self._stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
            sender.pin()
            with sender_place():
                self.engine = self._stack.enter_context(sender.engine())
            self.memory, self.other = allocate(buffer_bytes), allocate(buffer_bytes)
            self.region: MemoryRegion = self.engine.register_memory(
                self.memory.ctypes.data, self.memory.nbytes
            )
            with receiver_place():
                self.child = self._start(receiver, buffer_bytes, streams)
            hello = self._read()
            self.remote = RemoteRegion(base64.b64decode(hello["descriptor"]), buffer_bytes)
            with sender_place():
                self.streams = [
                    self._stack.enter_context(_stream(host, tuple(address)))
                    for host, address in zip(
                        sender.stream_addresses(streams), hello["streams"], strict=True
                    )
                ]
            self.received_units: tuple[int, ...] = ()  # at each of the receiver's domains, so far
            self.peer = self.engine.connect(hello["address"], WAIT_SECONDS)
            self._stack = self._stack.pop_all()

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, side: TransferSide, buffer_bytes: int, streams: int) -> subprocess.Popen[str]:
        child = self._stack.enter_context(
            subprocess.Popen(
                [
                    sys.executable, "-m", "jaxdisagg.bench.transfer_side",
                    msgspec.json.encode(side).decode(), str(buffer_bytes), str(streams),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )  # fmt: skip
        self._stack.callback(child.kill)
        return child

    def _read(self) -> dict[str, Any]:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        if not line:
            raise TransportError("the receiving process has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise TransportError(f"the receiving process: {answer['error']}")
        return answer

    def _tell(self, **command: Any) -> dict[str, Any]:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps(command) + "\n")
        self.child.stdin.flush()
        return self._read()

    def transfer(self, page: int, source: Pages, destination: Pages) -> float:
        """Seconds until every page is acknowledged as landed; the receiver has counted them."""
        self._tell(op="expect", pages=len(source))
        unit = PageUnit(page, 0, page, 0, page)
        begin = time.perf_counter()
        transfer = self.engine.open_transfer(self.peer, SLOT)
        self.engine.write_paged(transfer, self.region, self.remote, source, destination, unit)
        self.engine.seal(transfer)
        wait_for(self.engine, TransferEnded)
        seconds = time.perf_counter() - begin
        self.received_units = tuple(self._tell(op="reached")["units"])
        return seconds

    def raw_tcp(self, page: int, source: Pages, destination: Pages) -> float:
        """Seconds for the same pages over the TCP streams, the receiver's answers included."""
        parts = [np.array_split(pages, len(self.streams)) for pages in (source, destination)]
        self._tell(op="stream", pages=[len(part) for part in parts[0]], page_bytes=page)
        begin = time.perf_counter()
        on_streams(
            self.streams,
            lambda i, stream: _native.stream_send(
                stream.fileno(), self.memory.ctypes.data, parts[0][i], parts[1][i], page
            ),
        )
        return time.perf_counter() - begin

    def memcpy(self, page: int, source: Pages, destination: Pages) -> float:
        """Seconds for the same pages with memcpy on one core."""
        begin = time.perf_counter()
        _native.copy_pages(
            self.memory.ctypes.data, self.other.ctypes.data, source, destination, page
        )
        return time.perf_counter() - begin


def _stream(host: str, address: tuple[str, int]) -> socket.socket:
    stream = socket.create_connection(address, WAIT_SECONDS, source_address=(host, 0))
    stream.settimeout(None)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return stream


def permutations(buffer_bytes: int, page: int, total_bytes: int) -> tuple[Pages, Pages]:
    """Source and destination pages, whole random permutations of the buffer's, seeded by `page`.

    As many as `total_bytes` holds, at least one.
    """
    in_buffer = buffer_bytes // page
    repeats = max(1, total_bytes // buffer_bytes)
    random = np.random.default_rng(page)
    source, destination = (
        np.concatenate([random.permutation(in_buffer) for _ in range(repeats)]).astype(np.uint32)
        for _ in range(2)
    )
    return source, destination


def in_turns(
    ways: Sequence[Way], page: int, source: Pages, destination: Pages, warm_up: int, rounds: int
) -> Iterator[list[list[float]]]:
    """Measures the ways one after the other, round by round, after `warm_up` pages of each.

    Yields the rates so far, 10^9 bytes/s [way][round], after each round.
    """
    for way in ways:  # connections, caches and branch predictors
        way(page, source[:warm_up], destination[:warm_up])
    gbps: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds):
        for way, results in zip(ways, gbps, strict=True):
            results.append(len(source) * page / way(page, source, destination) / 1e9)
        yield gbps


def measure(bench: Bench, page: int, total_bytes: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Transfer, raw TCP and memcpy of a page size; yields the row as it stands after each round.

    Its keys are docs/performance.md's.
    """
    source, destination = permutations(bench.memory.nbytes, page, total_bytes)
    amount = len(source) * page
    warm_up = bench.memory.nbytes // page
    ways = (bench.transfer, bench.raw_tcp, bench.memcpy)
    before = bench.engine.counters()["writes_posted"]
    for done, gbps in enumerate(in_turns(ways, page, source, destination, warm_up, rounds), 1):
        writes = bench.engine.counters()["writes_posted"] - before
        per_write = page * (warm_up + done * len(source)) / writes
        transfer, tcp, copy = (statistics.median(results) for results in gbps)
        ratios = [a / b for a, b in zip(gbps[0], gbps[1], strict=True)]
        yield {
            "provider": bench.engine.provider,
            "page_bytes": page,
            "gbps": transfer,
            "pages_per_s": transfer * 1e9 / page,
            "writes_per_s": transfer * 1e9 / per_write,
            "raw_tcp_gbps": tcp,
            "memcpy_gbps": copy,
            "ratio": statistics.median(ratios),
            "ratio_least": min(ratios),
            "ratio_most": max(ratios),
            "rounds": done,
            "bytes": amount,
        }
