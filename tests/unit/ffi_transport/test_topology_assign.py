"""Which NICs fall to which device: known machines, odd ones, and properties of any tree."""

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sysfs_tree import SysfsTree, connectx_8, no_nic, p5_like

from ffi_transport.topology import (
    Gpu,
    Nic,
    NumaNode,
    PciDevice,
    Topology,
    assign,
    closeness,
    read_topology,
)

CPUS_OF_P5 = ((*range(48), *range(96, 144)), (*range(48, 96), *range(144, 192)))


def addresses(topology: Topology) -> list[str]:
    return [gpu.address for gpu in topology.gpus]


def shares(topology: Topology, devices=None, nics=()) -> list[tuple[str, ...]]:
    return [d.nics for d in assign(topology, devices or addresses(topology), nics)]


def test_p5_has_four_nics_behind_the_switch_of_each_accelerator(tmp_path):
    topology = read_topology(p5_like(tmp_path).root)
    dealt = assign(topology, addresses(topology))
    buses = [79, 96, 113, 130, 147, 164, 181, 198]
    assert [d.nics for d in dealt] == [
        tuple(f"rdmap{bus + i}s0" for i in range(4)) for bus in buses
    ]
    assert [d.cpus for d in dealt] == [CPUS_OF_P5[i // 4] for i in range(8)]
    assert {d.near for d in dealt} == {("PCIe switch",) * 4}
    assert {d.why for d in dealt} == {"4 by PCIe switch"}


def test_connectx_has_one_nic_for_each_of_two_accelerators_at_a_switch(tmp_path):
    topology = read_topology(connectx_8(tmp_path).root)
    assert shares(topology) == [(f"mlx5_{i}",) for i in range(8)]


def test_two_nodes_on_one_machine_do_not_take_each_others_nics(tmp_path):
    topology = read_topology(p5_like(tmp_path).root)
    every = addresses(topology)
    low, high = shares(topology, every[:4]), shares(topology, every[4:])
    assert low + high == shares(topology)


def test_devices_without_a_nic_say_why(tmp_path):
    topology = read_topology(no_nic(tmp_path / "a").root)
    dealt = assign(topology, addresses(topology), allowed=(0, 1, 99))
    assert {(d.nics, d.cpus, d.why) for d in dealt} == {((), (0, 1), "the machine has no RDMA NIC")}
    tree = no_nic(tmp_path / "b")
    tree.rdma("mlx5_0", ["pci0000:00", "0000:00:07.0"], -1, state="1: DOWN")
    down = read_topology(tree.root)
    assert [d.why for d in assign(down, addresses(down))] == [
        "no RDMA NIC works: mlx5_0: port 1 is DOWN"
    ] * 2


def test_a_port_that_is_down_is_left_out(tmp_path):
    tree = connectx_8(tmp_path)
    port = next(tree.root.glob("devices/**/mlx5_1/ports/1/state"))
    port.write_text("1: DOWN\n")
    topology = read_topology(tree.root)
    # Seven NICs for eight accelerators: the two at that switch share the one that works.
    assert shares(topology)[:3] == [("mlx5_0",), ("mlx5_0",), ("mlx5_2",)]
    assert assign(topology, addresses(topology))[0].why == "1 by PCIe switch, shared"


def test_an_accelerator_without_a_nic_on_its_numa_node(tmp_path):
    tree = SysfsTree(tmp_path)
    tree.numa(0, range(4), "10 21")
    tree.numa(1, range(4, 8), "21 10")
    tree.gpu(["pci0000:00", "0000:00:01.0", "0000:01:00.0"], 0)
    tree.gpu(["pci0000:80", "0000:80:01.0", "0000:81:00.0"], 1)
    for n in range(3):
        tree.rdma(f"mlx5_{n}", ["pci0000:20", f"0000:20:0{n}.0", f"0000:2{n + 1}:00.0"], 0)
    topology = read_topology(tmp_path)
    near, far = assign(topology, addresses(topology))
    assert (near.nics, near.why) == (("mlx5_0", "mlx5_1"), "2 by NUMA node")
    assert (far.nics, far.why) == (("mlx5_2",), "1 by another NUMA node")
    assert far.cpus == (4, 5, 6, 7)


def test_the_nearest_of_the_other_numa_nodes(tmp_path):
    """Two sockets of two nodes each: the other node of the socket is nearer (12) than 32."""
    tree = SysfsTree(tmp_path)
    for id, row in enumerate(("10 12 32 32", "12 10 32 32", "32 32 10 12", "32 32 12 10")):
        tree.numa(id, [id], row)
    tree.gpu(["pci0000:00", "0000:00:01.0"], 0)
    tree.gpu(["pci0000:c0", "0000:c0:01.0"], 3)
    tree.rdma("mlx5_0", ["pci0000:80", "0000:80:01.0"], 2)
    tree.rdma("mlx5_1", ["pci0000:40", "0000:40:01.0"], 1)
    assert shares(read_topology(tmp_path)) == [("mlx5_1",), ("mlx5_0",)]


def test_three_accelerators_and_two_nics(tmp_path):
    tree = SysfsTree(tmp_path)
    tree.numa(0, range(4), "10 21")
    tree.numa(1, range(4, 8), "21 10")
    for bus, numa in ((0x01, 0), (0x02, 0), (0x81, 1)):
        tree.gpu([f"pci0000:{bus & 0x80:02x}", f"0000:{bus:02x}:00.0"], numa)
    tree.rdma("mlx5_0", ["pci0000:00", "0000:05:00.0"], 0)
    tree.rdma("mlx5_1", ["pci0000:80", "0000:85:00.0"], 1)
    assert shares(read_topology(tmp_path)) == [("mlx5_0",), ("mlx5_0",), ("mlx5_1",)]


def test_numa_nodes_that_the_firmware_does_not_name(tmp_path):
    tree = SysfsTree(tmp_path)
    tree.numa(0, range(4), "10 21")
    tree.numa(1, range(4, 8), "21 10")
    tree.gpu(["pci0000:00", "0000:00:01.0"], -1)
    tree.gpu(["pci0000:01", "0000:01:01.0"], -1)
    for n in range(4):
        tree.rdma(f"mlx5_{n}", [f"pci0000:1{n}", f"0000:1{n}:01.0"], -1)
    topology = read_topology(tmp_path)
    first, second = assign(topology, addresses(topology))
    assert (first.nics, second.nics) == (("mlx5_0", "mlx5_2"), ("mlx5_1", "mlx5_3"))
    assert (first.near, first.cpus) == (("unknown", "unknown"), ())


def test_cpus_that_the_container_does_not_allow(tmp_path):
    topology = read_topology(connectx_8(tmp_path).root)
    dealt = assign(topology, addresses(topology), allowed=range(30, 32))
    assert [d.cpus for d in dealt] == [(30, 31)] * 4 + [()] * 4
    assert dealt[7].why == "1 by PCIe switch, none of its CPUs is allowed"


def test_devices_of_unknown_place_share_evenly(tmp_path):
    topology = read_topology(connectx_8(tmp_path).root)
    assert [len(s) for s in shares(topology, 4)] == [2] * 4
    assert len({nic for share in shares(topology, 4) for nic in share}) == 8
    all_nics = tuple(f"mlx5_{i}" for i in range(8))
    assert shares(topology, 3) == [all_nics] * 3
    assert shares(topology, 16) == [all_nics] * 16
    assert shares(topology, 1) == [all_nics]
    # NICs that sysfs does not show, such as addresses.
    addresses = ("127.0.0.1", "127.0.0.2")
    assert shares(Topology(), 2, addresses) == [("127.0.0.1",), ("127.0.0.2",)]
    assert shares(Topology(), 3, addresses) == [addresses] * 3


def test_named_nics(tmp_path):
    topology = read_topology(p5_like(tmp_path).root)
    first, last = addresses(topology)[0], addresses(topology)[7]
    # Those that are named are all used, wherever they are; libfabric's names will do.
    assert shares(topology, [last, first], ("rdmap79s0-rdm", "rdmap80s0", "rdmap198s0")) == [
        ("rdmap198s0",),
        ("rdmap79s0", "rdmap80s0"),
    ]


@pytest.mark.parametrize(
    ("devices", "nics", "message"),
    [
        (0, (), "devices: 0 is not a number from 1 to 4096"),
        (4097, (), "devices: 4097 is not a number from 1 to 4096"),
        ([], (), "devices: none are named"),
        (["gpu0"], (), "devices: 'gpu0' is no PCI address"),
        (["0000:11:00.0"], (), "devices: 0000:11:00.0 is no accelerator of this machine; it has 0"),
        (["1e.0", "00:1e.0"], (), "devices: '1e.0' is no PCI address"),
        (["00:1e.0", "0000:00:1E.0"], (), "devices: 0000:00:1E.0 is named twice"),
        (1, ("ens5", "ens5"), "nics: 'ens5' is named twice"),
    ],
)
def test_what_is_not_there_is_named(tmp_path, devices, nics, message):
    with pytest.raises(ValueError, match=message):
        assign(read_topology(no_nic(tmp_path).root), devices, nics)


# ---- any tree --------------------------------------------------------------------------------

Place = tuple[int, int, int]  # NUMA node, host bridge of it, switch of that (0: none)
PLACES = st.tuples(st.integers(-1, 2), st.integers(0, 1), st.integers(0, 2))


def pci(place: Place, index: int) -> PciDevice:
    node, bridge, switch = place
    number = 16 * (node + 1) + 8 * bridge
    path = [f"pci0000:{number:02x}"]
    if switch:
        path += [f"0000:{number:02x}:1f.{switch}", f"0000:{number + 1:02x}:1f.{switch}"]
    address = f"0000:{number + switch:02x}:{index % 32:02x}.{index // 32}"
    return PciDevice(address, (*path, address), node, ())


def machine(gpus: list[Place], nics: list[Place]) -> Topology:
    return Topology(
        numa=tuple(NumaNode(i, (i,)) for i in range(3)),
        gpus=tuple(Gpu(pci(p, i), 0x10DE, 0) for i, p in enumerate(gpus)),
        nics=tuple(Nic(f"mlx5_{i}", "verbs", pci(p, 32 + i)) for i, p in enumerate(nics)),
    )


MACHINES = st.builds(
    machine, st.lists(PLACES, min_size=1, max_size=5), st.lists(PLACES, min_size=1, max_size=7)
)


def nearest(topology: Topology, nic: Nic) -> set[int]:
    row = [closeness(topology, nic.pci, gpu.pci) for gpu in topology.gpus]
    return {d for d, value in enumerate(row) if value == max(row)}


@given(MACHINES)
def test_no_nic_is_idle_and_no_device_without(topology: Topology):
    dealt = shares(topology)
    assert {nic for share in dealt for nic in share} == {nic.name for nic in topology.nics}
    uses = Counter(nic for share in dealt for nic in share)
    if len(topology.nics) >= len(topology.gpus):
        assert set(uses.values()) == {1}
        assert min(map(len, dealt)) >= 1
    else:
        assert {len(share) for share in dealt} == {1}


@given(MACHINES)
def test_a_nic_serves_a_device_that_is_nearest_to_it(topology: Topology):
    if len(topology.nics) < len(topology.gpus):
        return
    dealt = shares(topology)
    nics = {nic.name: nic for nic in topology.nics}
    for d, share in enumerate(dealt):
        for name in share:  # or else the device would have none at all
            assert d in nearest(topology, nics[name]) or len(share) == 1
        values = [closeness(topology, nics[n].pci, topology.gpus[d].pci) for n in share]
        assert values == sorted(values, reverse=True)


@given(MACHINES)
def test_devices_of_one_place_differ_by_at_most_one_nic(topology: Topology):
    counts: dict[tuple[object, ...], list[int]] = {}
    for gpu, share in zip(topology.gpus, shares(topology), strict=True):
        counts.setdefault((gpu.pci.numa_node, gpu.pci.path[:-1]), []).append(len(share))
    for same in counts.values():
        assert max(same) - min(same) <= 1


@given(MACHINES)
def test_no_other_choice_of_nearest_devices_is_more_even(topology: Topology):
    """Against every way in which each NIC goes to a nearest device and none is left without."""
    options = [sorted(nearest(topology, nic)) for nic in topology.nics]
    devices = range(len(topology.gpus))
    best = min(
        (
            sorted(Counter(choice).values(), reverse=True)
            for choice in itertools.product(*options)
            if set(choice) == set(devices)
        ),
        default=None,
    )
    if best is not None:
        assert sorted(map(len, shares(topology)), reverse=True) == best


@given(MACHINES, st.data())
def test_parts_of_a_machine_take_apart_what_the_whole_takes(topology: Topology, data):
    if len(topology.nics) < len(topology.gpus):
        return
    every = addresses(topology)
    mine = data.draw(st.lists(st.sampled_from(every), min_size=1, unique=True))
    others = [gpu for gpu in every if gpu not in mine]
    taken = {nic for share in shares(topology, mine) for nic in share}
    if others:
        assert not taken & {nic for share in shares(topology, others) for nic in share}
    whole = dict(zip(every, shares(topology), strict=True))
    assert taken == {nic for gpu in mine for nic in whole[gpu]}


def test_the_kind_of_nic(tmp_path: Path):
    tree = p5_like(tmp_path)
    tree.rdma("mlx5_0", ["pci0000:30", "0000:30:01.0"], 0)
    topology = read_topology(tree.root)
    assert all(nic.startswith("rdmap") for share in shares(topology) for nic in share)
    verbs = assign(topology, addresses(topology), kind="verbs")
    assert {d.nics for d in verbs} == {("mlx5_0",)}
    none = replace(topology, nics=tuple(nic for nic in topology.nics if nic.kind != "efa"))
    assert assign(none, 1, kind="efa")[0].why == "the machine has no RDMA NIC of kind efa"
