"""Processes and their threads as /proc shows them. Threads that end meanwhile are left out."""

import contextlib
from pathlib import Path

from ffi_transport.topology.reading import parse_cpu_list


def statuses(pid: int | str = "self") -> dict[int, dict[str, str]]:
    """From a thread's number to the fields of its status, such as Name, which has its name."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            lines = (task / "status").read_text().splitlines()
            found[int(task.name)] = {
                name: value.strip() for name, _, value in (line.partition(":") for line in lines)
            }
    return found


def allowed_cpus(pid: int | str = "self") -> dict[int, tuple[int, ...]]:
    """From a thread's number to the CPUs that it may run on, in order."""
    return {
        thread: parse_cpu_list(status["Cpus_allowed_list"])
        for thread, status in statuses(pid).items()
    }


def wake_ups(pid: int | str = "self") -> int:
    """How often the threads have gone to sleep of their own accord."""
    return sum(int(status["voluntary_ctxt_switches"]) for status in statuses(pid).values())


def children(pid: int) -> list[int]:
    """The processes that a process has started and that are there, zombies included."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def running(pid: int) -> bool:
    """Whether a process is there and has not ended: a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
