"""Which devices CUDA's driver shows to this process, from the driver itself, by ctypes.

The names and numbers are those of the CUDA driver API (cuda.h). No context is made. Run against
stand-ins for the driver; not run on a machine with accelerators.
"""

import ctypes
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ffi_transport.topology.machine import pci_address

log = logging.getLogger(__name__)

LIBRARY_VARIABLE = "JAXDISAGG_LIBCUDA"  # another library than the system's driver
LIBRARY = "libcuda.so.1"
_TEXT_BYTES = 256
_ADDRESS_BYTES = 32

ATTRIBUTES: Mapping[str, int] = {
    "compute_mode": 20,
    "capability_major": 75,
    "capability_minor": 76,
    "memory_mapping": 102,  # cuMemCreate and its like
    "rdma_with_memory_mapping": 110,
    "rdma": 116,
    "rdma_flush_options": 117,
    "rdma_writes_ordering": 118,
    "dmabuf": 124,
}
"""CUdevice_attribute by names of our own; `CudaDevice.attributes` has those that are answered."""


class CudaUnavailable(Exception):
    """There is no driver here, or it does not answer; the text says which."""


@dataclass(frozen=True)
class CudaDevice:
    """One device as the driver describes it; `ordinal` is jax's `local_hardware_id`.

    `memory` is in bytes. What an old driver or a stand-in does not tell is "", 0 or left out.
    """

    ordinal: int
    address: str
    name: str = ""
    uuid: str = ""
    memory: int = 0
    attributes: Mapping[str, int] | None = None


class CudaQuery:
    """Questions to a loaded driver. Raises CudaUnavailable if it is not there or does not start."""

    def __init__(self, library: str | None = None) -> None:
        name = os.environ.get(LIBRARY_VARIABLE, LIBRARY) if library is None else library
        try:
            self._library = ctypes.CDLL(name)
        except OSError as error:
            raise CudaUnavailable(f"no CUDA driver: {error}") from None
        self._call("cuInit", 0)

    def version(self) -> tuple[int, int]:
        """The CUDA version that the driver takes, such as (13, 0)."""
        value = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(value))
        return value.value // 1000, value.value % 1000 // 10

    def devices(self) -> list[CudaDevice]:
        """The devices that this process sees, by ordinal.

        CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER and what a container hides are accounted for.
        """
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return [self._device(ordinal) for ordinal in range(count.value)]

    def _device(self, ordinal: int) -> CudaDevice:
        handle = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(handle), ordinal)
        text = ctypes.create_string_buffer(_ADDRESS_BYTES)
        self._call("cuDeviceGetPCIBusId", text, _ADDRESS_BYTES, handle)
        address = pci_address(text.value.decode("ascii", "replace"))
        name = ctypes.create_string_buffer(_TEXT_BYTES)
        self._ask("cuDeviceGetName", name, _TEXT_BYTES, handle)
        uuid = (ctypes.c_ubyte * 16)()
        has_uuid = self._ask("cuDeviceGetUuid_v2", uuid, handle) or self._ask(
            "cuDeviceGetUuid", uuid, handle
        )
        memory = ctypes.c_size_t()
        self._ask("cuDeviceTotalMem_v2", ctypes.byref(memory), handle)
        attributes: dict[str, int] = {}
        for what, number in ATTRIBUTES.items():
            value = ctypes.c_int()
            if self._ask("cuDeviceGetAttribute", ctypes.byref(value), number, handle):
                attributes[what] = value.value
        return CudaDevice(
            ordinal,
            address,
            name.value.decode("utf-8", "replace"),
            _uuid_text(bytes(uuid)) if has_uuid else "",
            memory.value,
            attributes,
        )

    def _function(self, name: str) -> Callable[..., int]:
        try:
            return getattr(self._library, name)
        except AttributeError:
            raise CudaUnavailable(f"the CUDA driver has no {name}") from None

    def _call(self, name: str, *arguments: object) -> None:
        if status := self._function(name)(*arguments):
            raise CudaUnavailable(f"{name}: {self._error(status)}")

    def _ask(self, name: str, *arguments: object) -> bool:
        """Whether the driver knows this question and answers it."""
        function = getattr(self._library, name, None)
        return function is not None and not function(*arguments)

    def _error(self, status: int) -> str:
        text = ctypes.c_char_p()
        known = self._ask("cuGetErrorName", status, ctypes.byref(text)) and text.value
        return f"{known.decode('ascii', 'replace')} ({status})" if known else f"error {status}"


def _uuid_text(raw: bytes) -> str:
    """As nvidia-smi and CUDA_VISIBLE_DEVICES write it."""
    digits = raw.hex()
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return "GPU-" + "-".join(parts)


def cuda_addresses(library: str | None = None) -> list[str]:
    """The PCI address of each CUDA device that this process sees, by ordinal; [] without a driver.

    jax's `local_hardware_id` of a CUDA device is its ordinal, so where the driver does not say of
    one device where it is, none is told.
    """
    try:
        return [device.address for device in CudaQuery(library).devices()]
    except (CudaUnavailable, ValueError) as error:
        log.debug("no CUDA devices: %s", error)
        return []
