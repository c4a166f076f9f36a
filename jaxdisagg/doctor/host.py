"""Limits and permissions of the host: CPUs, memory that may be locked, other processes' memory."""

import ctypes
import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

from jaxdisagg.doctor.finding import Finding, Values, problem

SUBJECT = "host"
LEAST_MEMLOCK = 64 << 20  # below it even one staging ring or NIC's queues do not fit
CHILD_SECONDS = 10

# Writes into its parent, whose descendant it is and not the reverse: the kernel's rules (Yama) then
# allow no more than between two nodes of a deployment.
_WRITER = """
import ctypes, os, sys
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
libc = ctypes.CDLL(None, use_errno=True)
text = ctypes.create_string_buffer(b"written")
local, remote = Part(ctypes.addressof(text), 8), Part(int(sys.argv[1]), 8)
write = libc.process_vm_writev
write.restype = ctypes.c_ssize_t
done = write(os.getppid(), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
print(0 if done == 8 else ctypes.get_errno())
"""
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
_NAMESPACE = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
flags = {CLONE_NEWNET} | (0 if os.getuid() == 0 else {CLONE_NEWUSER})
print(0 if libc.unshare(flags) == 0 else ctypes.get_errno())
"""


def probe(proc: Path = Path("/proc"), shm: Path = Path("/dev/shm")) -> Values:
    """What this process may use and do."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "unlimited": resource.RLIM_INFINITY,
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "memory": _memory(proc),
        "shm": _free(shm),
        "cma": _cma(),
        "namespaces": _ask(_NAMESPACE),
        "ptrace_scope": _text(proc / "sys/kernel/yama/ptrace_scope"),
    }


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _memory(proc: Path) -> dict[str, int]:
    """Of /proc/meminfo: MemTotal, MemAvailable, Hugepagesize (bytes) and HugePages_Total."""
    found: dict[str, int] = {}
    for line in _text(proc / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if name in ("MemTotal", "MemAvailable", "HugePages_Total", "Hugepagesize") and words:
            found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found


def _free(folder: Path) -> int | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _ask(code: str, *arguments: str) -> int:
    """The number that a small program prints; errno.EIO if it does not."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True, text=True, timeout=CHILD_SECONDS, check=False,
        )  # fmt: skip
        return int(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return errno.EIO


def _cma() -> int:
    """0 if one process may write another's memory, else the error number."""
    here = ctypes.create_string_buffer(8)
    return _ask(_WRITER, str(ctypes.addressof(here)))


def findings(values: Values) -> list[Finding]:
    """Judge what `probe` found."""
    if failed := problem(SUBJECT, "limits", values, needed=False):
        return failed
    memory, shm = values["memory"], values["shm"]
    found = [Finding(SUBJECT, "CPUs", str(values["cpus"]))]
    if "MemTotal" in memory:
        text = f"{_gib(memory['MemAvailable'])} of {_gib(memory['MemTotal'])} available"
        found.append(Finding(SUBJECT, "memory", text))
    found.append(_memlock(values["memlock"], values["unlimited"]))
    found.append(_huge_pages(memory))
    if shm is None:
        found.append(Finding(SUBJECT, "/dev/shm", "-", "absent", "NCCL between processes needs it"))
    else:
        found.append(Finding(SUBJECT, "/dev/shm", f"{_gib(shm)} free"))
    found.append(Finding(SUBJECT, "open files", str(values["files"])))
    found.append(_allowed_cma(values["cma"], values["ptrace_scope"]))
    if values["namespaces"] == 0:
        found.append(Finding(SUBJECT, "network namespaces", "allowed"))
    else:
        why = f"{os.strerror(values['namespaces'])}: scripts/netns_bed.py cannot make its bed"
        found.append(Finding(SUBJECT, "network namespaces", "-", "absent", why))
    return found


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _memlock(limit: int, unlimited: int) -> Finding:
    what = "locked memory"
    if limit in (unlimited, -1):
        return Finding(SUBJECT, what, "unlimited")
    text = f"{limit / 2**20:.0f} MiB"
    if limit >= LEAST_MEMLOCK:
        return Finding(SUBJECT, what, text)
    why = "RDMA NICs must lock what they write; raise it (ulimit -l, LimitMEMLOCK=)"
    return Finding(SUBJECT, what, text, "absent", why)


def _huge_pages(memory: dict[str, int]) -> Finding:
    count, size = memory.get("HugePages_Total", 0), memory.get("Hugepagesize", 0)
    if not count:
        why = "none are reserved; efa takes some for its queues if it can"
        return Finding(SUBJECT, "huge pages", "0", "absent", why)
    return Finding(SUBJECT, "huge pages", f"{count} of {size >> 20} MiB")


def _allowed_cma(status: int, ptrace_scope: str) -> Finding:
    what = "another process's memory"
    if status == 0:
        return Finding(SUBJECT, what, "may be written")
    why = f"process_vm_writev: {os.strerror(status)}"
    if ptrace_scope not in ("", "0"):
        why += f" (kernel.yama.ptrace_scope={ptrace_scope})"
    return Finding(SUBJECT, what, "-", "absent", f"{why}; nothing needs it yet")
