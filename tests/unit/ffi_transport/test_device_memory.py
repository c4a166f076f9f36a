"""Device memory of a fake driver: sent through pinned memory, or registered as it is."""

from typing import Any

import numpy as np
import pytest
from fabric_peer import PAGE, wait_for

from ffi_transport.engine import TransferEngine
from ffi_transport.errors import FabricUnavailable, TransportError
from ffi_transport.events import CounterReached, TransferEnded
from ffi_transport.types import EngineConfig, Landing, PageUnit

WHOLE = PageUnit(PAGE, 0, PAGE, 0, PAGE)
PAGES = 512
ORDERING, ALL_DEVICES = 118, 200  # GPU_DIRECT_RDMA_WRITES_ORDERING


def device_memory(node, ordinal: int = 0):
    memory = np.random.default_rng(ordinal).integers(0, 256, PAGES * PAGE, np.uint8)
    region = node.engine.register_memory(memory.ctypes.data, memory.nbytes, device=ordinal)
    return memory, region


def send(node, other, region, slot: int) -> np.ndarray:
    """Every page to another place; returns what arrived in the order of the source's pages."""
    order = np.random.default_rng(slot).permutation(PAGES)
    other.engine.arm(slot, PAGES)
    peer = node.engine.connect(other.engine.control_address, 30)
    transfer = node.engine.open_transfer(peer, slot)
    remote = other.region.remote()
    node.engine.write_paged(transfer, region, remote, range(PAGES), order, WHOLE)
    node.engine.seal(transfer)
    assert wait_for(node.engine, TransferEnded, []).status == "completed"
    assert wait_for(other.engine, CounterReached, []) == CounterReached(slot, PAGES)
    return other.memory.reshape(PAGES, PAGE)[order].ravel()


def test_it_is_sent_through_pinned_memory(provider, make_node, fake_cuda):
    fake_cuda.set_delay(3, 200)
    before = {what: fake_cuda.live(what) for what in ("host", "stream", "event")}
    node = make_node(provider, staging_bytes=4 << 20)
    other = make_node(provider, PAGES * PAGE)
    memory, region = device_memory(node, 1)
    assert node.engine.memory_mode(region) == "staged"
    assert "FI_HMEM" in node.engine.why_staged(region)
    assert node.engine.memory_mode(node.region) == "host"
    assert node.engine.why_staged(node.region) == ""
    assert (send(node, other, region, 3) == memory).all()
    counters = node.engine.counters()
    assert counters["staged_bytes"] == memory.nbytes
    assert counters["staged_writes"] == counters["writes_completed"]
    assert counters["regions_staged"] == 1
    assert fake_cuda.live("host") == before["host"] + 1
    node.engine.deregister(region)
    node.engine.close()
    assert {what: fake_cuda.live(what) for what in before} == before


def test_it_is_registered_where_the_provider_reaches_it(make_node, fake_cuda):
    fake_cuda.set_attribute(2, ORDERING, ALL_DEVICES)
    node = make_node("loopback", device_memory="direct")
    other = make_node("loopback", PAGES * PAGE)
    memory, region = device_memory(node, 2)
    assert node.engine.memory_mode(region) == "direct"
    assert node.engine.why_staged(region) == ""
    assert (send(node, other, region, 3) == memory).all()
    assert node.engine.counters()["staged_writes"] == 0
    assert not [line for line in fake_cuda.log() if "DtoH" in line]


def test_a_provider_that_cannot_reach_it_says_so(provider, make_node, fake_cuda):
    node = make_node(provider, device_memory="direct")
    with pytest.raises(FabricUnavailable, match=f"{provider} reaches no device memory") as caught:
        device_memory(node)
    assert caught.value.missing == "FI_HMEM"


def test_memory_of_no_device_is_refused(make_node, fake_cuda):
    node = make_node("loopback")
    fake_cuda.set_devices(2)
    with pytest.raises(ValueError, match="CUDA device 2: this process sees 2"):
        device_memory(node, 2)
    memory = np.zeros(PAGE, np.uint8)
    fake_cuda.set_pointer(memory.ctypes.data, PAGE, 1)
    with pytest.raises(ValueError, match="is CUDA device 1's, not 0's"):
        node.engine.register_memory(memory.ctypes.data, PAGE, device=0)
    with pytest.raises(ValueError, match=f"length: {2 * PAGE} bytes end beyond what was allocated"):
        node.engine.register_memory(memory.ctypes.data, 2 * PAGE, device=1)
    for device in (None, 1):
        with pytest.raises(ValueError, match="end beyond all memory"):
            node.engine.register_memory(memory.ctypes.data, 2**64 - PAGE, device=device)


def test_pages_of_a_landing_are_checked(make_node, fake_cuda):
    node = make_node("loopback")
    _, region = device_memory(node)
    bad: tuple[Any, ...] = (0, -1, 3.5, 4096.0, 2**64, "4096", None)
    for size in bad:
        with pytest.raises(ValueError, match=r"page_bytes: .* must be an integer"):
            Landing((region,), [0], size)
    for page, size in ((PAGES, PAGE), (2**31, 2**33), (2**32 - 1, 2**63), (1, 2**64 - 1)):
        with pytest.raises(ValueError, match=f"page {page} of {size} bytes is beyond"):
            node.engine.arm(2, 1, landings=[Landing((region,), [0, page], size)])
    size: Any = np.int64(PAGE)
    node.engine.arm(2, 1, landings=[Landing((region,), [PAGES - 1], size)])


def test_close_says_that_mirrors_are_kept(caplog, monkeypatch):
    engine = TransferEngine(EngineConfig(provider="loopback"))
    closing, left = engine._native, [2, 0]

    class Hung:
        def close(self) -> int:
            closing.close()
            return left.pop(0)

    monkeypatch.setattr(engine, "_native", Hung())
    engine.close()
    engine.close()
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "stay mapped until the process ends: 2, as copies" in record.message


def test_a_closed_engine_arms_nothing(make_node, fake_cuda):
    node = make_node("loopback")
    _, region = device_memory(node)
    node.engine.close()
    for landings in ([], [Landing((region,), [0], PAGE)]):
        with pytest.raises(TransportError, match="the engine is closed"):
            node.engine.arm(2, 1, landings=landings)


def test_without_a_driver_it_says_what_is_missing(make_node, monkeypatch):
    monkeypatch.setenv("JAXDISAGG_LIBCUDA", "/nowhere/libcuda.so.1")
    node = make_node("loopback")
    with pytest.raises(FabricUnavailable, match="CUDA's driver") as caught:
        device_memory(node)
    assert caught.value.missing == "libcuda.so.1"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"device_memory": "pinned"}, "device_memory: 'pinned' is none of auto, direct, staged"),
        ({"staging_bytes": 1 << 20}, "staging_bytes: 1048576 is not in 2097152.."),
    ],
)
def test_bad_configuration_is_named(values, words):
    with pytest.raises(ValueError, match=words):
        EngineConfig(**values)


def test_too_little_pinned_memory_for_all_domains_is_named(fake_cuda):
    config = EngineConfig(provider="loopback", domains=("a", "b", "c"), staging_bytes=5 << 20)
    with TransferEngine(config) as engine:
        memory = np.zeros(PAGE, np.uint8)
        wide = engine.register_memory(memory.ctypes.data, PAGE, device=0)
        with pytest.raises(ValueError, match="staging_bytes: 1747626 for each domain"):
            engine.set_source_region(0, 0, wide)
        narrow = engine.register_memory(memory.ctypes.data, PAGE, [0, 2], device=0)
        engine.set_source_region(0, 0, narrow)
