"""Which provider, domains and CPUs an engine gets, and how bad NICs are refused."""

import pytest
from sysfs_tree import SysfsTree, connectx_8, no_nic, p5_like

from ffi_transport.topology import (
    Nic,
    PciDevice,
    Topology,
    choices,
    groups,
    read_topology,
)
from ffi_transport.types import PROVIDERS, EngineConfig

LOW = (*range(48), *range(96, 144))
HIGH = (*range(48, 96), *range(144, 192))


@pytest.fixture
def p5(tmp_path) -> Topology:
    return read_topology(p5_like(tmp_path / "p5").root)


@pytest.fixture
def connectx(tmp_path) -> Topology:
    return read_topology(connectx_8(tmp_path / "connectx").root)


def gpus(topology: Topology) -> list[str]:
    return [gpu.address for gpu in topology.gpus]


def test_efa_by_topology(p5):
    for provider, count in (("auto", 2), ("efa", 1)):
        ways = choices(p5, provider, gpus(p5))
        assert len(ways) == count  # "auto" has a way out when libfabric has no efa
        assert ways[0].provider == "efa"
        assert len(ways[0].domains) == 32
        assert ways[0].domains[:2] == ("rdmap79s0-rdm", "rdmap80s0-rdm")
        assert ways[0].domain_cpus == (LOW,) * 16 + (HIGH,) * 16
        assert [len(device.nics) for device in ways[0].devices] == [4] * 8
    assert (choices(p5, "auto", 1)[1].provider, choices(p5, "auto", 1)[1].domains) == ("auto", ())


def test_part_of_a_machine(p5):
    (way,) = choices(p5, "efa", gpus(p5)[4:6])
    assert way.domains[0] == "rdmap147s0-rdm"
    assert len(way.domains) == 8
    assert (
        way.why
        == "8 efa NICs by topology; 24 are nearer to accelerators that the node does not use"
    )


def test_allowed_cpus(p5):
    (way,) = choices(p5, "efa", gpus(p5), allowed=[0, 1, 96])
    # All allowed CPUs are near the first sixteen, none is near the others: no thread is pinned.
    assert way.domain_cpus == ()
    (way,) = choices(p5, "efa", gpus(p5), allowed=[0, 50])
    assert way.domain_cpus == ((0,),) * 16 + ((50,),) * 16
    (way,) = choices(p5, "efa", gpus(p5), allowed=[0, 50, 51, 200])
    assert way.domain_cpus[16] == (50, 51)


def test_cpus_of_higher_numbers_than_a_thread_can_be_pinned_to():
    near = tuple(range(1000, 1100))
    nic = Nic("mlx5_0", "verbs", PciDevice("0000:1a:00.0", ("pci0000:1a", "0000:1a:00.0"), 0, near))
    (way,) = choices(Topology(cpus=tuple(range(2000)), nics=(nic,)), "verbs", 1)
    assert way.domain_cpus == (tuple(range(1000, 1024)),)
    EngineConfig(provider="verbs", domains=way.domains, domain_cpus=way.domain_cpus)


def test_verbs_by_topology(connectx):
    way = choices(connectx, "auto", gpus(connectx))[0]
    assert (way.provider, way.domains) == ("verbs", tuple(f"mlx5_{i}" for i in range(8)))
    assert way.domain_cpus == (tuple(range(32)),) * 4 + (tuple(range(32, 64)),) * 4


@pytest.mark.parametrize("said", ["auto", "tcp", "net", "tcp;ofi_rxm"])
def test_the_first_interface_where_there_is_no_rdma(tmp_path, said):
    (way,) = choices(read_topology(no_nic(tmp_path).root), said, 2)
    assert (way.provider, way.domains, way.domain_cpus, way.devices) == (said, (), (), ())


def test_ip_providers_do_not_look_at_rdma(p5):
    (way,) = choices(p5, "tcp", gpus(p5))
    assert (way.provider, way.domains) == ("tcp", ())


def test_an_rdma_provider_that_sysfs_does_not_show(tmp_path):
    (way,) = choices(read_topology(no_nic(tmp_path).root), "efa", 1)
    assert (way.provider, way.domains) == ("efa", ())
    assert way.why == "the provider's first: the machine has no RDMA NIC"


def test_named_nics_choose_the_provider(p5, connectx):
    (way,) = choices(p5, "auto", gpus(p5)[:1], ("rdmap201s0", "rdmap79s0-rdm"))
    assert (way.provider, way.domains) == ("efa", ("rdmap201s0-rdm", "rdmap79s0-rdm"))
    assert way.domain_cpus == (HIGH, LOW)
    assert [way.provider for way in choices(connectx, "auto", 1, ("mlx5_3",))] == ["verbs"]
    # "auto" would take the verbs NICs.
    ways = choices(connectx, "auto", 1, ("eth0", "192.0.2.7"))
    assert [way.provider for way in ways] == ["tcp", "net", "tcp;ofi_rxm"]
    assert {way.domains for way in ways} == {("eth0", "192.0.2.7")}
    assert ways[0].domain_cpus == (tuple(range(32, 64)), ())
    (way,) = choices(Topology(), "auto", 1, ("eth0",))
    assert (way.provider, way.why) == ("auto", "as named")


def test_a_named_nic_that_does_not_work_is_taken_all_the_same(tmp_path):
    tree = no_nic(tmp_path)
    tree.rdma("mlx5_0", ["pci0000:00", "0000:00:07.0"], -1, state="1: DOWN")
    (way,) = choices(read_topology(tree.root), "auto", 1, ("mlx5_0",))
    assert (way.domains, way.why) == (("mlx5_0",), "as named; mlx5_0: port 1 is DOWN")


@pytest.mark.parametrize(
    ("said", "nics", "message"),
    [
        ("efa", ("eth0",), "nics: eth0 is no NIC of provider efa; it drives none"),
        ("verbs", ("eth0",), "nics: eth0 is no NIC of provider verbs; it drives mlx5_0, mlx5_1"),
        ("tcp", ("mlx5_0",), "nics: mlx5_0 is no NIC of provider tcp; it drives eth1, eth2"),
        ("verbs", ("mlx5_0", "mlx5_9"), "nics: 'mlx5_9' is none of the machine's: mlx5_0"),
        ("auto", ("mlx5_0", "eth1"), r"these are of several: mlx5_0 \(verbs\), eth1 \(ip\)"),
        ("auto", ("mlx5_0", "mlx5_0"), "nics: 'mlx5_0' is named twice"),
    ],
)
def test_bad_nics_are_named(connectx, said, nics, message):
    with pytest.raises(ValueError, match=message):
        choices(connectx, said, 1, nics)


def test_too_many_nics():
    with pytest.raises(ValueError, match="nics: 65 are more than the 64 of one engine"):
        choices(Topology(), "tcp", 1, tuple(f"10.0.0.{i}" for i in range(65)))


def test_what_is_chosen_is_a_configuration(p5, connectx):
    assert {"auto", "efa", "verbs", "tcp", "net", "tcp;ofi_rxm"} <= set(PROVIDERS)
    for topology in (p5, connectx):
        for way in choices(topology, "auto", gpus(topology)):
            assert EngineConfig(provider=way.provider, domains=way.domains).domains == way.domains


def test_groups_of_domains(p5, tmp_path):
    (way,) = choices(p5, "efa", gpus(p5)[:2])
    assert groups(p5, gpus(p5)[:2], way.domains) == ((0, 1, 2, 3), (4, 5, 6, 7))
    # The order is that of the engine's domains, not that of the machine's.
    assert groups(p5, gpus(p5)[:2], way.domains[::-1]) == ((4, 5, 6, 7), (0, 1, 2, 3))
    assert groups(p5, gpus(p5)[:1], way.domains) == (None,)
    assert groups(Topology(), 2, ("127.0.0.1", "127.0.0.2")) == ((0,), (1,))
    assert groups(Topology(), 2, ("127.0.0.1",)) == (None, None)
    assert groups(Topology(), 2, ()) == (None, None)
    assert groups(Topology(), 3, ("127.0.0.1", "127.0.0.2")) == (None, None, None)
    tree = SysfsTree(tmp_path / "shared")
    for slot in range(3):
        tree.gpu(["pci0000:00", f"0000:00:0{slot}.0"], -1)
    for slot in range(2):
        tree.rdma(f"mlx5_{slot}", ["pci0000:00", f"0000:00:1{slot}.0"], -1)
    shared = read_topology(tree.root)
    assert groups(shared, gpus(shared), ("mlx5_0", "mlx5_1")) == ((0,), (1,), (0,))
