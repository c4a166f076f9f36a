"""What the doctor says of jax, network, software and host, by stand-ins for what is there."""

import errno
import re
import tomllib
from typing import Any

import pytest
from doctor_findings import by_name
from repository import REPOSITORY
from sysfs_tree import p5_like

from jaxdisagg.doctor import host, jax_devices, network, software
from jaxdisagg.doctor.finding import Finding
from jaxdisagg.doctor.probe import ask

GIB = 1 << 30

# ---- jax -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "environment", "why"),
    [
        ({"plugins": []}, "", "jax is for CPUs alone"),
        ({"plugins": ["xla_cuda13"], "platforms": "cpu"}, "cpu", "JAX_PLATFORMS=cpu chooses"),
        ({"plugins": ["xla_cuda13"], "said": "no libcuda"}, "", "no libcuda"),
    ],
)
def test_why_jax_has_no_gpu(values, environment, why, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", environment)
    base = {"platforms": "", "platform": "cpu", "devices": {"cpu": 1}}
    found = by_name(jax_devices.findings(base | values))
    assert found["devices"] == Finding("jax", "devices", "1 x cpu")
    assert found["CUDA back end"].state == "absent"
    assert why in found["CUDA back end"].why


def test_jax_with_gpus_or_none():
    values = {"plugins": ["xla_cuda13"], "platform": "gpu", "devices": {"NVIDIA H200": 8}}
    found = by_name(jax_devices.findings(values))
    assert found["devices"].found == "8 x NVIDIA H200"
    assert found["CUDA back end"] == Finding("jax", "CUDA back end", "xla_cuda13")
    [failed] = jax_devices.findings({"plugins": [], "error": "Unable to initialize backend"})
    assert (failed.state, failed.why) == ("missing", "Unable to initialize backend")


def test_an_empty_name_of_libfabric_is_none(monkeypatch):
    monkeypatch.setenv("JAXDISAGG_LIBFABRIC", "")
    assert "providers" in ask("libfabric", 60.0)


def test_a_platform_without_a_back_end_is_told(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    why = by_name(jax_devices.findings(ask("jax", 60.0)))["devices"].why
    assert why.startswith("JAX_PLATFORMS=cuda: this jax is for CPUs alone; install")


# ---- network, software ------------------------------------------------------------------------


def test_nics_of_another_machine(monkeypatch, tmp_path):
    p5_like(tmp_path).rdma("mlx5_9", ["pci0000:f0", "0000:f0:03.0"], 0, state="1: DOWN")
    monkeypatch.setenv("JAXDISAGG_DOCTOR_SYSFS", str(tmp_path))
    found = by_name(network.nic_findings(ask("nics", 60.0)))
    assert found["NIC rdmap79s0"].found == "efa, 100 Gbit/s"
    assert (found["NIC mlx5_9"].state, found["NIC ens32"].state) == ("absent", "ok")
    assert "RDMA NIC" not in found
    assert network.nic_findings({"nics": []})[0].why == "no RDMA NIC: transfers go over IP"


def test_providers_are_told():
    values = {"version": "2.5", "providers": {
        "efa": {"domains": ["rdmap79s0-rdm"], "device_memory": True},
        "tcp": {"domains": ["eth0", "lo"], "device_memory": False},
    }}  # fmt: skip
    found = by_name(network.libfabric_findings(values))
    assert found["provider efa"].found == "rdmap79s0-rdm; takes device memory"
    assert found["provider tcp"].found == "eth0, lo"
    assert found["provider verbs"].state == "absent"
    assert "device memory" not in found
    del values["providers"]["efa"]
    assert (
        "staged through the host"
        in by_name(network.libfabric_findings(values))["device memory"].why
    )


def test_providers_of_this_machine_are_those_that_the_engine_may_open():
    values = network.probe_libfabric()
    assert re.fullmatch(r"\d+\.\d+", values["version"])
    assert {"tcp", "net", "tcp;ofi_rxm"} & set(values["providers"])
    assert all("lo" in entry["domains"] for entry in values["providers"].values())


def test_needed_packages_are_the_projects_own():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[><=~]", line)[0] for line in project["dependencies"]}
    assert names | {"jaxlib"} == set(software.NEEDED)


def test_missing_software_is_named():
    values = {
        "python": "3.11.9", "python_fits": False, "packages": {"jax": "0.12.0", "flax": ""},
        "native": "No module named 'ffi_transport._native'",
    }  # fmt: skip
    found = by_name(software.findings(values))
    assert {finding.state for finding in found.values()} == {"missing"}
    assert found["packages"].why == "install flax"
    assert "make setup builds it" in found["native part"].why


def test_the_extras_keep_to_one_cuda_version():
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for version in (12, 13):
        jax, python = extras[f"cuda{version}"]
        assert jax.startswith(f"jax[cuda{version}]>=")
        assert re.fullmatch(rf"cuda-python>={version}\.\d+,<{version + 1}", python)


# ---- the host ---------------------------------------------------------------------------------


HOST: dict[str, Any] = {
    "cpus": 4, "memlock": -1, "unlimited": -1, "files": 1024, "shm": GIB, "cma": 0,
    "namespaces": 0, "ptrace_scope": "",
    "memory": {"MemTotal": 8 * GIB, "MemAvailable": 6 * GIB, "HugePages_Total": 2,
               "Hugepagesize": 2 << 20},
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "what", "state", "text"),
    [
        ({}, "memory", "ok", "6.0 GiB of 8.0 GiB available"),
        ({}, "locked memory", "ok", "unlimited"),
        ({"memlock": 8 << 20}, "locked memory", "absent", "8 MiBRDMA NICs must lock"),
        ({"memlock": 64 << 20}, "locked memory", "ok", "64 MiB"),
        ({}, "huge pages", "ok", "2 of 2 MiB"),
        ({"memory": {}}, "huge pages", "absent", "none are reserved"),
        ({"shm": None}, "/dev/shm", "absent", "NCCL between processes needs it"),
        ({}, "another process's memory", "ok", "may be written"),
        ({"cma": errno.EPERM, "ptrace_scope": "1"}, "another process's memory", "absent",
         "-process_vm_writev: Operation not permitted (kernel.yama.ptrace_scope=1)"),
        ({"namespaces": errno.EPERM}, "network namespaces", "absent", "Operation not permitted"),
    ],
)  # fmt: skip
def test_the_hosts_limits(values, what, state, text):
    found = by_name(host.findings(HOST | values))[what]
    assert found.state == state
    assert (found.found + found.why).startswith(text) or text in found.why


def test_the_host_is_read(tmp_path):
    (tmp_path / "meminfo").write_text(
        "MemTotal:  1024 kB\nMemFree: 5 kB\nHugePages_Total:  3\nHugepagesize: 2048 kB\nodd\n"
    )
    (tmp_path / "sys/kernel/yama").mkdir(parents=True)
    (tmp_path / "sys/kernel/yama/ptrace_scope").write_text("2\n")
    values = host.probe(tmp_path, tmp_path / "none")
    assert values["memory"] == {"MemTotal": 1 << 20, "HugePages_Total": 3, "Hugepagesize": 2 << 20}
    assert (values["ptrace_scope"], values["shm"]) == ("2", None)
    assert values["cma"] in (0, errno.EPERM, errno.ENOSYS)
    assert values["namespaces"] in (0, errno.EPERM, errno.ENOSPC, errno.EINVAL)
