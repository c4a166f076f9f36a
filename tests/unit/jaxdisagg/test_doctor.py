"""The doctor on machines that lack, have or fake things: by stand-ins for drivers and for /sys."""

import errno
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from repository import REPOSITORY
from sysfs_tree import no_nic, p5_like
from typer.testing import CliRunner

from jaxdisagg.cli import app
from jaxdisagg.doctor import cuda, host, jax_devices, network, software
from jaxdisagg.doctor.finding import Finding
from jaxdisagg.doctor.probe import ask

GIB = 1 << 30

# Two devices whose attributes an environment variable sets: "116=1,118=0". CUDA_FAKE says what
# else happens: hang, crash.
DRIVER = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int cuInit(unsigned flags) {
  const char* how = getenv("CUDA_FAKE");
  if (how && !strcmp(how, "hang")) { if (fork() == 0) for (;;) pause(); for (;;) pause(); }
  if (how && !strcmp(how, "crash")) abort();
  if (how && !strcmp(how, "none")) return 100;
  return flags != 0;
}
int cuGetErrorName(int status, const char** text) {
  *text = status == 100 ? "CUDA_ERROR_NO_DEVICE" : NULL; return *text ? 0 : 1;
}
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuDeviceGetCount(int* count) { *count = 2; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char* text, int n, int device) {
  snprintf(text, n, "Chip %d", device); return 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int device) { *bytes = (size_t)141 << 30; return 0; }
int cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
  for (int i = 0; i < 16; i++) uuid[i] = 16 * device + i;
  return 0;
}
int cuDeviceGetPCIBusId(char* text, int n, int device) {
  snprintf(text, n, "0000:%02X:00.0", 0x53 + device); return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  char wish[16]; const char* all = getenv("CUDA_ATTRIBUTES");
  snprintf(wish, sizeof wish, ",%d=", attribute);
  const char* found = all ? strstr(all, wish) : NULL;
  if (!found) return 1;
  *value = atoi(found + strlen(wish));
  return 0;
}
"""


@pytest.fixture(scope="session")
def driver(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    library = folder / "libfake.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "driver.c"], check=True)
    return str(library)


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    found = {finding.what: finding for finding in findings}
    assert len(found) == len(findings)
    return found


def run(*arguments: str, **variables: str) -> tuple[int, dict[str, Any]]:
    """Exit status and document of `jaxdisagg doctor --json`."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxdisagg.cli", "doctor", "--json", *arguments],
        env=os.environ | variables, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


# ---- the whole command -----------------------------------------------------------------------


def test_a_machine_that_runs_these_tests_is_fit():
    status, document = run()
    assert (status, document["fit"]) == (0, True)
    found = {f["what"]: f for f in document["findings"]}
    assert found["engine"]["found"].startswith("opens with provider ")
    assert found["devices"]["found"].endswith(" x cpu")
    assert found["native part"]["found"] == "loads"
    assert document["probes"]["host"]["cpus"] == len(os.sched_getaffinity(0))


def test_without_libfabric_no_deployment_runs(tmp_path):
    status, document = run(JAXDISAGG_LIBFABRIC=str(tmp_path / "libfabric.so.1"))
    assert (status, document["fit"]) == (1, False)
    missing = {f["what"]: f["why"] for f in document["findings"] if f["state"] == "missing"}
    assert set(missing) == {"libfabric", "engine"}
    assert "apt-get install libfabric1" in missing["libfabric"]
    assert "libfabric cannot be loaded" in missing["engine"]


def test_tables_say_the_same(monkeypatch):
    from jaxdisagg.doctor import command

    findings = [
        Finding("network", "libfabric", "1.17"),
        Finding("network", "engine", "-", "missing", "no [bold] port"),
        Finding("CUDA", "driver", "-", "absent", "no driver"),
    ]
    monkeypatch.setattr(command, "examine", lambda timeout: (findings, {"engine": {}}))
    shown = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "120"})
    assert shown.exit_code == 1
    for words in ("libfabric", "no [bold] port", "no driver", "missing for any deployment: engine"):
        assert words in shown.output


# ---- probes that fail ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "why"),
    [("hang", "no answer within 2 s"), ("crash", "it ended with status -6")],
)
def test_a_driver_that_hangs_or_crashes_is_told(driver, monkeypatch, how, why):
    monkeypatch.setenv("JAXDISAGG_LIBCUDA", driver)
    monkeypatch.setenv("CUDA_FAKE", how)
    began = time.monotonic()
    values = ask("cuda", 2.0 if how == "hang" else 60.0)
    assert time.monotonic() - began < 60
    found = by_name(cuda.findings(values))
    assert (found["driver"].state, found["driver"].why) == ("absent", why)


def test_a_probe_that_raises_is_told():
    values = ask("nothing of that name", 60.0)
    assert "KeyError" in values["problem"]
    for judge in (software.findings, jax_devices.findings, network.engine_findings):
        assert [f.state for f in judge(values)] == ["missing"]
    assert [f.state for f in host.findings(values)] == ["absent"]


# ---- CUDA ------------------------------------------------------------------------------------


def cuda_findings(driver: str, monkeypatch, sysfs: Path, attributes: str) -> dict[str, Finding]:
    monkeypatch.setenv("JAXDISAGG_LIBCUDA", driver)
    monkeypatch.setenv("JAXDISAGG_DOCTOR_SYSFS", str(sysfs))
    monkeypatch.setenv("CUDA_ATTRIBUTES", "," + attributes)
    return by_name(cuda.findings(ask("cuda", 60.0)))


def test_what_devices_can_do(driver, monkeypatch, tmp_path):
    p5_like(tmp_path)
    found = cuda_findings(
        driver, monkeypatch, tmp_path, "75=9,76=0,102=1,110=1,116=1,117=1,118=0,124=1,20=0"
    )
    assert found["driver"].found == "for CUDA 13.0"
    assert found["device 1"].found == (
        "Chip 1, 0000:54:00.0, 141.0 GiB, sm_90, GPU-10111213-1415-1617-1819-1a1b1c1d1e1f"
    )
    assert found["device 0 RDMA"] == Finding("CUDA", "device 0 RDMA", "dmabuf, cuMem")
    assert found["device 0 writes ordered"].found == "none: flushed before a request is ready"
    assert "device 0 sharing" not in found
    assert found["cuda-python"].state == "absent"  # the base install has none


@pytest.mark.parametrize(
    ("attributes", "what", "state", "text"),
    [
        ("118=100", "writes ordered", "ok", "own device: no flush needed"),
        ("118=200", "writes ordered", "ok", "all devices: no flush needed"),
        ("118=0,117=2", "writes ordered", "absent", "the host cannot flush them"),
        ("116=1", "writes ordered", "absent", "the driver does not say"),
        ("116=1,118=0", "RDMA", "absent", "neither dmabuf nor a module of nvidia_peermem"),
        ("116=0,118=0", "RDMA", "absent", "has no GPUDirect RDMA"),
        ("20=3", "sharing", "absent", "nodes cannot share this GPU"),
    ],
)
def test_what_devices_lack(driver, monkeypatch, tmp_path, attributes, what, state, text):
    finding = cuda_findings(driver, monkeypatch, tmp_path, attributes)[f"device 0 {what}"]
    assert finding.state == state
    assert text in finding.found + finding.why


def test_a_kernel_module_takes_the_place_of_dmabuf(driver, monkeypatch, tmp_path):
    (tmp_path / "module" / "nvidia_peermem").mkdir(parents=True)
    found = cuda_findings(driver, monkeypatch, tmp_path, "116=1,118=100")
    assert found["device 0 RDMA"] == Finding("CUDA", "device 0 RDMA", "nvidia_peermem")


def test_devices_without_a_driver(monkeypatch, tmp_path):
    no_nic(tmp_path)
    found = cuda_findings("libnone.so", monkeypatch, tmp_path, "")
    assert found["driver"].state == "absent"
    assert "libnone.so" in found["driver"].why
    assert "2 NVIDIA devices are on the PCI bus: install their driver" in found["driver"].why


def test_a_driver_without_devices(driver, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_FAKE", "none")
    found = cuda_findings(driver, monkeypatch, tmp_path, "")
    assert found["driver"].why == "cuInit: CUDA_ERROR_NO_DEVICE (100)"
    values = {"version": "13.0", "devices": [], "visible": "7", "pci": [], "cuda_python": ""}
    assert "CUDA_VISIBLE_DEVICES=7" in by_name(cuda.findings(values))["devices"].why


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


# ---- network, software, host -----------------------------------------------------------------


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
