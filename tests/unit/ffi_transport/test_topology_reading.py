"""What is read from a sysfs tree: whole machines, odd ones, and this one."""

import re
from pathlib import Path
from random import Random

import pytest
from sysfs_tree import SysfsTree, connectx_8, no_nic, p5_like, under_switch

from ffi_transport.topology import (
    Nic,
    Topology,
    choices,
    domain_name,
    pci_address,
    read_topology,
)
from ffi_transport.topology.reading import natural, parse_cpu_list


def nic_of(topology: Topology, name: str) -> Nic:
    nic = topology.nic(name)
    assert nic is not None
    return nic


def test_a_machine_like_p5(tmp_path):
    topology = read_topology(p5_like(tmp_path).root)
    assert topology.problems == ()
    assert topology.cpus == tuple(range(192))
    assert [node.cpus for node in topology.numa] == [
        (*range(48), *range(96, 144)),
        (*range(48, 96), *range(144, 192)),
    ]
    assert topology.numa[0].distances == ((0, 10), (1, 32))
    assert [gpu.address for gpu in topology.gpus] == [
        "0000:53:00.0", "0000:64:00.0", "0000:75:00.0", "0000:86:00.0",
        "0000:97:00.0", "0000:a8:00.0", "0000:b9:00.0", "0000:ca:00.0",
    ]  # fmt: skip
    efa = [nic for nic in topology.nics if nic.kind == "efa"]
    assert len(efa) == 32
    assert [nic.name for nic in efa][:5] == [
        "rdmap79s0", "rdmap80s0", "rdmap81s0", "rdmap82s0", "rdmap96s0",
    ]  # fmt: skip
    assert efa[0].problem is None
    assert (efa[0].speed, efa[0].link) == (100.0, "Unknown")
    assert efa[0].pci is not None
    assert efa[0].pci.path == (
        "pci0000:44", "0000:44:01.0", "0000:45:00.0", "0000:46:00.0", "0000:4f:00.0",
    )  # fmt: skip
    assert (efa[0].pci.numa_node, efa[31].pci and efa[31].pci.numa_node) == (0, 1)
    # Ethernet without RDMA, and the loopback interface, are no RDMA NICs.
    assert [(nic.name, nic.kind) for nic in topology.nics if not nic.rdma] == [
        ("ens32", "ip"),
        ("lo", "ip"),
    ]
    assert (topology.gpus[0].vendor, topology.gpus[0].device) == (0x10DE, 0x2330)


def test_a_machine_with_connectx(tmp_path):
    topology = read_topology(connectx_8(tmp_path).root)
    verbs = [nic for nic in topology.nics if nic.rdma]
    assert [nic.name for nic in verbs] == [f"mlx5_{i}" for i in range(8)]
    assert {nic.kind for nic in verbs} == {"verbs"}
    assert verbs[3].interfaces == ("eth4",)
    assert verbs[3].speed == 400.0
    ethernet = nic_of(topology, "eth4")
    assert (ethernet.kind, ethernet.pci, ethernet.speed) == ("ip", verbs[3].pci, 400.0)


def test_a_machine_without_rdma(tmp_path):
    topology = read_topology(no_nic(tmp_path).root)
    assert [nic.name for nic in topology.nics] == ["ens5", "lo"]
    # The firmware says -1; there is but one node.
    assert {gpu.pci.numa_node for gpu in topology.gpus} == {0}
    assert topology.gpus[0].pci.cpus == tuple(range(8))


def test_memory_without_cpus_is_no_other_node(tmp_path):
    tree = no_nic(tmp_path)
    tree.numa(1, [], "20 10")
    assert {gpu.pci.numa_node for gpu in read_topology(tree.root).gpus} == {0}
    tree.numa(2, [8], "20 20 10")
    assert {gpu.pci.numa_node for gpu in read_topology(tree.root).gpus} == {-1}


def test_names_of_domains(tmp_path):
    """As fi_info prints them: `domain: efa_0-rdm`, `domain: mlx5_0`, `domain: eth0`."""
    tree = SysfsTree(tmp_path)
    tree.rdma("efa_0", ["pci0000:00", "0000:00:06.0"], -1, efa=True)
    tree.rdma("mlx5_0", ["pci0000:00", "0000:00:07.0"], -1)
    tree.ethernet("eth0", ["pci0000:00", "0000:00:05.0"], -1)
    topology = read_topology(tmp_path)
    assert [domain_name(nic) for nic in topology.nics] == ["efa_0-rdm", "mlx5_0", "eth0"]
    assert nic_of(topology, "efa_0-rdm") is nic_of(topology, "efa_0")
    assert topology.nic("efa_1") is None


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ("1: DOWN", "port 1 is DOWN"),
        ("2: INIT", "port 1 is INIT"),
        ("", "port 1 is unknown"),
        ("4: ACTIVE", None),
    ],
)
def test_ports_that_are_not_active(tmp_path, state, problem):
    tree = SysfsTree(tmp_path)
    tree.rdma("mlx5_0", ["pci0000:00", "0000:00:07.0"], 0, state=state)
    nic = nic_of(read_topology(tmp_path), "mlx5_0")
    assert nic.problem == problem
    assert nic.speed == (400.0 if problem is None else None)


def test_the_first_active_of_several_ports(tmp_path):
    tree = SysfsTree(tmp_path)
    tree.rdma("mlx4_0", ["pci0000:00", "0000:00:07.0"], 0, state="1: DOWN")
    second = "devices/pci0000:00/0000:00:07.0/infiniband/mlx4_0/ports/2"
    tree.write(f"{second}/state", "4: ACTIVE")
    tree.write(f"{second}/rate", "56 Gb/sec (4X FDR)")
    tree.write(f"{second}/link_layer", "InfiniBand")
    nic = nic_of(read_topology(tmp_path), "mlx4_0")
    assert (nic.problem, nic.speed, nic.link) == (None, 56.0, "InfiniBand")


def test_rdma_that_cannot_be_used(tmp_path):
    tree = SysfsTree(tmp_path)
    # Soft RoCE hangs below devices/virtual.
    tree.write("devices/virtual/infiniband/rxe0/ports/1/state", "4: ACTIVE")
    tree.link("class/infiniband/rxe0", "devices/virtual/infiniband/rxe0")
    tree.rdma("iw0", ["pci0000:00", "0000:00:07.0"], 0)
    tree.write("devices/pci0000:00/0000:00:07.0/infiniband/iw0/node_type", "4: RNIC")
    topology = read_topology(tmp_path)
    assert nic_of(topology, "rxe0").problem == "it has no PCI device: software RDMA"
    assert "iWARP" in (nic_of(topology, "iw0").problem or "")


@pytest.mark.parametrize(
    ("vendor", "device", "kind"),
    [
        *((0x1D0F, id, "efa") for id in (0xEFA0, 0xEFA1, 0xEFA2, 0xEFA3)),
        (0x15B3, 0xEFA1, "verbs"),
        (0x1D0F, 0xEC20, "verbs"),
    ],
)
def test_kinds_of_rdma(tmp_path, vendor, device, kind):
    tree = SysfsTree(tmp_path)
    tree.rdma("nic", ["pci0000:00", "0000:00:07.0"], 0)
    tree.write("devices/pci0000:00/0000:00:07.0/vendor", f"{vendor:#06x}")
    tree.write("devices/pci0000:00/0000:00:07.0/device", f"{device:#06x}")
    assert nic_of(read_topology(tmp_path), "nic").kind == kind


def test_interfaces(tmp_path):
    tree = SysfsTree(tmp_path)
    tree.ethernet("down0", ["pci0000:00", "0000:00:05.0"], -1, state="down", speed="-1")
    tree.virtual("veth0")
    # A virtio interface hangs below its PCI device, not at it.
    tree.pci(["pci0000:00", "0000:00:03.0"], 0x020000, 0x1AF4, 0x1000, -1)
    home = "devices/pci0000:00/0000:00:03.0/virtio2/net/eth0"
    tree.write(f"{home}/operstate", "up")
    tree.link(f"{home}/device", "devices/pci0000:00/0000:00:03.0/virtio2")
    tree.link("class/net/eth0", home)
    tree.write("class/net/bonding_masters", "")  # a file among folders
    topology = read_topology(tmp_path)
    assert [nic.name for nic in topology.nics] == ["eth0", "down0", "veth0"]
    eth0, down0, veth0 = topology.nics
    assert eth0.pci is not None
    assert eth0.pci.address == "0000:00:03.0"
    assert (down0.problem, down0.speed) == ("its link is down", None)
    assert (veth0.pci, veth0.problem) == (None, None)


def test_accelerators_and_what_is_none(tmp_path):
    tree = SysfsTree(tmp_path)
    kinds = {
        "01": (0x030000, 0x10DE, True),  # a display controller by NVIDIA
        "02": (0x030000, 0x1D0F, False),  # a virtual machine's screen
        "03": (0x068000, 0x10DE, False),  # an NVSwitch
        "04": (0x120000, 0x1002, True),  # a processing accelerator of another vendor
        "05": (0x040300, 0x10DE, False),  # the audio function of a graphics card
        "06": (0x030200, 0x10DE, True),
    }
    for slot, (kind, vendor, _) in kinds.items():
        tree.pci(["pci0000:00", f"0000:00:{slot}.0"], kind, vendor, 0x2330, -1)
    expected = [f"0000:00:{slot}.0" for slot, (_, _, is_one) in kinds.items() if is_one]
    assert [gpu.address for gpu in read_topology(tmp_path).gpus] == expected


def test_garbage_is_told_and_left_out(tmp_path):
    tree = p5_like(tmp_path)
    gpu = "devices/" + "/".join(under_switch(0x44, 4, 0x53))
    tree.write(f"{gpu}/numa_node", "left")
    tree.write(f"{gpu}/local_cpulist", "0-x")
    (tmp_path / "devices/system/node/node1/cpulist").write_bytes(b"\xff\xfe")
    tree.write("devices/" + "/".join(under_switch(0x55, 4, 0x64)) + "/class", "0x03zz")
    (tmp_path / "devices" / "/".join(under_switch(0x66, 4, 0x75)) / "vendor").unlink()
    tree.link("bus/pci/devices/0000:ff:00.0", "devices/nowhere")
    (tmp_path / "class/net/outside").mkdir()
    (tmp_path / "class/net/outside/device").symlink_to("/proc/self")
    topology = read_topology(tmp_path)
    assert [gpu.address for gpu in topology.gpus][:2] == ["0000:53:00.0", "0000:86:00.0"]
    first = topology.gpus[0].pci
    assert (first.numa_node, first.cpus) == (-1, ())
    assert topology.numa[1].cpus == ()
    told = "\n".join(topology.problems)
    for path, what in (
        ("node/node1/cpulist", "not text"),
        ("0000:53:00.0/numa_node", "'left' is no number"),
        ("0000:53:00.0/local_cpulist", "'0-x' is no list of CPUs"),
        ("0000:64:00.0/class", "'0x03zz' is no number"),
        ("class/net/outside/device", "it leads out of the tree"),
    ):
        assert re.search(f"{path}: {re.escape(what)}", told), told
    assert len(topology.problems) == 5


def test_files_that_may_not_be_read(tmp_path, monkeypatch):
    tree = p5_like(tmp_path)
    refused = tree.root / "devices" / "/".join(under_switch(0x44, 4, 0x53)) / "class"
    read_text = Path.read_text

    def guarded(path, *args, **kwargs):
        if path.resolve() == refused:
            raise PermissionError(13, "Permission denied")
        return read_text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", guarded)
    topology = read_topology(tmp_path)
    assert len(topology.gpus) == 7
    assert topology.problems == ("bus/pci/devices/0000:53:00.0/class: Permission denied",)


@pytest.mark.parametrize("make", [p5_like, connectx_8, no_nic])
def test_the_order_of_files_does_not_matter(tmp_path, make, monkeypatch):
    root = make(tmp_path).root
    expected = read_topology(root)
    ways = choices(expected, "auto", [gpu.address for gpu in expected.gpus])
    iterdir = Path.iterdir
    for seed in range(5):
        random = Random(seed)

        def shuffled(path, random=random):
            entries = list(iterdir(path))
            random.shuffle(entries)
            return iter(entries)

        monkeypatch.setattr(Path, "iterdir", shuffled)
        found = read_topology(root)
        assert found == expected
        assert choices(found, "auto", [gpu.address for gpu in found.gpus]) == ways


def test_a_root_that_is_no_sysfs(tmp_path):
    with pytest.raises(ValueError, match=r"root: .*/nowhere is no folder"):
        read_topology(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"root: .* is no sysfs tree: it has none of"):
        read_topology(tmp_path)


def test_this_machine():
    topology = read_topology()
    interfaces = Path("/sys/class/net")
    assert topology.nic("lo") is not None
    assert {nic.name for nic in topology.nics if not nic.rdma} == {
        entry.name for entry in interfaces.iterdir() if entry.is_dir()
    }


def test_cpu_lists():
    assert parse_cpu_list("0-2,8,10-11\n") == (0, 1, 2, 8, 10, 11)
    assert parse_cpu_list("") == ()
    for bad in ("3-1", "a", "0-99999999", "-1"):
        with pytest.raises(ValueError):
            parse_cpu_list(bad)


def test_natural_order():
    names = ["mlx5_10", "mlx5_2", "eth0", "7", "mlx5_bond_0"]
    assert sorted(names, key=natural) == ["7", "eth0", "mlx5_2", "mlx5_10", "mlx5_bond_0"]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0000:1b:00.0", "0000:1b:00.0"),
        ("1B:00.1", "0000:1b:00.1"),
        ("00000000:53:00.0", "0000:53:00.0"),
        ("10000:e1:00.0", "10000:e1:00.0"),
    ],
)
def test_pci_addresses(text, address):
    assert pci_address(text) == address


@pytest.mark.parametrize("text", ["", "gpu0", "1b:00", "1b:00.8", "zz:00.0", "0:1:2:3.0"])
def test_no_pci_address(text):
    with pytest.raises(ValueError, match="is no PCI address"):
        pci_address(text)
