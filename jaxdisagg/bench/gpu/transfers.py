"""Pages from one array on a device into another, by two transfer engines over the network stack.

`python -m jaxdisagg.bench.gpu.transfers [--small]`. A row for each page size: whether all arrived
where they belong, how the memory was reached, and how fast.
"""

import argparse
import statistics
import time

import jax
import numpy as np

from ffi_transport.engine import TransferEngine
from ffi_transport.events import CounterReached, TransferEnded
from ffi_transport.types import EngineConfig, Landing, MemoryRegion, PageUnit, RemoteRegion
from jaxdisagg.bench.gpu.rows import Row, take_stdout

DEADLINE_SECONDS = 20.0
ROUNDS = 5


def register(engine: TransferEngine, array: jax.Array) -> MemoryRegion:
    """The array's memory, on whatever device it is."""
    [device] = array.devices()
    ordinal = None if device.platform == "cpu" else device.local_hardware_id
    return engine.register_memory(array.unsafe_buffer_pointer(), array.nbytes, device=ordinal)


def wait(engine: TransferEngine, kind: type, what: str) -> None:
    """Until the engine has such an event. RuntimeError after a deadline, or for a failure."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        for event in engine.poll(left):
            if isinstance(event, TransferEnded) and event.status != "completed":
                raise RuntimeError(f"{what}: {event}")
            if isinstance(event, kind):
                return
    raise RuntimeError(f"{what}: nothing within {DEADLINE_SECONDS:g} s; {engine.counters()}")


def move(pages: int, page_bytes: int, provider: str = "auto") -> Row:
    """Move `pages` pages ROUNDS times, each time elsewhere, and compare what lies there."""
    rng = np.random.default_rng(0)
    content = rng.integers(0, 256, (pages, page_bytes), np.uint8)
    source, target = jax.device_put(content), jax.numpy.zeros_like(content)
    jax.block_until_ready((source, target))
    config = EngineConfig(provider=provider)
    with TransferEngine(config) as sender, TransferEngine(config) as receiver:
        here, there = register(sender, source), register(receiver, target)
        peer = sender.connect(receiver.control_address, timeout_s=DEADLINE_SECONDS)
        remote = RemoteRegion(there.descriptor, there.length)
        unit = PageUnit(page_bytes, 0, page_bytes, 0, page_bytes)
        places, times = np.arange(pages), []
        for slot in range(ROUNDS):
            places = rng.permutation(pages)
            receiver.arm(slot, pages, landings=[Landing((there,), places, page_bytes)])
            begin = time.perf_counter()
            transfer = sender.open_transfer(peer, slot)
            sender.write_paged(transfer, here, remote, np.arange(pages), places, unit)
            sender.seal(transfer)
            wait(receiver, CounterReached, f"round {slot}, arrival")
            times.append(time.perf_counter() - begin)
            wait(sender, TransferEnded, f"round {slot}, acknowledgement")
        # Added to, so that what is read is the device's and no copy of before.
        equal = bool((np.asarray(target + np.uint8(0))[places] == content).all())
        return {
            "page_bytes": page_bytes,
            "pages": pages,
            "provider": sender.provider,
            "source": sender.memory_mode(here),
            "target": receiver.memory_mode(there),
            "why_staged": sender.why_staged(here),
            "gb_per_s": pages * page_bytes / statistics.median(times) / 1e9,
            "passed": equal,
        }


def main() -> None:
    """Print a row for each page size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    total = (1 << 20) if parser.parse_args().small else (256 << 20)
    tell = take_stdout()
    for page_bytes in (4 << 10, 32 << 10, 256 << 10):
        tell(move(total // page_bytes, page_bytes))


if __name__ == "__main__":
    main()
