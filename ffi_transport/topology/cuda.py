"""Which PCI devices CUDA's devices are, from the driver itself."""

import ctypes
import logging

from ffi_transport.topology.machine import pci_address

log = logging.getLogger(__name__)

LIBRARY = "libcuda.so.1"
_ADDRESS_BYTES = 32


def cuda_addresses(library: str = LIBRARY) -> list[str]:
    """The PCI address of each CUDA device that this process sees, by ordinal; [] without a driver.

    The driver is asked (cuInit, cuDeviceGetCount, cuDeviceGet, cuDeviceGetPCIBusId of the CUDA
    driver API), so that CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER and what a container hides are
    accounted for. jax's `local_hardware_id` of a CUDA device is its ordinal. No context is made.
    Run against a stand-in for the driver; not run on a machine with accelerators.
    """
    try:
        cuda = ctypes.CDLL(library)
        calls = cuda.cuInit, cuda.cuDeviceGetCount, cuda.cuDeviceGet, cuda.cuDeviceGetPCIBusId
    except (OSError, AttributeError) as error:
        log.debug("no CUDA driver: %s", error)
        return []
    init, get_count, get, get_address = calls
    count, device = ctypes.c_int(), ctypes.c_int()
    text = ctypes.create_string_buffer(_ADDRESS_BYTES)
    if (status := init(0)) or (status := get_count(ctypes.byref(count))):
        log.debug("the CUDA driver answers %d", status)
        return []
    found: list[str] = []
    for ordinal in range(count.value):
        status = get(ctypes.byref(device), ordinal) or get_address(text, _ADDRESS_BYTES, device)
        if status:
            log.warning("the CUDA driver does not say where device %d is: %d", ordinal, status)
            return []
        found.append(pci_address(text.value.decode("ascii", "replace")))
    return found
