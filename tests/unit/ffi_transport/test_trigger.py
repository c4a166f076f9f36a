"""The FFI trigger inside jitted shard_map programs on several CPU devices."""

import jax
import numpy as np
import pytest
from fabric_peer import wait_for
from trigger_program import (
    DEVICES,
    LAYERS,
    PAGE_BYTES,
    PAGE_FLOATS,
    PAGES,
    WIDTH,
    Program,
    register,
)

from ffi_transport.engine import TransferEngine
from ffi_transport.events import CounterReached, Event, TransferEnded, TriggerFault
from ffi_transport.types import EngineConfig, PageUnit, PlanWrite


@pytest.fixture
def engine():
    with TransferEngine(EngineConfig(provider="loopback", trace=True)) as engine:
        yield engine


def test_fires_once_per_device_and_layer_in_order(engine):
    program = Program(engine)
    steps = 50
    first = program.run(0, 0)
    for number in range(1, steps):
        program.run(number, number % PAGES)
    assert program.step._cache_size() == 1  # new steps compile nothing
    expected = steps * DEVICES * LAYERS
    while engine.counters()["no_plan_triggers"] < expected:
        engine.poll(0.01)
    assert engine.counters()["triggers"] == expected
    trace = engine.trace()
    trace = trace[trace["kind"] == b"trigger"]
    assert len(trace) == expected
    assert (np.diff(trace["order"].astype(np.int64)) > 0).all()
    for ordinal in range(DEVICES):
        mine = trace[trace["ordinal"] == ordinal]
        pairs = list(zip(mine["step"], mine["layer"], strict=True))
        assert pairs == [(step, layer) for step in range(steps) for layer in range(LAYERS)]
    assert first.shape == (DEVICES, WIDTH)
    assert not engine.counters()["trigger_faults"]


def test_result_is_x_unchanged(engine):
    """The step with the trigger computes what the one without it does."""
    with_trigger, without = Program(engine), Program(engine)
    without.trigger = lambda step, x, cache, layer: x
    for number in range(3):
        np.testing.assert_array_equal(with_trigger.run(number, 1), without.run(number, 1))


def test_planned_pages_are_what_the_step_wrote(engine):
    program = Program(engine)
    program.run(0, 0)  # warm-up: compiles, and the caches are where they stay
    register(engine, program)
    landing = np.zeros((DEVICES, LAYERS, PAGES, PAGE_FLOATS), np.float32)
    with TransferEngine(EngineConfig(provider="loopback")) as receiver:
        regions = {
            (d, l): receiver.register_memory(landing[d, l].ctypes.data, landing[d, l].nbytes)
            for d in range(DEVICES)
            for l in range(LAYERS)
        }
        peer = engine.connect(receiver.control_address, 30)
        receiver.arm(1, DEVICES * LAYERS)
        transfer = engine.open_transfer(peer, 1)
        number = (7 << 32) + 21
        writes = [
            PlanWrite(
                transfer, d, 0, LAYERS, [5], [2],
                PageUnit(PAGE_BYTES, 0, PAGE_BYTES, 0, PAGE_BYTES),
                tuple(regions[d, l].remote() for l in range(LAYERS)),
            )
            for d in range(DEVICES)
        ]  # fmt: skip
        engine.add_plan(number, DEVICES, LAYERS, writes)
        engine.seal(transfer)
        program.run(21, 5)
        ended = wait_for(engine, TransferEnded, [])
        assert ended.status == "completed"
        assert ended.units_done == DEVICES * LAYERS
        wait_for(receiver, CounterReached, [])
        for d in range(DEVICES):
            for l in range(LAYERS):
                assert (landing[d, l, 2] == (l + 1) * 1000 + 21).all()
                assert (landing[d, l, [p for p in range(PAGES) if p != 2]] == 0).all()
    trace = engine.trace()
    posts = trace[trace["kind"] == b"post"]
    assert set(posts["step"]) == {number}
    assert sorted(zip(posts["ordinal"], posts["layer"], strict=True)) == sorted(regions)
    assert engine.counters()["steps_live"] == 0


def test_moved_cache_is_a_fault(engine):
    program = Program(engine)
    program.run(0, 0)
    register(engine, program)
    program.run(1, 0)
    assert engine.poll(0) == []
    moved = tuple(jax.device_put(np.asarray(c), program.sharding) for c in program.caches)
    kept, program.caches = program.caches, moved  # elsewhere, while the old ones still exist
    program.run(2, 0)
    seen: list[Event] = []
    fault = wait_for(engine, TriggerFault, seen)
    assert fault.kind == "address_changed"
    assert fault.step == 2
    assert "registered at 0x" in fault.detail
    del kept


def test_trigger_of_a_closed_engine_is_harmless():
    with TransferEngine(EngineConfig(provider="loopback")) as engine:
        program = Program(engine)
        program.run(0, 0)
    x = program.run(1, 0)
    with TransferEngine(EngineConfig(provider="loopback")) as other:
        assert other.index != engine.index
        program.run(2, 0)
        assert other.counters()["triggers"] == 0
    assert np.isfinite(x).all()


def test_cache_is_not_copied(engine):
    """The program of a step holds no second cache, and the call's output is its operand x."""
    program = Program(engine)
    compiled = program.step.lower(np.int32(0), program.x, program.caches, np.int32(0)).compile()
    cache_bytes = PAGES * PAGE_BYTES
    assert compiled.memory_analysis().temp_size_in_bytes < cache_bytes
    text = compiled.as_text()
    calls = [line for line in text.splitlines() if "jaxdisagg_layer_trigger" in line]
    assert len(calls) == LAYERS
    assert all("output_to_operand_aliasing" in line for line in calls)
    addresses = [program.shards(0)[0].unsafe_buffer_pointer()]
    for number in range(5):
        program.run(number, 0)
        addresses.append(program.shards(0)[0].unsafe_buffer_pointer())
    assert len(set(addresses)) == 1
