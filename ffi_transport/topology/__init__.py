"""Which NICs and CPUs are near which accelerator, from sysfs; and what an engine should use.

`read_topology` reads a machine (reading.py), `assign` deals its NICs to devices (assigning.py),
`choices` says which provider, domains and CPUs an engine is opened with (choosing.py).
"""

from ffi_transport.topology.assigning import DeviceNics, assign, closeness
from ffi_transport.topology.choosing import FabricChoice, choices, groups
from ffi_transport.topology.cuda import (
    CudaDevice,
    CudaQuery,
    CudaUnavailable,
    cuda_addresses,
)
from ffi_transport.topology.machine import (
    Gpu,
    Nic,
    NumaNode,
    PciDevice,
    Topology,
    cpu_ranges,
    domain_name,
    pci_address,
)
from ffi_transport.topology.reading import read_topology

__all__ = [
    "CudaDevice",
    "CudaQuery",
    "CudaUnavailable",
    "DeviceNics",
    "FabricChoice",
    "Gpu",
    "Nic",
    "NumaNode",
    "PciDevice",
    "Topology",
    "assign",
    "choices",
    "closeness",
    "cpu_ranges",
    "cuda_addresses",
    "domain_name",
    "groups",
    "pci_address",
    "read_topology",
]
