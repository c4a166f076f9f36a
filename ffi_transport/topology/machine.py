"""What a machine is made of, as far as transfers care: NUMA nodes, accelerators, NICs."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

NicKind = Literal["efa", "verbs", "ip"]

_ADDRESS = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])")


def pci_address(text: str) -> str:
    """A PCI address in the form of sysfs: `0000:1b:00.0` from `1B:00.0` or `00000000:1B:00.0`.

    Raises ValueError for what is none.
    """
    found = _ADDRESS.fullmatch(text.strip().lower())
    if found is None:
        raise ValueError(f"{text!r} is no PCI address such as 0000:1b:00.0")
    domain, bus, slot, function = found.groups()
    return f"{int(domain or '0', 16):04x}:{int(bus, 16):02x}:{int(slot, 16):02x}.{function}"


def cpu_ranges(cpus: Iterable[int]) -> str:
    """CPU numbers as the kernel writes them: `0-3,8`."""
    text: list[str] = []
    ordered = sorted(set(cpus))
    start = 0
    for i, cpu in enumerate(ordered):
        if i + 1 == len(ordered) or ordered[i + 1] != cpu + 1:
            text.append(str(cpu) if i == start else f"{ordered[start]}-{cpu}")
            start = i + 1
    return ",".join(text)


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node: its CPUs, and its `distances` to the nodes by their id (10 is itself)."""

    id: int
    cpus: tuple[int, ...]
    distances: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class PciDevice:
    """Where a PCI device sits.

    `path` leads from the host bridge over the bridges down to the device itself, as in
    ("pci0000:50", "0000:50:01.1", "0000:51:00.0", "0000:52:00.0"). `numa_node` is -1 where the
    firmware does not say. `cpus` are near it, allowed to this process or not.
    """

    address: str
    path: tuple[str, ...]
    numa_node: int
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class Gpu:
    """An accelerator. `vendor` and `device` are PCI ids, such as 0x10de and 0x2330."""

    pci: PciDevice
    vendor: int
    device: int

    @property
    def address(self) -> str:
        """Its PCI address."""
        return self.pci.address


@dataclass(frozen=True)
class Nic:
    """A network device: an RDMA one (`efa`, `verbs`) or an IP interface (`ip`).

    `name` is that of /sys/class/infiniband or /sys/class/net. A virtual one has no `pci`.
    `problem` says why it is not chosen by itself; None if it is. `speed` is in Gbit/s, None where
    the device does not say. `link` is the link layer of RDMA ports. `interfaces` are the IP
    interfaces of the same PCI device.
    """

    name: str
    kind: NicKind
    pci: PciDevice | None
    problem: str | None = None
    speed: float | None = None
    link: str = ""
    interfaces: tuple[str, ...] = ()

    @property
    def rdma(self) -> bool:
        """Whether it is an RDMA device."""
        return self.kind != "ip"


@dataclass(frozen=True)
class Topology:
    """A machine as its sysfs tells it, in the order of PCI addresses and names.

    `cpus` are all CPUs that are online. `problems` are the files that could not be understood.
    """

    numa: tuple[NumaNode, ...] = ()
    cpus: tuple[int, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    problems: tuple[str, ...] = ()

    def nic(self, name: str) -> Nic | None:
        """The NIC of that name: as sysfs says it, or as libfabric lists it (`domain_name`)."""
        by_name = {nic.name: nic for nic in self.nics}
        by_domain = {domain_name(nic): nic for nic in self.nics}
        return by_name.get(name) or by_domain.get(name)

    def gpu(self, address: str) -> Gpu | None:
        """The accelerator at a PCI address."""
        return next((gpu for gpu in self.gpus if gpu.address == address), None)


EFA_SUFFIX = "-rdm"


def domain_name(nic: Nic) -> str:
    """The name that libfabric gives the NIC's domain for reliable-datagram endpoints.

    EFA: the verbs device's name and `-rdm` (prov/efa/src/efa_prov_info.c and efa_domain.h; seen as
    `efa_0-rdm` in what users print of fi_info). Verbs under ofi_rxm: the verbs device's own name
    (the suffix of verbs_msg_domain in prov/verbs/src/verbs_info.c is empty, and rxm keeps its core
    provider's domain). IP: the interface's name. The names of sysfs and of libibverbs are the same:
    both are the kernel's. Read in the sources; not run on RDMA hardware.
    """
    return nic.name + EFA_SUFFIX if nic.kind == "efa" else nic.name
