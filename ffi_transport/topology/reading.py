"""Reads a machine's topology from sysfs. What cannot be understood is noted and left out."""

import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ffi_transport.topology.machine import Gpu, Nic, NumaNode, PciDevice, Topology, pci_address

NVIDIA, AMAZON = 0x10DE, 0x1D0F
DISPLAY_CLASSES = (0x0300, 0x0302)
ACCELERATOR_CLASS = 0x1200
EFA_DEVICES = range(0xEFA0, 0xEFB0)
MAX_CPU = 1 << 16
ACTIVE, IWARP = "4:", "4:"  # the first words of ports/*/state and of node_type

_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_PCI = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec")


def read_topology(root: Path = Path("/sys")) -> Topology:
    """The topology that a sysfs tree tells of; needs no device, no library and no right.

    Raises ValueError naming `root` if it is no sysfs tree.
    """
    if not root.is_dir():
        raise ValueError(f"root: {root} is no folder")
    wanted = ("devices/system", "bus/pci/devices", "class/net")
    if not any((root / part).is_dir() for part in wanted):
        raise ValueError(f"root: {root} is no sysfs tree: it has none of {', '.join(wanted)}")
    return _Reader(root).read()


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """CPU numbers from `0-3,8`, as the kernel writes them. Raises ValueError."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if not 0 <= low <= high < MAX_CPU:
            raise ValueError(f"{part!r} are no CPUs")
        cpus.update(range(low, high + 1))
    return tuple(sorted(cpus))


def natural(name: str) -> list[tuple[int, int, str]]:
    """A sort key by which mlx5_2 comes before mlx5_10."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


class _Reader:
    def __init__(self, root: Path) -> None:
        self._root = Path(os.path.realpath(root))
        self._problems: list[str] = []
        self._numa: dict[int, NumaNode] = {}
        self._with_cpus: list[int] = []
        self._pci: dict[str, PciDevice] = {}

    def read(self) -> Topology:
        self._numa = {node.id: node for node in self._numa_nodes()}
        # Others are memory alone, such as an accelerator's.
        self._with_cpus = [
            id
            for id in self._cpu_list(self._root / "devices/system/node/has_cpu")
            if id in self._numa
        ] or list(self._numa)
        online = self._cpu_list(self._root / "devices/system/cpu/online")
        cpus = online or tuple(sorted({cpu for node in self._numa.values() for cpu in node.cpus}))
        gpus = [gpu for entry in self._entries("bus/pci/devices") if (gpu := self._gpu(entry))]
        rdma = [self._rdma_nic(entry) for entry in self._entries("class/infiniband")]
        plain = [self._interface(entry) for entry in self._entries("class/net")]
        return Topology(
            tuple(self._numa.values()),
            cpus,
            tuple(sorted(gpus, key=lambda gpu: gpu.address)),
            tuple(sorted(_paired(rdma, plain), key=_nic_order)),
            tuple(self._problems),
        )

    # ---- files -------------------------------------------------------------------------------

    def _text(self, path: Path) -> str | None:
        try:
            return path.read_text("utf-8").strip()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            # A link that is down has no speed: the kernel answers EINVAL.
            if path.name != "speed":
                reason = error.strerror if isinstance(error, OSError) else "not text"
                self._note(path, reason or type(error).__name__)
            return None

    def _note(self, path: Path, what: str) -> None:
        self._problems.append(f"{path.relative_to(self._root)}: {what}")

    def _number(self, path: Path, base: int = 10) -> int | None:
        text = self._text(path)
        if text is None:
            return None
        try:
            return int(text, base)
        except ValueError:
            self._note(path, f"{text[:40]!r} is no number")
            return None

    def _cpu_list(self, path: Path) -> tuple[int, ...]:
        text = self._text(path)
        if text is None:
            return ()
        try:
            return parse_cpu_list(text)
        except ValueError:
            self._note(path, f"{text[:40]!r} is no list of CPUs")
            return ()

    def _entries(self, folder: str) -> list[Path]:
        path = self._root / folder
        try:
            return sorted((e for e in path.iterdir() if e.is_dir()), key=lambda e: natural(e.name))
        except FileNotFoundError:
            return []
        except OSError as error:
            self._note(path, error.strerror or type(error).__name__)
            return []

    # ---- NUMA and PCI ------------------------------------------------------------------------

    def _numa_nodes(self) -> Iterable[NumaNode]:
        entries = [
            entry
            for entry in self._entries("devices/system/node")
            if re.fullmatch(r"node\d+", entry.name)
        ]
        ids = [int(entry.name[4:]) for entry in entries]
        for id, entry in zip(ids, entries, strict=True):
            words = (self._text(entry / "distance") or "").split()
            distances = [int(word) for word in words if word.isascii() and word.isdecimal()]
            pairs = tuple(zip(ids, distances, strict=True)) if len(distances) == len(ids) else ()
            yield NumaNode(id, self._cpu_list(entry / "cpulist"), pairs)

    def _pci_device(self, link: Path) -> PciDevice | None:
        """The PCI device that a link leads to, or the nearest above it (of virtio devices)."""
        target = Path(os.path.realpath(link))
        if not target.is_relative_to(self._root):
            self._note(link, "it leads out of the tree")
            return None
        parts = target.relative_to(self._root).parts
        path = [part for part in parts if _HOST_BRIDGE.fullmatch(part) or _PCI.fullmatch(part)]
        if not path or not _PCI.fullmatch(path[-1]):
            return None
        address = pci_address(path[-1])
        if address not in self._pci:
            folder = self._root.joinpath(*parts[: parts.index(path[-1]) + 1])
            self._pci[address] = self._place(address, tuple(path), folder)
        return self._pci[address]

    def _place(self, address: str, path: tuple[str, ...], folder: Path) -> PciDevice:
        node = self._number(folder / "numa_node")
        if node not in self._numa:
            # Firmware that does not say gives -1. With one node of CPUs there is no doubt.
            node = self._with_cpus[0] if len(self._with_cpus) == 1 else -1
        cpus = self._cpu_list(folder / "local_cpulist")
        if not cpus and node in self._numa:
            cpus = self._numa[node].cpus
        return PciDevice(address, path, node, cpus)

    def _gpu(self, entry: Path) -> Gpu | None:
        kind = self._number(entry / "class", 16)
        vendor, device = (self._number(entry / name, 16) for name in ("vendor", "device"))
        if kind is None or vendor is None:
            return None
        display = kind >> 8 in DISPLAY_CLASSES and vendor == NVIDIA
        if not display and kind >> 8 != ACCELERATOR_CLASS:
            return None
        pci = self._pci_device(entry)
        return None if pci is None else Gpu(pci, vendor, device or 0)

    # ---- NICs --------------------------------------------------------------------------------

    def _rdma_nic(self, entry: Path) -> Nic:
        pci = self._pci_device(entry / "device")
        vendor, device = (self._number(entry / "device" / n, 16) for n in ("vendor", "device"))
        efa = vendor == AMAZON and device in EFA_DEVICES
        port, problem = self._active_port(entry / "ports")
        if pci is None:
            problem = "it has no PCI device: software RDMA"
        elif (self._text(entry / "node_type") or "").startswith(IWARP):
            problem = "iWARP: libfabric's verbs carries no immediate data over it"
        rate = _RATE.match(self._text(port / "rate") or "") if port else None
        return Nic(
            entry.name,
            "efa" if efa else "verbs",
            pci,
            problem,
            float(rate[1]) if rate else None,
            (self._text(port / "link_layer") or "") if port else "",
        )

    def _active_port(self, ports: Path) -> tuple[Path | None, str | None]:
        """The first port that is active, as libfabric takes it; or what its ports say instead."""
        states = []
        for port in self._entries(str(ports.relative_to(self._root))):
            state = self._text(port / "state")  # such as "4: ACTIVE"
            if state is not None and state.startswith(ACTIVE):
                return port, None
            states.append(f"port {port.name} is {(state or 'unknown').rpartition(' ')[2]}")
        return None, ", ".join(states) or "no port is known"

    def _interface(self, entry: Path) -> Nic:
        pci = self._pci_device(entry / "device") if (entry / "device").exists() else None
        state = self._text(entry / "operstate") or "unknown"
        speed = self._text(entry / "speed")
        known = speed is not None and speed.isascii() and speed.isdecimal()
        problem = None if state in ("up", "unknown") else f"its link is {state}"
        return Nic(entry.name, "ip", pci, problem, int(speed) / 1000 if speed and known else None)


def _paired(rdma: list[Nic], plain: list[Nic]) -> list[Nic]:
    """The NICs, each RDMA one knowing the IP interfaces of its PCI device."""
    return [
        replace(nic, interfaces=tuple(i.name for i in plain if nic.pci and i.pci == nic.pci))
        for nic in rdma
    ] + plain


def _nic_order(nic: Nic) -> tuple[object, ...]:
    address = nic.pci.address if nic.pci else ""
    return (nic.kind == "ip", nic.pci is None, address, natural(nic.name))
