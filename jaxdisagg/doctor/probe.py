"""A probe in a process of its own (`-m jaxdisagg.doctor.probe NAME`), and who waits for it outside.

What asks drivers and libraries may crash, hang or print; nothing of that reaches the doctor. A
probe ends with the doctor, however that ends: its standard input is a pipe that the doctor holds.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
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


class Probes:
    """The probes' processes that run, so that all can be ended together; used by many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._ended = False

    def run(self, name: str, timeout: float) -> tuple[subprocess.Popen[str], str, str] | None:
        """The ended process of a probe, its stdout and stderr; None after `timeout` seconds.

        Raises RuntimeError after `end`.
        """
        inner, held = os.pipe()  # `communicate` would close a pipe of Popen's own
        try:
            with self._lock:
                if self._ended:
                    raise RuntimeError(f"{name}: the doctor ends")
                process = subprocess.Popen(
                    [sys.executable, "-m", "jaxdisagg.doctor.probe", name],
                    stdin=inner,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    start_new_session=True,
                )
                self._running.add(process)
            try:
                return process, *process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                _kill(process)
                process.communicate()
                return None
            finally:
                with self._lock:
                    self._running.discard(process)
        finally:
            os.close(inner)
            os.close(held)

    def end(self) -> None:
        """Kill every probe with all that it started; no other is started any more."""
        with self._lock:
            self._ended = True
            for process in self._running:
                _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def ask(name: str, timeout: float, probes: Probes | None = None) -> Values:
    """The values of one probe, run in a process of its own, which is among `probes` meanwhile.

    {"problem": text} if it fails, dies, or says nothing within `timeout` seconds, after which it is
    ended with all that it started. `said` are the last lines of its stderr, if any.
    """
    done = (probes or Probes()).run(name, timeout)
    if done is None:
        return {"problem": f"no answer within {timeout:g} s"}
    process, out, said = done
    last = " ".join(said.split("\n")[-LINES - 1 :]).strip()
    try:
        values = json.loads(out.strip().rpartition("\n")[2])
    except ValueError:
        return {"problem": last or f"it ended with status {process.returncode}"}
    return values | ({"said": last} if last else {})


def _end_with_doctor() -> None:
    """Kill this process and all that it started once standard input ends, as the doctor did.

    Only where it leads a group of its own, as the doctor starts it: not its caller's.
    """

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.killpg(0, signal.SIGKILL)

    if os.getpgrp() == os.getpid():
        threading.Thread(target=watch, name="doctor-watch", daemon=True).start()


def main(name: str) -> None:
    """Run a probe and print its values, last, as one line."""
    _end_with_doctor()
    values = PROBES[name][0]()
    print(json.dumps(values), flush=True)
    os._exit(0)  # a driver's or library's end may hang


if __name__ == "__main__":
    main(sys.argv[1])
