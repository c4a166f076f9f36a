"""What must happen in a node's process before jax is imported, and nothing that needs jax."""

import logging
import os
import signal
import threading
from pathlib import Path

from jaxdisagg.config import NodeConfig
from jaxdisagg.gpu_setup import set_gpus

log = logging.getLogger(__name__)

HOST_DEVICES = "xla_force_host_platform_device_count"


def end_with_parent() -> None:
    """End this process when the one that started it has ended: no orphans.

    The parent holds the other end of stdin open as long as it lives. (The kernel's parent-death
    signal would do for a parent's thread, not for the parent.)
    """

    def watch() -> None:
        while os.read(0, 4096):
            pass
        # Seen by somebody who starts a node by hand, with stdin at /dev/null.
        log.warning("this process ends, since its standard input has ended")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def pin(node: NodeConfig) -> None:
    """Keep this process, and every thread that it will start, on its part of the node's CPUs.

    Raises ValueError naming a CPU that this machine or its container does not allow.
    """
    cpus = node.mesh.cpus_of(node.process)
    if not cpus:
        return
    allowed = os.sched_getaffinity(0)
    missing = sorted(set(cpus) - allowed)
    if missing:
        raise ValueError(f"cpus={missing[0]} is not among the allowed ones {sorted(allowed)}")
    os.sched_setaffinity(0, cpus)


def set_environment(node: NodeConfig, cache: Path) -> None:
    """Enough devices for the process, and a compilation cache that all nodes share.

    Raises ValueError naming `gpus` or `gpu_memory` for CUDA devices that cannot be used
    (`gpu_setup.set_gpus`).
    """
    processes = node.mesh.processes
    set_gpus(node)
    set_host_devices(node.mesh.devices // processes, exactly=processes > 1)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def set_host_devices(count: int, *, exactly: bool = False) -> None:
    """Let jax find `count` CPU devices, unless XLA_FLAGS already names a number.

    With `exactly` that number is left out: a process of several must have its share and no more.
    Without an accelerator it offers one; on other platforms this has no effect. XLA_FLAGS are read
    when jax first looks for devices, so importing it before is no harm.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if exactly:
        flags = " ".join(f for f in flags.split() if HOST_DEVICES not in f)
    if HOST_DEVICES not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{HOST_DEVICES}={count}".strip()
