"""The FFI handler for CUDA, its slots and the poller, on streams of the fake driver."""

import time

import numpy as np
import pytest
from device_stream import COMMAND_BUFFER_COMPATIBLE, DeviceStream, FfiCaller, build_caller
from fabric_peer import wait_for, wait_for_all
from nodes import wait_until

from ffi_transport.engine import TransferEngine
from ffi_transport.errors import FabricUnavailable, TransferTimeout
from ffi_transport.events import CounterReached, TransferEnded, TriggerFault
from ffi_transport.types import EngineConfig, PageUnit, PlanWrite

DEVICES, LAYERS, PAGES, FLOATS = 2, 4, 6, 256
PAGE_BYTES = FLOATS * 4
OUT_OF_MEMORY, INVALID_HANDLE = 2, 400


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    return FfiCaller(build_caller(tmp_path_factory.mktemp("ffi_caller")))


class Machine:
    """Two devices whose caches a step writes page by page, and a receiver of planned pages."""

    def __init__(self, caller: FfiCaller, fake) -> None:
        self.caller, self.fake = caller, fake
        self.engine = TransferEngine(EngineConfig(provider="loopback", trace=True))
        self.receiver = TransferEngine(EngineConfig(provider="loopback"))
        self.engine.open_slots(range(DEVICES), LAYERS)
        self.streams = [DeviceStream(fake.library, d) for d in range(DEVICES)]
        self.cache = np.zeros((DEVICES, LAYERS, PAGES, FLOATS), np.float32)
        self.landing = np.zeros_like(self.cache)
        self.x = np.ones((DEVICES, 8), np.float32)
        self.steps: dict[int, np.ndarray] = {}  # device memory that calls in flight read
        self.sources: list[np.ndarray] = []
        self.remotes = {}
        for d, l in np.ndindex(DEVICES, LAYERS):
            region = self.engine.register_memory(self.cache[d, l].ctypes.data, PAGES * PAGE_BYTES)
            self.engine.set_source_region(d, l, region)
            self.remotes[d, l] = self.receiver.register_memory(
                self.landing[d, l].ctypes.data, PAGES * PAGE_BYTES
            ).remote()
        self.peer = self.engine.connect(self.receiver.control_address, 30)

    def value(self, number: int, d: int, l: int) -> int:
        return number % 1000 * 100 + d * 10 + l

    def file(self, number: int, page: int) -> int:
        """A plan that sends `page` of every layer and device; returns its transfer."""
        self.receiver.arm(page, DEVICES * LAYERS)
        transfer = self.engine.open_transfer(self.peer, page)
        unit = PageUnit(PAGE_BYTES, 0, PAGE_BYTES, 0, PAGE_BYTES)
        writes = [
            PlanWrite(
                transfer, d, 0, LAYERS, [page], [page], unit,
                tuple(self.remotes[d, l] for l in range(LAYERS)),
            )
            for d in range(DEVICES)
        ]  # fmt: skip
        self.engine.add_plan(number, DEVICES, LAYERS, writes, timeout_s=0.2)
        self.engine.seal(transfer)
        return transfer

    def enqueue(self, number: int, page: int) -> None:
        """Put a step on all streams, as its dispatch does."""
        low = np.array(number & 0xFFFFFFFF, np.uint32).astype(np.int32)
        self.steps[number] = low
        for l in range(LAYERS):
            for d, stream in enumerate(self.streams):
                values = np.full(FLOATS, self.value(number, d, l), np.float32)
                self.sources.append(values)
                stream.write(self.cache[d, l, page], values)
                self.caller.trigger(
                    stream.handle, d, self.engine.index, l, low, self.x[d], self.cache[d, l]
                )

    def check(self, number: int, page: int) -> None:
        for d, l in np.ndindex(DEVICES, LAYERS):
            assert (self.landing[d, l, page] == self.value(number, d, l)).all(), (number, d, l)

    def all_counted(self) -> None:
        """The poller counts a trigger when it has handed it on; its pages may be sent by then."""
        wait_until(
            lambda: self.engine.counters()["triggers"] >= DEVICES * LAYERS, "triggers are counted"
        )

    def close(self) -> None:
        self.fake.hold(False)
        for stream in self.streams:
            stream.close()
        self.engine.close()
        self.receiver.close()


@pytest.fixture
def machine(caller, fake_cuda):
    fake_cuda.set_devices(DEVICES)
    machine = Machine(caller, fake_cuda)
    yield machine
    machine.close()


def test_the_handlers_declare_what_xla_may_capture(caller):
    assert caller.traits("CUDA") == COMMAND_BUFFER_COMPATIBLE
    assert caller.traits("cpu") == 0


def test_the_handler_returns_before_the_device_has_come_so_far(machine):
    """Nothing is posted for a step that is on the stream, and all of it once it has run."""
    machine.fake.hold(True)
    machine.file((5 << 32) + 9, 1)
    machine.enqueue((5 << 32) + 9, 1)
    for _ in range(20):
        assert machine.engine.poll(0.005) == []
    assert machine.engine.counters()["triggers"] == 0
    assert machine.engine.counters()["units_posted"] == 0
    machine.fake.hold(False)
    ended = wait_for(machine.engine, TransferEnded, [])
    assert (ended.status, ended.units_done) == ("completed", DEVICES * LAYERS)
    wait_for(machine.receiver, CounterReached, [])
    machine.check((5 << 32) + 9, 1)
    machine.all_counted()
    counters = machine.engine.counters()
    assert counters["steps_live"] == counters["trigger_faults"] == 0
    assert counters["triggers"] == DEVICES * LAYERS
    assert {t["step"] for t in machine.engine.trace()} == {(5 << 32) + 9}


def test_steps_in_flight_over_the_wrap(machine):
    """Four steps are live at once, on streams of any speed, while their numbers wrap."""
    first = (1 << 32) - 3
    machine.fake.set_delay(3, 400)
    for number in range(first, first + 4):
        machine.file(number, number - first)
    machine.fake.hold(True)
    for number in range(first, first + 4):
        machine.enqueue(number, number - first)
    with pytest.raises(TransferTimeout, match=f"step {first} waits for 8 triggers"):
        machine.file(first + 4, 5)
    machine.fake.hold(False)
    ended = wait_for_all(machine.engine, TransferEnded, 4)
    assert {e.status for e in ended} == {"completed"}
    for number in range(first, first + 4):
        machine.check(number, number - first)
    assert not machine.engine.counters()["trigger_faults"]


def test_a_dropped_step_is_not_mistaken_for_a_later_one(machine):
    machine.file(7, 0)
    machine.engine.drop_plan(7)
    assert wait_for(machine.engine, TransferEnded, []).status == "failed"
    machine.file(8, 1)
    machine.enqueue(8, 1)
    assert wait_for(machine.engine, TransferEnded, []).status == "completed"
    machine.check(8, 1)
    machine.all_counted()
    assert machine.engine.counters()["triggers"] == DEVICES * LAYERS


def test_a_refused_copy_is_a_fault_and_the_program_goes_on(machine):
    machine.file(1, 0)
    machine.fake.fail("cuMemcpyDtoHAsync_v2", INVALID_HANDLE, skip=2)
    machine.enqueue(1, 0)
    fault = wait_for(machine.engine, TriggerFault, [])
    assert (fault.kind, fault.layer, fault.ordinal) == ("not_enqueued", 1, 0)
    assert "CUDA error 400" in fault.detail
    machine.fake.fail("cuMemcpyDtoDAsync_v2", INVALID_HANDLE)
    with pytest.raises(RuntimeError, match="could not copy x: CUDA error 400"):
        machine.caller.trigger(
            machine.streams[0].handle, 0, machine.engine.index, 0, machine.steps[1],
            machine.x[0], machine.cache[0, 0], np.empty_like(machine.x[0]),
        )  # fmt: skip


def test_a_cache_elsewhere_is_a_fault(machine):
    machine.file(1, 0)
    low, elsewhere = np.array(1, np.int32), np.zeros(4, np.float32)
    for l in range(LAYERS):
        for d, stream in enumerate(machine.streams):
            at = elsewhere if (d, l) == (1, 2) else machine.cache[d, l]
            machine.caller.trigger(stream.handle, d, machine.engine.index, l, low, machine.x[d], at)
    fault = wait_for(machine.engine, TriggerFault, [])
    assert (fault.kind, fault.step, fault.layer, fault.ordinal) == ("address_changed", 1, 2, 1)
    assert f"at {elsewhere.ctypes.data:#x}" in fault.detail


def test_slots_outlive_their_engine(machine):
    """A captured graph may be replayed when its engine is gone, and triggers no other one."""
    index = machine.engine.index
    machine.engine.close()
    with TransferEngine(EngineConfig(provider="loopback")) as other:
        other.open_slots(range(DEVICES), LAYERS)
        assert other.index != index
        other.add_plan(3, DEVICES, LAYERS, [])
        low = np.array(3, np.int32)
        stream = machine.streams[0]
        for l in range(LAYERS):
            cache = machine.cache[0, l]
            machine.caller.trigger(stream.handle, 0, index, l, low, machine.x[0], cache)
        deadline = time.monotonic() + 20
        while sum("ran cuMemcpyDtoH" in line for line in machine.fake.log()) < LAYERS:
            assert time.monotonic() < deadline, machine.fake.log()
            time.sleep(0.01)
        assert other.poll(0.05) == []
        assert other.counters()["steps_live"] == 1
        assert other.counters()["triggers"] == 0


def test_without_a_driver_slots_say_what_is_missing(monkeypatch, fake_cuda):
    with TransferEngine(EngineConfig(provider="loopback")) as engine:
        fake_cuda.fail("cuMemHostAlloc", OUT_OF_MEMORY)
        with pytest.raises(FabricUnavailable, match="cannot be pinned: CUDA_ERROR_OUT_OF_MEMORY"):
            engine.open_slots([0], 1)
        fake_cuda.set_devices(1)
        with pytest.raises(ValueError, match="CUDA device 1: this process sees 1"):
            engine.open_slots([0, 1], 1)
        monkeypatch.setenv("JAXDISAGG_LIBCUDA", "/nowhere/libcuda.so.1")
        with pytest.raises(FabricUnavailable, match="driver cannot be loaded") as raised:
            engine.open_slots([0], 1)
        assert raised.value.missing == "libcuda.so.1"
        engine.open_slots([0], 1, device=False)  # nothing was left half open
