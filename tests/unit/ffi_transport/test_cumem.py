"""cuMem allocations shared between processes, over a stand-in for cuda-python."""

import ctypes
import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_cumem import GRAIN, FakeCuMem

from ffi_transport import cumem
from ffi_transport.engine import TransferEngine
from ffi_transport.errors import FabricUnavailable, RegistrationFailed
from ffi_transport.events import TransferEnded
from ffi_transport.types import EngineConfig

MAPPING = ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]
UNMAPPING = ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"]


def calls(driver: FakeCuMem) -> list[str]:
    """Those that make or end something of memory."""
    return [name for name in driver.log if name.startswith("cuMem")]


def test_an_allocation_is_made_mapped_and_undone_in_order() -> None:
    driver = FakeCuMem()
    with cumem.allocate(GRAIN + 1, 3, driver=driver) as memory:
        (properties,) = driver.created
        assert properties.allocFlags.gpuDirectRDMACapable == 1
        assert properties.location.id == 3
        assert memory.length == GRAIN + 1
        assert driver.alive()[:3] == (1, 1, 1)
        ctypes.memset(memory.address, 7, memory.length)
    made = ["cuMemGetAllocationGranularity", "cuMemCreate", *MAPPING]
    assert calls(driver) == [*made, *UNMAPPING]
    assert driver.alive() == (0, 0, 0, 0)
    assert driver.contexts == 0
    memory.close()  # again: nothing
    assert driver.alive() == (0, 0, 0, 0)


def test_memory_that_nics_cannot_reach_is_not_asked_for_as_such() -> None:
    driver = FakeCuMem(rdma=False)
    cumem.allocate(1, 0, driver=driver).close()
    assert driver.created[0].allocFlags.gpuDirectRDMACapable == 0


@pytest.mark.parametrize("failing", ["cuMemCreate", *MAPPING])
def test_a_failure_leaves_nothing_behind(failing: str) -> None:
    driver = FakeCuMem(failing=failing)
    with pytest.raises(RegistrationFailed, match=f"{failing}: CUDA_ERROR_OUT_OF_MEMORY"):
        cumem.allocate(1, 0, driver=driver)
    assert driver.alive() == (0, 0, 0, 0)


def test_bad_lengths_are_refused() -> None:
    driver = FakeCuMem()
    with pytest.raises(ValueError, match="length: 0"):
        cumem.allocate(0, 0, driver=driver)
    with (
        cumem.allocate(GRAIN, 0, driver=driver) as memory,
        pytest.raises(ValueError, match=f"length: {GRAIN} bytes at offset 512"),
    ):
        cumem.retain(memory.address + 512, GRAIN, 0, driver=driver)


def sent_from(memory: cumem.Mapping) -> bytes:
    """What arrives when an engine of this process sends all of it."""
    target = np.zeros(memory.length, np.uint8)
    with (
        TransferEngine(EngineConfig(provider="loopback")) as leader,
        TransferEngine(EngineConfig(provider="loopback")) as other,
    ):
        mine = leader.register_memory(memory.address, memory.length)
        far = other.register_memory(target.ctypes.data, memory.length).remote()
        transfer = leader.open_transfer(leader.connect(other.control_address, 30), 1)
        leader.write(transfer, mine, 0, far, 0, memory.length)
        leader.seal(transfer)
        (ended,) = [event for event in leader.poll(30) if isinstance(event, TransferEnded)]
        assert ended.status == "completed"
    return target.tobytes()


# The follower: it makes memory, hands it over, and says what it holds in the end.
FOLLOWER = """
import ctypes, socket, sys
from fake_cumem import FakeCuMem
from ffi_transport import cumem

connection = socket.socket(fileno=int(sys.argv[1]))
connection.settimeout(30)
driver = FakeCuMem()
with cumem.allocate(5000, 1, driver=driver) as memory:
    ctypes.memmove(memory.address, bytes(range(250)) * 20, 5000)
    if sys.argv[2] == "retain":  # as XLA's buffer of 1000 bytes would be
        parcel = cumem.retain(memory.address + 2000, 1000, 1, driver=driver)
    else:
        parcel = memory.export()
    cumem.send(connection, parcel)
    parcel.close()
    connection.recv(1)
    print(ctypes.string_at(memory.address, 5000).hex())
assert driver.alive() == (0, 0, 0, 0), driver.alive()
"""


@pytest.mark.parametrize(("way", "offset", "length"), [("export", 0, 5000), ("retain", 2000, 1000)])
def test_a_leader_maps_what_a_follower_made(way: str, offset: int, length: int) -> None:
    """And sends from it, and is written into it: the same bytes in both processes."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    here.settimeout(30)
    command = [sys.executable, "-c", FOLLOWER, str(there.fileno()), way]
    driver = FakeCuMem()
    content = bytes(range(250)) * 20
    with (
        here,
        subprocess.Popen(
            command,
            pass_fds=[there.fileno()],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        ) as follower,
    ):
        there.close()
        parcel = cumem.receive(here)
        memory = cumem.open_parcel(parcel, 0, driver=driver)
        parcel.close()
        assert calls(driver) == ["cuMemImportFromShareableHandle", *MAPPING]
        assert memory.length == length
        assert ctypes.string_at(memory.address, length) == content[offset : offset + length]
        assert sent_from(memory) == content[offset : offset + length]
        ctypes.memset(memory.address, 9, length)
        memory.close()
        assert driver.alive() == (0, 0, 0, 0)
        here.sendall(b"x")
        printed, _ = follower.communicate(timeout=30)
    assert follower.returncode == 0
    kept = content[:offset] + bytes([9]) * length + content[offset + length :]
    assert bytes.fromhex(printed) == kept


def test_memory_that_is_not_cumem_says_how_xla_makes_it_so() -> None:
    driver = FakeCuMem(failing="cuMemRetainAllocationHandle")
    with (
        cumem.allocate(GRAIN, 0, driver=driver) as memory,
        pytest.raises(RegistrationFailed, match="XLA_PYTHON_CLIENT_ALLOCATOR=vmm"),
    ):
        cumem.retain(memory.address, 1, 0, driver=driver)


def test_what_is_no_parcel_is_refused() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with here:
        with there:
            there.sendall(b"hello")
        with pytest.raises(RegistrationFailed, match="no parcel: 5 bytes with 0 descriptors"):
            cumem.receive(here)
        with pytest.raises(RegistrationFailed, match="no parcel: 0 bytes"):
            cumem.receive(here)


def test_without_cuda_python_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(FabricUnavailable, match="cuda12") as caught:
        cumem.allocate(1, 0)
    assert caught.value.missing == "cuda-python"


def test_imported_memory_moves_at_the_first_donating_call() -> None:
    """Why a cache cannot live in memory of ours: XLA takes what it may donate into its own."""
    raw = np.zeros(4096 + 16, np.float32)
    first = (-raw.ctypes.data // 4) % 16  # 64-byte alignment, else the import itself copies
    memory = raw[first : first + 4096]
    array = jnp.from_dlpack(memory)
    assert array.unsafe_buffer_pointer() == memory.ctypes.data
    step = jax.jit(lambda cache: cache.at[3].set(1), donate_argnums=0)
    moved = step(array)
    assert moved.unsafe_buffer_pointer() != memory.ctypes.data
    address = moved.unsafe_buffer_pointer()
    assert step(moved).unsafe_buffer_pointer() == address  # and from then on it stays
    assert memory[3] == 0
