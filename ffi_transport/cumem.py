"""Device memory that several processes map: cuMem allocations passed on as file descriptors.

One process registers memory that another one made: `allocate` or `retain` in the owner, `send` and
`receive` over a Unix socket, and the mapping's address goes to `TransferEngine.register_memory`.
What this can serve, and that XLA's donated cache cannot live in an allocation of ours, is said in
docs/adr/0012. It needs the package cuda-python (the extras cuda12 and cuda13), imported when first
used. Not run on hardware: the tests run it over a stand-in of the driver.

Sequence of calls: CUDA driver API, "Virtual Memory Management".
"""

import contextlib
import importlib
import os
import socket
import struct
from collections.abc import Generator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from ffi_transport.errors import FabricUnavailable, RegistrationFailed

# With the descriptor: the allocation's bytes, then the memory's offset in it and its length.
_PARCEL = struct.Struct("<QQQ")


def load_driver() -> Any:
    """The module cuda.bindings.driver, initialised. FabricUnavailable says what is missing."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise FabricUnavailable(
            f"cuMem needs cuda-python, which cannot be imported ({error}): install "
            "jaxdisagg[cuda12] or jaxdisagg[cuda13]",
            missing="cuda-python",
        ) from error
    try:
        _call(driver, "cuInit", 0)
    except Exception as error:  # cuda-python has an error of its own where there is no driver
        raise FabricUnavailable(f"CUDA's driver: {error}", missing="libcuda.so.1") from error
    return driver


def _call(driver: Any, name: str, *arguments: Any) -> Any:
    """A driver function's value, its tuple of values, or None. RegistrationFailed if it fails."""
    error, *values = getattr(driver, name)(*arguments)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RegistrationFailed(f"{name}: {error.name}")
    return values[0] if len(values) == 1 else tuple(values) or None


@contextlib.contextmanager
def _device(driver: Any, ordinal: int) -> Generator[Any]:
    """The device, with its primary context, the one that XLA uses too, current."""
    device = _call(driver, "cuDeviceGet", ordinal)
    context = _call(driver, "cuDevicePrimaryCtxRetain", device)
    try:
        _call(driver, "cuCtxPushCurrent", context)
        try:
            yield device
        finally:
            _call(driver, "cuCtxPopCurrent")
    finally:
        _call(driver, "cuDevicePrimaryCtxRelease", device)


def _properties(driver: Any, ordinal: int, rdma: bool) -> Any:
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    properties.requestedHandleTypes = _handle_type(driver)
    properties.allocFlags.gpuDirectRDMACapable = int(rdma)
    return properties


def _handle_type(driver: Any) -> Any:
    return driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


@dataclass(frozen=True)
class Parcel:
    """Memory on its way to another process; `close` the descriptor when it was sent or mapped.

    `length` bytes from `offset` of an allocation of `allocation_bytes`, which `descriptor` (a file
    descriptor of this process) names.
    """

    descriptor: int
    allocation_bytes: int
    offset: int
    length: int

    def close(self) -> None:
        """Close the descriptor. The allocation lives while anybody has it mapped."""
        os.close(self.descriptor)


class Mapping:
    """A cuMem allocation in this process's address space; a context manager.

    `address` and `length` are of the memory asked for, of device `ordinal`. After `close` the
    address is invalid: deregister it first. The memory itself is freed when no process has it.
    """

    def __init__(
        self,
        driver: Any,
        ordinal: int,
        handle: Any,
        allocation_bytes: int,
        *,
        offset: int = 0,
        length: int | None = None,
    ) -> None:
        """Map an allocation's handle, which becomes the mapping's own: released by `close`."""
        self.ordinal = ordinal
        self.length = allocation_bytes if length is None else length
        self._driver = driver
        self._handle = handle
        self._bytes = allocation_bytes
        self._offset = offset
        self._undo = contextlib.ExitStack()
        with _device(driver, ordinal), contextlib.ExitStack() as undo:
            undo.callback(_call, driver, "cuMemRelease", handle)
            base = _call(driver, "cuMemAddressReserve", allocation_bytes, 0, 0, 0)
            undo.callback(_call, driver, "cuMemAddressFree", base, allocation_bytes)
            _call(driver, "cuMemMap", base, allocation_bytes, 0, handle, 0)
            undo.callback(_call, driver, "cuMemUnmap", base, allocation_bytes)
            access = driver.CUmemAccessDesc()
            access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            access.location.id = ordinal
            access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            _call(driver, "cuMemSetAccess", base, allocation_bytes, [access], 1)
            self.address = int(base) + offset
            self._undo = undo.pop_all()

    def export(self) -> Parcel:
        """For another process. RegistrationFailed if the allocation cannot be shared."""
        with _device(self._driver, self.ordinal):
            return _export(self._driver, self._handle, self._bytes, self._offset, self.length)

    def close(self) -> None:
        """Unmap and release. Idempotent."""
        with _device(self._driver, self.ordinal):
            self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _export(driver: Any, handle: Any, allocation_bytes: int, offset: int, length: int) -> Parcel:
    descriptor = _call(driver, "cuMemExportToShareableHandle", handle, _handle_type(driver), 0)
    return Parcel(int(descriptor), allocation_bytes, offset, length)


def allocate(length: int, ordinal: int, *, driver: Any = None) -> Mapping:
    """`length` bytes of device `ordinal`, shareable, and reachable by NICs where it can be.

    A ValueError for a length below 1. FabricUnavailable without cuda-python or a driver;
    RegistrationFailed with the driver's error. `driver` stands in for cuda.bindings.driver.
    """
    if length < 1:
        raise ValueError(f"length: {length} is not at least 1")
    driver = driver or load_driver()
    attribute = driver.CUdevice_attribute
    with _device(driver, ordinal) as device:
        rdma = _call(
            driver,
            "cuDeviceGetAttribute",
            attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
            device,
        )
        properties = _properties(driver, ordinal, bool(rdma))
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        grain = _call(driver, "cuMemGetAllocationGranularity", properties, minimum)
        allocation_bytes = -(-length // grain) * grain
        handle = _call(driver, "cuMemCreate", allocation_bytes, properties, 0)
    return Mapping(driver, ordinal, handle, allocation_bytes, length=length)


def retain(address: int, length: int, ordinal: int, *, driver: Any = None) -> Parcel:
    """Memory that someone else made with cuMem, for another process: such as XLA's.

    XLA does so by default from 0.12 on, and with XLA_PYTHON_CLIENT_ALLOCATOR=vmm; the parcel is
    then of the whole allocation that holds the buffer. Memory of cuMemAlloc has no such handle:
    RegistrationFailed. The parcel keeps no claim on the buffer: its owner must keep it where it is
    while others use the memory. A ValueError if the range leaves its allocation.
    """
    driver = driver or load_driver()
    with _device(driver, ordinal):
        base, allocation_bytes = _call(driver, "cuMemGetAddressRange", address)
        offset = address - int(base)
        if offset + length > allocation_bytes:
            raise ValueError(
                f"length: {length} bytes at offset {offset} leave the allocation of "
                f"{allocation_bytes} bytes"
            )
        try:
            handle = _call(driver, "cuMemRetainAllocationHandle", address)
        except RegistrationFailed as error:
            raise RegistrationFailed(
                f"{error}: the memory was not made with cuMemCreate, or not to be shared (XLA's "
                "is with XLA_PYTHON_CLIENT_ALLOCATOR=vmm)"
            ) from error
        try:
            return _export(driver, handle, allocation_bytes, offset, length)
        finally:
            _call(driver, "cuMemRelease", handle)


def open_parcel(parcel: Parcel, ordinal: int, *, driver: Any = None) -> Mapping:
    """Map a parcel that came from another process; its descriptor may be closed afterwards.

    `ordinal` is this process's for the device that holds the memory.
    """
    driver = driver or load_driver()
    with _device(driver, ordinal):
        handle = _call(
            driver, "cuMemImportFromShareableHandle", parcel.descriptor, _handle_type(driver)
        )
    return Mapping(
        driver,
        ordinal,
        handle,
        parcel.allocation_bytes,
        offset=parcel.offset,
        length=parcel.length,
    )


def send(connection: socket.socket, parcel: Parcel) -> None:
    """Hand a parcel over a connected Unix socket; it stays open on this side."""
    text = _PARCEL.pack(parcel.allocation_bytes, parcel.offset, parcel.length)
    socket.send_fds(connection, [text], [parcel.descriptor])


def receive(connection: socket.socket) -> Parcel:
    """The next parcel; waits as long as the socket's time-out says.

    RegistrationFailed if what comes is no parcel, or the other side has closed.
    """
    text, descriptors, _, _ = socket.recv_fds(connection, _PARCEL.size, 1)
    if len(text) != _PARCEL.size or len(descriptors) != 1:
        for descriptor in descriptors:
            os.close(descriptor)
        raise RegistrationFailed(
            f"no parcel: {len(text)} bytes with {len(descriptors)} descriptors came"
        )
    return Parcel(descriptors[0], *_PARCEL.unpack(text))
