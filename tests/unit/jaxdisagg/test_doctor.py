"""The doctor as a command, its probes that fail, and what it says of CUDA, by stand-in drivers."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from doctor_findings import by_name
from proc import running
from sysfs_tree import no_nic, p5_like
from typer.testing import CliRunner

from jaxdisagg.cli import app
from jaxdisagg.doctor import cuda, host, jax_devices, network, software
from jaxdisagg.doctor.finding import Finding
from jaxdisagg.doctor.probe import Probes, ask

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


def test_without_libfabric_no_deploymentrunning(tmp_path):
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


@pytest.mark.parametrize("value", ["inf", "nan", "1e30", "0.5"])
def test_a_timeout_that_cannot_be_is_refused(value):
    shown = CliRunner().invoke(app, ["doctor", "--timeout", value], env={"COLUMNS": "120"})
    assert shown.exit_code == 2
    assert "must be in 1..86400 (seconds)" in shown.output


@pytest.mark.parametrize("form", ["--json", None])
def test_a_full_disk_is_one_line(form):
    code = (
        "import sys; from jaxdisagg.doctor import command\n"
        "command.examine = lambda timeout: ([], {})\n"
        "from jaxdisagg.cli import main; main()"
    )
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, "doctor", *filter(None, [form])],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "error: what was found cannot be written: No space left on device\n"


# ---- a doctor that is ended ------------------------------------------------------------------


def processes_below(doctor: int) -> dict[int, str]:
    """Every process of the sessions that its children lead, by number, with its arguments."""
    found: dict[int, tuple[int, int, str]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            words = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if state != "Z":
            found[int(folder.name)] = int(parent), int(session), words
    leaders = {pid for pid, (parent, _, _) in found.items() if parent == doctor}
    return {pid: words for pid, (_, session, words) in found.items() if session in leaders}


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_no_probe_outlives_the_doctor(driver, number, status):
    doctor = subprocess.Popen(
        [sys.executable, "-m", "jaxdisagg.cli", "doctor"],
        env=os.environ | {"JAXDISAGG_LIBCUDA": driver, "CUDA_FAKE": "hang"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        # The probe that hangs, and the process that it has started.
        while sum(w.endswith(" cuda ") for w in processes_below(doctor.pid).values()) < 2:
            assert time.monotonic() < deadline, "no probe hangs"
            assert doctor.poll() is None, doctor.communicate()[0]
            time.sleep(0.05)
        below = processes_below(doctor.pid)
        doctor.send_signal(number)
        shown, _ = doctor.communicate(timeout=30)  # far less than a probe has
        assert doctor.returncode == status
        assert "Traceback" not in shown
        deadline = time.monotonic() + 30
        while left := [pid for pid in below if running(pid)]:
            assert time.monotonic() < deadline, [below[pid] for pid in left]
            time.sleep(0.05)
    finally:
        doctor.kill()
        doctor.communicate()


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


def test_no_probe_is_started_once_all_were_ended():
    probes = Probes()
    probes.end()
    with pytest.raises(RuntimeError, match="host: the doctor ends"):
        ask("host", 60.0, probes)


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


def test_devices_are_numbered_as_nodes_take_them(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXDISAGG_LIBCUDA", "libnone.so")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")  # for what is put back
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    cuda.probe(tmp_path)
    assert "CUDA_DEVICE_ORDER" not in os.environ
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    cuda.probe(tmp_path)
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_a_driver_without_devices(driver, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_FAKE", "none")
    found = cuda_findings(driver, monkeypatch, tmp_path, "")
    assert found["driver"].why == "cuInit: CUDA_ERROR_NO_DEVICE (100)"
    values = {"version": "13.0", "devices": [], "visible": "7", "pci": [], "cuda_python": ""}
    assert "CUDA_VISIBLE_DEVICES=7" in by_name(cuda.findings(values))["devices"].why
