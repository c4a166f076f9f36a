"""Two processes: one writes 64 pages into the other's memory, which counts them. 30 lines."""

import multiprocessing as mp

import numpy as np

from ffi_transport.engine import TransferEngine
from ffi_transport.events import CounterReached, TransferEnded
from ffi_transport.types import EngineConfig, PageUnit, RemoteRegion

PAGES, PAGE = 64, 16384


def receive(pipe):
    """The process that is written into."""
    memory = np.zeros((PAGES, PAGE), np.uint8)
    with TransferEngine(EngineConfig()) as engine:
        region = engine.register_memory(memory.ctypes.data, memory.nbytes)
        engine.arm(7, PAGES)  # before the sender hears of the slot
        pipe.send((engine.control_address, region.descriptor))
        while not any(isinstance(e, CounterReached) for e in engine.poll(10)):
            pass
        pipe.send(memory.sum(axis=1))
        pipe.recv()  # stay until the sender has its acknowledgements


if __name__ == "__main__":
    here, there = mp.get_context("spawn").Pipe()
    mp.get_context("spawn").Process(target=receive, args=(there,), daemon=True).start()
    address, descriptor = here.recv()
    memory = np.random.default_rng(0).integers(0, 256, (PAGES, PAGE), np.uint8)
    with TransferEngine(EngineConfig()) as engine:
        region = engine.register_memory(memory.ctypes.data, memory.nbytes)
        transfer = engine.open_transfer(engine.connect(address, timeout_s=10), slot=7)
        places = np.random.default_rng(1).permutation(PAGES)
        engine.write_paged(
            transfer, region, RemoteRegion(descriptor, memory.nbytes), range(PAGES), places,
            PageUnit(PAGE, 0, PAGE, 0, PAGE),
        )  # fmt: skip
        engine.seal(transfer)  # nothing more comes: it ends when all has landed
        while not (ended := [e for e in engine.poll(10) if isinstance(e, TransferEnded)]):
            pass
        assert (here.recv()[places] == memory.sum(axis=1)).all()
        print(f"{engine.provider}: {ended[0].units_done} pages, {ended[0].bytes} bytes, all equal")
        here.send(None)
