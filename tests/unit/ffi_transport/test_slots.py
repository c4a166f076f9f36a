"""Slots in the place of the triggers' ring: jitted programs on CPU devices play CUDA's."""

import numpy as np
import pytest
from fabric_peer import wait_for, wait_for_all
from trigger_program import (
    DEVICES,
    LAYERS,
    PAGE_BYTES,
    PAGE_FLOATS,
    PAGES,
    Program,
    register,
)

from ffi_transport.engine import TransferEngine
from ffi_transport.events import TransferEnded, TriggerFault
from ffi_transport.types import EngineConfig, PageUnit, PlanWrite


@pytest.fixture
def engine():
    with TransferEngine(EngineConfig(provider="loopback", trace=True)) as engine:
        yield engine


@pytest.fixture
def receiver():
    with TransferEngine(EngineConfig(provider="loopback")) as engine:
        yield engine


def test_planned_pages_of_a_program_compiled_before(engine, receiver):
    """Each step's page of every layer and device arrives as written, while the numbers wrap."""
    program = Program(engine)
    program.run(0, 0)  # warm-up: through the ring, before there are slots
    register(engine, program)
    engine.open_slots(range(DEVICES), LAYERS, device=False)
    program.run(0, 0)  # and through slots, without a plan
    landing = np.zeros((DEVICES, LAYERS, PAGES, PAGE_FLOATS), np.float32)
    regions = {
        (d, l): receiver.register_memory(landing[d, l].ctypes.data, landing[d, l].nbytes)
        for d in range(DEVICES)
        for l in range(LAYERS)
    }
    peer = engine.connect(receiver.control_address, 30)
    unit = PageUnit(PAGE_BYTES, 0, PAGE_BYTES, 0, PAGE_BYTES)
    first = (3 << 31) - 4  # the low half passes from the largest int32 to the smallest
    for i in range(PAGES):
        transfer = engine.open_transfer(peer, 1)
        writes = [
            PlanWrite(
                transfer, d, 0, LAYERS, [i], [PAGES - 1 - i], unit,
                tuple(regions[d, l].remote() for l in range(LAYERS)),
            )
            for d in range(DEVICES)
        ]  # fmt: skip
        engine.add_plan(first + i, DEVICES, LAYERS, writes)
        engine.seal(transfer)
        low = np.array((first + i) & 0xFFFFFFFF, np.uint32).astype(np.int32)
        program.run(int(low), i)
    ended = wait_for_all(engine, TransferEnded, PAGES)
    assert {e.status for e in ended} == {"completed"}
    for i in range(PAGES):
        low = np.array((first + i) & 0xFFFFFFFF, np.uint32).astype(np.int32)
        for d, l in regions:
            expected = np.int64((l + 1) * 1000 + int(low)).astype(np.int32)  # as the step adds
            assert (landing[d, l, PAGES - 1 - i] == np.float32(expected)).all(), (i, d, l)
    counters = engine.counters()
    assert counters["steps_live"] == counters["trigger_faults"] == 0
    assert counters["units_completed"] == PAGES * DEVICES * LAYERS
    posts = engine.trace()
    posts = posts[posts["kind"] == b"post"]
    assert set(posts["step"]) == set(range(first, first + PAGES))


def test_moved_cache_is_a_fault(engine):
    program = Program(engine)
    engine.open_slots(range(DEVICES), LAYERS, device=False)
    program.run(0, 0)
    region = engine.register_memory(program.shards(1)[2].unsafe_buffer_pointer() + 64, 64)
    engine.set_source_region(2, 1, region)
    engine.add_plan(1, DEVICES, LAYERS, [])
    program.run(1, 0)
    fault = wait_for(engine, TriggerFault, [])
    assert (fault.kind, fault.ordinal, fault.layer) == ("address_changed", 2, 1)


def test_what_has_no_slots_is_refused_by_name(engine):
    for ordinals, layers, words in (
        ([], 1, "ordinals: 0 of them, not 1..64"),
        ([0, 1, 0], 1, "ordinals: 0 is there twice"),
        ([-2], 1, "ordinals: -2 is negative"),
        ([0], 0, r"layers: 0 is not in 1..512"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.open_slots(ordinals, layers, device=False)
    engine.open_slots([4, 5], 3, device=False)
    with pytest.raises(ValueError, match="slots are open already"):
        engine.open_slots([4, 5], 3, device=False)
    with pytest.raises(ValueError, match="no slots were opened for ordinal 6"):
        engine.add_plan(1, [4, 6], 3, [])
    with pytest.raises(ValueError, match="layers: 4, slots were opened for 3"):
        engine.add_plan(1, [4, 5], 4, [])
    assert engine.counters()["steps_live"] == 0


def test_slots_come_before_plans(engine):
    engine.add_plan(1, 1, 1, [])
    with pytest.raises(ValueError, match="before the first plan is filed"):
        engine.open_slots([0], 1, device=False)
