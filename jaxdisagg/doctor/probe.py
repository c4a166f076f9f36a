"""A probe in a process of its own (`-m jaxdisagg.doctor.probe NAME`), and who waits for it outside.

What asks drivers and libraries may crash, hang or print; nothing of that reaches the doctor.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from jaxdisagg.doctor import cuda, host, jax_devices, network, software
from jaxdisagg.doctor.finding import Finding, Values

SYSFS_VARIABLE = "JAXDISAGG_DOCTOR_SYSFS"  # another tree than /sys, for tests
LINES = 3  # of what a probe said on stderr, its last ones


def _sysfs() -> Path:
    return Path(os.environ.get(SYSFS_VARIABLE, "/sys"))


type Judge = Callable[[Values], list[Finding]]
PROBES: dict[str, tuple[Callable[[], Values], Judge]] = {
    "software": (software.probe, software.findings),
    "jax": (jax_devices.probe, jax_devices.findings),
    "cuda": (lambda: cuda.probe(_sysfs()), cuda.findings),
    "libfabric": (network.probe_libfabric, network.libfabric_findings),
    "engine": (network.probe_engine, network.engine_findings),
    "nics": (lambda: network.probe_nics(_sysfs()), network.nic_findings),
    "host": (host.probe, host.findings),
}
"""Each probe by name, and what judges its values; in the order in which they are shown."""


def ask(name: str, timeout: float) -> Values:
    """The values of one probe, run in a process of its own.

    {"problem": text} if it fails, dies, or says nothing within `timeout` seconds, after which it is
    ended with all that it started. `said` are the last lines of its stderr, if any.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxdisagg.doctor.probe", name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, said = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"problem": f"no answer within {timeout:g} s"}
    last = " ".join(said.split("\n")[-LINES - 1 :]).strip()
    try:
        values = json.loads(out.strip().rpartition("\n")[2])
    except ValueError:
        return {"problem": last or f"it ended with status {process.returncode}"}
    return values | ({"said": last} if last else {})


def main(name: str) -> None:
    """Run a probe and print its values, last, as one line."""
    values = PROBES[name][0]()
    print(json.dumps(values), flush=True)
    os._exit(0)  # a driver's or library's end may hang


if __name__ == "__main__":
    main(sys.argv[1])
