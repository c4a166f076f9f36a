"""Which NICs a node opens and which of them each device uses; and how bad NICs are refused."""

import logging
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from proc import allowed_cpus
from sysfs_tree import SysfsTree, connectx_8, no_nic, p5_like

from ffi_transport.errors import FabricUnavailable
from ffi_transport.types import EngineConfig
from jaxdisagg import fabric
from jaxdisagg.config import MeshConfig, NodeConfig
from jaxdisagg.config_text import parse_node, serve_from_toml
from jaxdisagg.fabric import device_domains, open_fabric

BASE = NodeConfig(role="decode", model=Path("m"))
GPUS = ["0000:53:00.0", "0000:64:00.0", "0000:75:00.0", "0000:86:00.0",
        "0000:97:00.0", "0000:a8:00.0", "0000:b9:00.0", "0000:ca:00.0"]  # fmt: skip


# ---- the words -------------------------------------------------------------------------------


def test_nics_from_the_command_line_and_toml(tmp_path):
    assert parse_node("tp=2,nics=eth0+10.0.0.7", BASE).nics == ("eth0", "10.0.0.7")
    assert parse_node("tp=2", BASE).nics == ()
    file = tmp_path / "nodes.toml"
    file.write_text(
        '[[node]]\nrole = "prefill"\nnics = ["mlx5_0", "mlx5_1"]\n[[node]]\nrole = "decode"\n'
    )
    prefill, decode = serve_from_toml(file, BASE).nodes
    assert (prefill.nics, decode.nics) == (("mlx5_0", "mlx5_1"), ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nics=", "nics: '' is no name of a network device"),
        ("nics=eth0+", "nics: '' is no name"),
        ("nics=eth0+eth0", "nics: 'eth0' is named twice"),
        ("nics=eth 0", "nics: 'eth 0' is no name"),
        ("nics=" + "+".join(f"e{i}" for i in range(65)), "nics: 65 are more than 64"),
        ("nics", "'nics': expected tp="),
    ],
)
def test_bad_words_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        parse_node(text, BASE)


def test_a_mixed_node_has_no_use_for_nics():
    with pytest.raises(ValueError, match="nics=eth0: a mixed node transfers nothing"):
        replace(BASE, role="mixed", nics=("eth0",))


# ---- what is opened --------------------------------------------------------------------------


class Recorded:
    """In place of an engine: what it was opened with. Providers that are not there are refused."""

    opened: list[EngineConfig]

    def __init__(self, config: EngineConfig, hello: bytes | None) -> None:
        assert hello is None
        self.opened.append(config)
        if config.provider in self.missing:
            raise FabricUnavailable(f"offers no provider '{config.provider}'", missing="efa")
        self.config, self.provider = config, config.provider

    missing: tuple[str, ...] = ()


@pytest.fixture
def opened(monkeypatch) -> list[EngineConfig]:
    Recorded.opened, Recorded.missing = [], ()
    monkeypatch.setattr(fabric, "TransferEngine", Recorded)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(192)))
    monkeypatch.setattr(fabric, "cuda_addresses", lambda: list(GPUS))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    return Recorded.opened


def test_the_nics_of_the_accelerators_that_cuda_lists_first(tmp_path, opened):
    root = p5_like(tmp_path).root
    node = replace(BASE, mesh=MeshConfig(tp=2), provider="efa", fabric_port=77)
    engine = open_fabric(node, root)
    (config,) = opened
    assert (config.provider, config.bind, config.control_port) == ("efa", "127.0.0.1", 77)
    assert config.domains == tuple(f"rdmap{n}s0-rdm" for n in (79, 80, 81, 82, 96, 97, 98, 99))
    assert config.domain_cpus == ((*range(48), *range(96, 144)),) * 8
    devices: Any = [SimpleNamespace(platform="gpu", local_hardware_id=i) for i in (0, 1)]
    assert device_domains(engine, devices, root) == ((0, 1, 2, 3), (4, 5, 6, 7))
    # What jax then says counts: other accelerators, farther from these NICs, or none.
    devices = [SimpleNamespace(platform="gpu", local_hardware_id=i) for i in (1, 0)]
    assert device_domains(engine, devices, root) == ((4, 5, 6, 7), (0, 1, 2, 3))
    devices = [SimpleNamespace(platform="cpu", local_hardware_id=i) for i in range(4)]
    assert device_domains(engine, devices, root) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert device_domains(engine, devices[:1], root) == (None,)


def test_a_process_of_a_node_opens_its_share(tmp_path, opened):
    node = replace(BASE, mesh=MeshConfig(tp=2, processes=2), provider="efa")
    open_fabric(node, p5_like(tmp_path).root)
    assert len(opened[0].domains) == 4


@pytest.mark.parametrize("why", ["no driver", "cpu", "hidden"])
def test_all_nics_where_the_accelerators_are_not_known(tmp_path, opened, monkeypatch, why):
    if why == "no driver":
        monkeypatch.setattr(fabric, "cuda_addresses", list)
    elif why == "cpu":
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    else:
        monkeypatch.setattr(fabric, "cuda_addresses", lambda: ["0000:01:00.0"])
    open_fabric(replace(BASE, provider="efa"), p5_like(tmp_path).root)
    assert len(opened[0].domains) == 32


def test_what_libfabric_lacks_is_passed_over(tmp_path, opened, caplog):
    Recorded.missing = ("verbs",)
    with caplog.at_level(logging.WARNING):
        engine = open_fabric(BASE, connectx_8(tmp_path).root)
    assert [config.provider for config in opened] == ["verbs", "auto"]
    assert (engine.provider, opened[1].domains) == ("auto", ())
    assert "verbs is not used: offers no provider 'verbs'" in caplog.text
    with pytest.raises(FabricUnavailable, match="offers no provider 'verbs'"):
        open_fabric(replace(BASE, provider="verbs"), tmp_path)


def test_named_nics_are_opened_as_they_are_named(tmp_path, opened):
    root = connectx_8(tmp_path).root
    open_fabric(replace(BASE, nics=("mlx5_7", "mlx5_0")), root)
    assert (opened[0].provider, opened[0].domains) == ("verbs", ("mlx5_7", "mlx5_0"))
    assert opened[0].domain_cpus == (tuple(range(32, 64)), tuple(range(32)))
    with pytest.raises(ValueError, match="nics: 'mlx5_9' is none of the machine's"):
        open_fabric(replace(BASE, nics=("mlx5_9",), provider="verbs"), root)


def test_the_driver_is_not_loaded_for_nothing(tmp_path, opened, monkeypatch):
    monkeypatch.setattr(fabric, "cuda_addresses", lambda: pytest.fail("it was asked"))
    open_fabric(replace(BASE, nics=("mlx5_0",)), connectx_8(tmp_path / "a").root)
    open_fabric(BASE, no_nic(tmp_path / "b").root)
    assert [config.domains for config in opened] == [("mlx5_0",), ()]


def test_without_a_sysfs(tmp_path, opened):
    open_fabric(replace(BASE, nics=("eth0",), provider="net"), tmp_path / "nowhere")
    assert opened[0].domains == ("eth0",)


# ---- on this machine -------------------------------------------------------------------------


def test_addresses_of_this_machine():
    node = replace(BASE, nics=("127.0.0.1", "127.0.0.2"), mesh=MeshConfig(tp=2))
    with open_fabric(node) as engine:
        assert [domain["name"] for domain in engine.domain_counters()] == list(node.nics)
        devices: Any = [SimpleNamespace(platform="cpu", local_hardware_id=i) for i in (0, 1)]
        assert device_domains(engine, devices) == ((0,), (1,))
    with open_fabric(BASE) as engine:
        assert len(engine.domain_counters()) == 1
        assert device_domains(engine, devices) == (None, None)


def test_the_thread_of_a_nic_runs_near_it(tmp_path):
    """As if the loopback interface were a NIC of the node that has one of the allowed CPUs."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("one CPU is allowed: nothing to choose")
    tree = SysfsTree(tmp_path)
    tree.numa(0, allowed[:1], "10 21")
    tree.numa(1, [*allowed[1:], 1000], "21 10")
    tree.ethernet("lo", ["pci0000:80", "0000:80:01.0"], 1)
    before = allowed_cpus()
    with open_fabric(replace(BASE, nics=("lo", "127.0.0.2")), tree.root) as engine:
        counters = engine.domain_counters()
        assert [domain["cpus"] for domain in counters] == [allowed[1:], []]
        masks = Counter(cpus for thread, cpus in allowed_cpus().items() if thread not in before)
    assert masks[tuple(allowed[1:])] == 1
    assert masks[tuple(allowed)] >= 1


@pytest.mark.parametrize("nic", ["nic9", "203.0.113.9"])
def test_a_nic_that_is_not_there_is_named(nic):
    with pytest.raises(FabricUnavailable, match=rf"nics=lo\+{nic}: .* no domain '{nic}'; it has"):
        open_fabric(replace(BASE, nics=("lo", nic)))


def test_other_faults_do_not_blame_the_nics(tmp_path):
    with pytest.raises(FabricUnavailable, match=r"^libfabric .* offers no provider 'efa'"):
        open_fabric(replace(BASE, provider="efa"), no_nic(tmp_path).root)
