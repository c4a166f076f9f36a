"""Synthetic sysfs trees: the folders, files and links that topology is read from."""

import os
from collections.abc import Sequence
from pathlib import Path

NVIDIA, H100, AMAZON, EFA, ENA, MELLANOX, CX7 = (
    0x10DE, 0x2330, 0x1D0F, 0xEFA2, 0xEC20, 0x15B3, 0x1021,
)  # fmt: skip


def cpu_list(cpus: Sequence[int]) -> str:
    """As the kernel writes it, one range a run."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs)


class SysfsTree:
    """A machine below `root`; every method adds to it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._cpus: dict[int, list[int]] = {}
        for folder in ("devices/system/cpu", "bus/pci/devices", "class/net"):
            (root / folder).mkdir(parents=True)

    def write(self, path: str, text: str) -> None:
        """A file, with the newline that sysfs files end with."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def link(self, path: str, target: str) -> None:
        """A relative link, as sysfs has them."""
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.relpath(self.root / target, place.parent))

    def numa(self, id: int, cpus: Sequence[int], distances: str = "") -> None:
        """A NUMA node with these CPUs; `distances` such as "10 21"."""
        self._cpus[id] = list(cpus)
        self.write(f"devices/system/node/node{id}/cpulist", cpu_list(cpus))
        self.write(f"devices/system/node/node{id}/distance", distances)
        online = sorted(cpu for node in self._cpus.values() for cpu in node)
        self.write("devices/system/cpu/online", cpu_list(online))
        with_cpus = [node for node, its in self._cpus.items() if its]
        self.write("devices/system/node/has_cpu", cpu_list(with_cpus))

    def pci(self, path: Sequence[str], kind: int, vendor: int, device: int, numa: int) -> str:
        """A PCI device at the end of a path from its host bridge; its folder."""
        folder = "devices/" + "/".join(path)
        values = {
            "class": f"0x{kind:06x}",
            "vendor": f"0x{vendor:04x}",
            "device": f"0x{device:04x}",
            "numa_node": str(numa),
            "local_cpulist": cpu_list(self._cpus.get(numa, [])),
        }
        for name, text in values.items():
            self.write(f"{folder}/{name}", text)
        for i in range(1, len(path)):  # the bridges on the way are PCI devices too
            bridge = "devices/" + "/".join(path[: i + 1])
            if not (self.root / bridge / "class").exists():
                self.write(f"{bridge}/class", "0x060400")
                self.write(f"{bridge}/vendor", "0x1000")
            if not (self.root / "bus/pci/devices" / path[i]).exists():
                self.link(f"bus/pci/devices/{path[i]}", bridge)
        return folder

    def gpu(self, path: Sequence[str], numa: int) -> None:
        """An NVIDIA accelerator."""
        self.pci(path, 0x030200, NVIDIA, H100, numa)

    def rdma(
        self,
        name: str,
        path: Sequence[str],
        numa: int,
        *,
        efa: bool = False,
        state: str = "4: ACTIVE",
        net: str | None = None,
    ) -> None:
        """An RDMA NIC of one port, with an IP interface named `net` if it has one."""
        vendor, device = (AMAZON, EFA) if efa else (MELLANOX, CX7)
        folder = self.pci(path, 0x020000, vendor, device, numa)
        home = f"{folder}/infiniband/{name}"
        self.write(f"{home}/node_type", "7: <unknown>" if efa else "1: CA")
        self.write(f"{home}/ports/1/state", state)
        self.write(f"{home}/ports/1/rate", "100 Gb/sec (4X EDR)" if efa else "400 Gb/sec (4X NDR)")
        self.write(f"{home}/ports/1/link_layer", "Unknown" if efa else "Ethernet")
        self.link(f"{home}/device", folder)
        self.link(f"class/infiniband/{name}", home)
        if net is not None:
            self._net(net, folder, "up", "400000")

    def ethernet(
        self, name: str, path: Sequence[str], numa: int, state: str = "up", speed: str = "100000"
    ) -> None:
        """A NIC without RDMA."""
        self._net(name, self.pci(path, 0x020000, AMAZON, ENA, numa), state, speed)

    def _net(self, name: str, folder: str, state: str, speed: str) -> None:
        home = f"{folder}/net/{name}"
        self.write(f"{home}/operstate", state)
        self.write(f"{home}/speed", speed)
        self.link(f"{home}/device", folder)
        self.link(f"class/net/{name}", home)

    def virtual(self, name: str) -> None:
        """An interface without a device."""
        home = f"devices/virtual/net/{name}"
        self.write(f"{home}/operstate", "unknown")
        self.link(f"class/net/{name}", home)


def under_switch(base: int, port: int, bus: int, slot: int = 0) -> list[str]:
    """The path of a device behind the `port`th port of a switch whose first bus is `base`."""
    return [
        f"pci0000:{base:02x}",
        f"0000:{base:02x}:01.0",
        f"0000:{base + 1:02x}:00.0",
        f"0000:{base + 2:02x}:{port:02x}.0",
        f"0000:{bus:02x}:{slot:02x}.0",
    ]


def p5_like(root: Path) -> SysfsTree:
    """8 accelerators, 32 EFA NICs and an ENA, 2 NUMA nodes; 1 + 4 behind each PCIe switch."""
    tree = SysfsTree(root)
    tree.numa(0, [*range(48), *range(96, 144)], "10 32")
    tree.numa(1, [*range(48, 96), *range(144, 192)], "32 10")
    for island in range(8):
        base, numa = 0x44 + 0x11 * island, island // 4
        for port in range(4):
            bus = base + 0x0B + port
            tree.rdma(f"rdmap{bus}s0", under_switch(base, port, bus), numa, efa=True)
        tree.gpu(under_switch(base, 4, base + 0x0F), numa)
    tree.ethernet("ens32", ["pci0000:20", "0000:20:05.0"], 0)
    tree.virtual("lo")
    return tree


def connectx_8(root: Path) -> SysfsTree:
    """8 accelerators and 8 ConnectX-7, 2 NUMA nodes; 2 + 2 behind each of 4 PCIe switches."""
    tree = SysfsTree(root)
    tree.numa(0, range(32), "10 21")
    tree.numa(1, range(32, 64), "21 10")
    for switch in range(4):
        base, numa = 0x10 + 0x20 * switch, switch // 2
        for port in range(2):
            tree.gpu(under_switch(base, port, base + 8 + port), numa)
        for port in range(2):
            n = 2 * switch + port
            tree.rdma(
                f"mlx5_{n}", under_switch(base, 2 + port, base + 10 + port), numa, net=f"eth{n + 1}"
            )
    tree.ethernet("eth0", ["pci0000:f0", "0000:f0:02.0"], 1, speed="25000")
    tree.virtual("lo")
    return tree


def no_nic(root: Path) -> SysfsTree:
    """Two accelerators and an Ethernet interface, one NUMA node that the devices do not name."""
    tree = SysfsTree(root)
    tree.numa(0, range(8), "10")
    for slot in (0x1E, 0x1F):
        tree.gpu(["pci0000:00", f"0000:00:{slot:02x}.0"], -1)
    tree.ethernet("ens5", ["pci0000:00", "0000:00:05.0"], -1)
    tree.virtual("lo")
    return tree
