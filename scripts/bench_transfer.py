"""Paged write-immediates between two processes, against one raw TCP stream and memcpy.

Every round of a page size measures all three, one after the other, so that they see the same
machine; `ratio` is the median over the rounds of transfer / raw TCP. Source and destination pages
are random permutations: what is merged or packed is not luck of the order.
"""

import base64
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ffi_transport import _native
from ffi_transport.engine import TransferEngine
from ffi_transport.errors import TransportError
from ffi_transport.types import (
    CounterReached,
    EngineConfig,
    MemoryRegion,
    PageUnit,
    RemoteRegion,
    TransferEnded,
)
from jaxdisagg.bench.report import environment, write_json

SLOT = 1
WAIT = 60.0


def pin(role: int) -> None:
    """Give each side a core of its own where there are two; its threads inherit it."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[role % len(cores)]})


def allocate(length: int) -> np.ndarray:
    """Memory whose every page exists, so that no measurement pays for its first touch."""
    return np.full(length, 1, np.uint8)


def wait_for(engine: TransferEngine, kind: type) -> Any:
    """The next event of a kind; a transfer that failed ends the benchmark."""
    end = time.monotonic() + WAIT
    while time.monotonic() < end:
        for event in engine.poll(1.0):
            if isinstance(event, TransferEnded) and event.status == "failed":
                raise TransportError(f"the transfer failed: {event.error}")
            if isinstance(event, kind):
                return event
    raise TimeoutError(f"no {kind.__name__} in {WAIT} s")


def receiver(provider: str, buffer_bytes: int) -> None:
    """The child: takes JSON commands from stdin, one a line, and answers each."""
    pin(1)
    memory = allocate(buffer_bytes)
    engine = TransferEngine(EngineConfig(provider=provider))
    region = engine.register_memory(memory.ctypes.data, memory.nbytes)
    listener = socket.create_server(("127.0.0.1", 0))
    hello = {
        "address": engine.control_address,
        "descriptor": base64.b64encode(region.descriptor).decode(),
        "port": listener.getsockname()[1],
    }
    print(json.dumps(hello), flush=True)
    stream, _ = listener.accept()
    with engine, listener, stream:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for line in sys.stdin:
            command = json.loads(line)
            if command["op"] == "expect":
                engine.arm(SLOT, command["pages"])
            elif command["op"] == "reached":
                wait_for(engine, CounterReached)
                engine.disarm(SLOT)
            else:
                print("{}", flush=True)
                size = command["page_bytes"]
                _native.stream_receive(
                    stream.fileno(), memory.ctypes.data, buffer_bytes // size, command["pages"],
                    size,
                )  # fmt: skip
                continue
            print("{}", flush=True)


class Bench:
    """The sending side. A context manager that ends the child, too."""

    def __init__(self, provider: str, buffer_bytes: int) -> None:
        self.engine = TransferEngine(EngineConfig(provider=provider))
        self.memory, self.other = allocate(buffer_bytes), allocate(buffer_bytes)
        self.region: MemoryRegion = self.engine.register_memory(
            self.memory.ctypes.data, self.memory.nbytes
        )
        self.child = subprocess.Popen(
            [sys.executable, __file__, "--receive", provider, str(buffer_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        hello = self._read()
        self.remote = RemoteRegion(base64.b64decode(hello["descriptor"]), buffer_bytes)
        self.stream = socket.create_connection(("127.0.0.1", hello["port"]))
        self.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = self.engine.connect(hello["address"], WAIT)

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()
        self.engine.close()
        self.child.kill()
        self.child.wait()
        for pipe in (self.child.stdin, self.child.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self) -> dict[str, Any]:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        if not line:
            raise RuntimeError("the receiving process has ended")
        return json.loads(line)

    def _tell(self, **command: Any) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps(command) + "\n")
        self.child.stdin.flush()
        self._read()

    def transfer(self, page: int, source: np.ndarray, destination: np.ndarray) -> float:
        """Seconds until every page is acknowledged as landed; the receiver has counted them."""
        self._tell(op="expect", pages=len(source))
        unit = PageUnit(page, 0, page, 0, page)
        begin = time.perf_counter()
        transfer = self.engine.open_transfer(self.peer, SLOT)
        self.engine.write_paged(transfer, self.region, self.remote, source, destination, unit)
        self.engine.seal(transfer)
        wait_for(self.engine, TransferEnded)
        seconds = time.perf_counter() - begin
        self._tell(op="reached")
        return seconds

    def raw_tcp(self, page: int, source: np.ndarray, destination: np.ndarray) -> float:
        """Seconds for the same pages over one TCP stream, the receiver's answer included."""
        self._tell(op="stream", pages=len(source), page_bytes=page)
        begin = time.perf_counter()
        _native.stream_send(
            self.stream.fileno(), self.memory.ctypes.data, source, destination, page
        )
        return time.perf_counter() - begin

    def memcpy(self, page: int, source: np.ndarray, destination: np.ndarray) -> float:
        """Seconds for the same pages with memcpy on one core."""
        begin = time.perf_counter()
        _native.copy_pages(
            self.memory.ctypes.data, self.other.ctypes.data, source, destination, page
        )
        return time.perf_counter() - begin


def measure(bench: Bench, page: int, megabytes: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Yields the row as it stands after each round."""
    in_buffer = bench.memory.nbytes // page
    repeats = max(1, (megabytes << 20) // bench.memory.nbytes)
    random = np.random.default_rng(page)
    source, destination = (
        np.concatenate([random.permutation(in_buffer) for _ in range(repeats)]).astype(np.uint32)
        for _ in range(2)
    )
    amount = len(source) * page
    ways = (bench.transfer, bench.raw_tcp, bench.memcpy)
    for way in ways:  # connections, caches and branch predictors
        way(page, source[:in_buffer], destination[:in_buffer])
    gbps: list[list[float]] = [[], [], []]
    writes = 0
    row: dict[str, Any] = {}
    for done in range(rounds):
        before = bench.engine.counters()["writes_posted"]
        for way, results in zip(ways, gbps, strict=True):
            results.append(amount / way(page, source, destination) / 1e9)
        writes += bench.engine.counters()["writes_posted"] - before
        transfer, tcp, copy = (statistics.median(results) for results in gbps)
        row = {
            "provider": bench.engine.provider,
            "page_bytes": page,
            "gbps": transfer,
            "pages_per_s": transfer * 1e9 / page,
            "writes_per_s": transfer * 1e9 / (amount * (done + 1) / writes),
            "raw_tcp_gbps": tcp,
            "memcpy_gbps": copy,
            "ratio": statistics.median(a / b for a, b in zip(gbps[0], gbps[1], strict=True)),
            "ratio_least": min(a / b for a, b in zip(gbps[0], gbps[1], strict=True)),
            "ratio_most": max(a / b for a, b in zip(gbps[0], gbps[1], strict=True)),
            "rounds": done + 1,
            "bytes": amount,
        }
        yield row


def table_of(rows: list[dict[str, Any]]) -> Table:
    """The rows for a terminal; GB/s are 10^9 bytes a second."""
    providers = ", ".join(dict.fromkeys(row["provider"] for row in rows))
    table = Table(title=f"paged writes with immediates over {providers}, GB/s")
    for column in ("KiB", "transfer", "raw TCP", "memcpy", "of TCP", "least..most", "pages/s",
                   "writes/s"):  # fmt: skip
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row["page_bytes"] >> 10),
            f"{row['gbps']:.2f}",
            f"{row['raw_tcp_gbps']:.2f}",
            f"{row['memcpy_gbps']:.2f}",
            f"{row['ratio']:.0%}",
            f"{row['ratio_least']:.0%}..{row['ratio_most']:.0%}",
            f"{row['pages_per_s']:,.0f}",
            f"{row['writes_per_s']:,.0f}",
        )
    return table


def main(
    provider: Annotated[str, typer.Option(help="auto, tcp, net, tcp;ofi_rxm, efa, verbs")] = "auto",
    pages: Annotated[str, typer.Option(help="page sizes in KiB")] = "4,16,64,256,1024",
    megabytes: Annotated[int, typer.Option(min=1, help="MiB moved in each measurement")] = 512,
    buffer: Annotated[int, typer.Option(min=1, help="MiB of each side's buffer")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="rounds of each page size")] = 7,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the rows here")] = None,
) -> None:
    """Measure transfers over page sizes beside raw TCP and memcpy."""
    try:
        sizes = [int(size) << 10 for size in pages.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--pages: {pages!r} are no numbers of KiB") from None
    if min(sizes) < 1024 or max(sizes) > min(1 << 20, buffer << 20):
        raise typer.BadParameter("--pages: 1 to 1024 KiB, and at most the buffer")
    if provider == "loopback":
        raise typer.BadParameter("--provider: loopback stays within one process")
    if json_file is not None and not json_file.parent.is_dir():
        raise typer.BadParameter(f"--json: no folder {json_file.parent}")
    where = environment()  # before the pin, which would count one core
    pin(0)
    console = Console()
    rows = []
    try:
        with (
            Bench(provider, buffer << 20) as bench,
            Progress(console=console, transient=True) as progress,
        ):
            for size in sizes:
                task = progress.add_task(f"{size >> 10} KiB", total=rounds)
                found = []
                for row in measure(bench, size, megabytes, rounds):
                    found.append(row)
                    progress.advance(task)
                rows.append(found[-1])
    except (TransportError, ValueError) as error:
        console.print(f"[red]error:[/red] {error}", highlight=False)
        raise typer.Exit(2) from None
    console.print(table_of(rows))
    if json_file is not None:
        write_json(json_file, where, rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--receive"]:
        receiver(sys.argv[2], int(sys.argv[3]))
    else:
        typer.run(main)
