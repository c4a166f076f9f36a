"""A stand-in for cuda.bindings.driver over memfds: what is mapped twice is the same memory.

It refuses what the driver refuses, in so far as an order of calls can be wrong, and keeps the log.
"""

import ctypes
import itertools
import mmap
import os
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

GRAIN = 2 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FIXED, _NO_ACCESS = 0x10, 0  # MAP_FIXED and PROT_NONE
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201


def _names(*names: str) -> SimpleNamespace:
    return SimpleNamespace(**{name: index + 1 for index, name in enumerate(names)})


class FakeCuMem:
    """The module's functions and types. `log` holds the names of the calls in order."""

    CUresult = CUresult
    CUmemAllocationType = _names("CU_MEM_ALLOCATION_TYPE_PINNED")
    CUmemLocationType = _names("CU_MEM_LOCATION_TYPE_DEVICE")
    CUmemAllocationHandleType = _names("CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR")
    CUmemAllocationGranularity_flags = _names("CU_MEM_ALLOC_GRANULARITY_MINIMUM")
    CUmemAccess_flags = _names("CU_MEM_ACCESS_FLAGS_PROT_READWRITE")
    CUdevice_attribute = _names(
        "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED",
    )

    def __init__(self, *, rdma: bool = True, failing: str = "") -> None:
        self.rdma = rdma
        self.failing = failing
        self.log: list[str] = []
        self.created: list[Any] = []
        self.contexts = 0
        self.retained = 0
        self._numbers = itertools.count(1)
        self._physical: dict[int, int] = {}  # handle -> memfd
        self._reserved: dict[int, int] = {}
        self._mapped: dict[int, tuple[int, int]] = {}  # address -> (bytes, handle)

    def CUmemAllocationProp(self) -> SimpleNamespace:
        return SimpleNamespace(location=SimpleNamespace(), allocFlags=SimpleNamespace())

    def CUmemAccessDesc(self) -> SimpleNamespace:
        return SimpleNamespace(location=SimpleNamespace())

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if not name.startswith("cu"):
            return value
        return lambda *arguments: self._logged(name, value, arguments)

    def _logged(self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        self.log.append(name)
        if name == self.failing:
            return (CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
        if name.startswith("cuMem") and not self.contexts:
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        try:
            value = function(*arguments)
        except (AssertionError, KeyError, OSError):
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        if value is None:
            return (CUresult.CUDA_SUCCESS,)
        return (CUresult.CUDA_SUCCESS, *(value if isinstance(value, tuple) else (value,)))

    def alive(self) -> tuple[int, int, int, int]:
        """Handles, reservations, mappings and retained contexts that are left."""
        return len(self._physical), len(self._reserved), len(self._mapped), self.retained

    # ---- the driver ----------------------------------------------------------------------------

    def cuInit(self, flags: int) -> None:
        assert flags == 0

    def cuDeviceGet(self, ordinal: int) -> int:
        assert 0 <= ordinal < 8
        return ordinal

    def cuDevicePrimaryCtxRetain(self, device: int) -> str:
        self.retained += 1
        return f"context {device}"

    def cuDevicePrimaryCtxRelease(self, device: int) -> None:
        self.retained -= 1

    def cuCtxPushCurrent(self, context: str) -> None:
        self.contexts += 1

    def cuCtxPopCurrent(self) -> str:
        self.contexts -= 1
        return "context"

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> int:
        return int(self.rdma)

    def cuMemGetAllocationGranularity(self, properties: Any, option: int) -> int:
        return GRAIN

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> int:
        assert size > 0
        assert size % GRAIN == 0
        assert flags == 0
        self.created.append(properties)
        fd = os.memfd_create("device memory")
        os.ftruncate(fd, size)
        return self._new(fd)

    def _new(self, fd: int) -> int:
        handle = next(self._numbers)
        self._physical[handle] = fd
        return handle

    def cuMemExportToShareableHandle(self, handle: int, kind: int, flags: int) -> int:
        assert kind == self.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return os.dup(self._physical[handle])

    def cuMemImportFromShareableHandle(self, descriptor: int, kind: int) -> int:
        return self._new(os.dup(descriptor))

    def cuMemRelease(self, handle: int) -> None:
        os.close(self._physical.pop(handle))

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> int:
        assert size % GRAIN == 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        place = _libc.mmap(None, size, _NO_ACCESS, flags, -1, 0)
        self._reserved[place] = size
        return place

    def cuMemAddressFree(self, address: int, size: int) -> None:
        assert address not in self._mapped
        assert self._reserved.pop(address) == size
        _libc.munmap(address, size)

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> None:
        assert self._reserved[address] == size
        assert address not in self._mapped
        fd = self._physical[handle]
        assert os.fstat(fd).st_size == size
        _libc.mmap(address, size, _NO_ACCESS, mmap.MAP_SHARED | _FIXED, fd, offset)
        self._mapped[address] = (size, handle)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> None:
        assert self._mapped[address][0] == size
        assert len(access) == count == 1
        _libc.mprotect(address, size, _READ_WRITE)

    def cuMemUnmap(self, address: int, size: int) -> None:
        assert self._mapped.pop(address)[0] == size
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED
        _libc.mmap(address, size, _NO_ACCESS, flags, -1, 0)

    def _find(self, address: int) -> tuple[int, int, int]:
        for base, (size, handle) in self._mapped.items():
            if base <= address < base + size:
                return base, size, handle
        raise KeyError(address)

    def cuMemGetAddressRange(self, address: int) -> tuple[int, int]:
        return self._find(address)[:2]

    def cuMemRetainAllocationHandle(self, address: int) -> int:
        return self._new(os.dup(self._physical[self._find(address)[2]]))
