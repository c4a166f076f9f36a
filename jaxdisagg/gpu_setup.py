"""The CUDA devices of a node's process: what its environment must say before jax is imported."""

import contextlib
import os
import pkgutil
from importlib import import_module, metadata

from jaxdisagg.config import NodeConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"
_CPUS_ALONE = (
    "this jax is for CPUs alone; install jaxdisagg[cuda13] or, for an older driver, "
    "jaxdisagg[cuda12]"
)
PLUGIN_GROUP = "jax_plugins"  # where jax looks for its back ends: modules and entry points
_CUDA_NAMES = ("cuda", "gpu")  # as JAX_PLATFORMS may say
BACK_END_ERRORS = (RuntimeError, AssertionError)
"""What jax raises where no back end starts; the second where JAX_PLATFORMS names one for a plugin
that is not installed."""


def cuda_plugins() -> list[str]:
    """The CUDA back ends that jax finds installed, such as ["xla_cuda13"]; jax is not imported."""
    names = {entry.name for entry in metadata.entry_points(group=PLUGIN_GROUP)}
    with contextlib.suppress(ImportError):
        folders = import_module(PLUGIN_GROUP).__path__
        names |= {found.name for found in pkgutil.iter_modules(folders)}
    return sorted(name for name in names if "cuda" in name)


def first_platform() -> str:
    """What JAX_PLATFORMS names first; "" where jax chooses by itself."""
    return os.environ.get("JAX_PLATFORMS", "").split(",")[0].strip()


def why_no_devices(error: Exception) -> str:
    """One line for one of BACK_END_ERRORS: what jax said, or what its assertion means."""
    said = " ".join(str(error).split())
    if said and not isinstance(error, AssertionError):
        return said
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if first_platform() in _CUDA_NAMES and not cuda_plugins():
        return f"JAX_PLATFORMS={platforms}: {_CPUS_ALONE}"
    return f"no platform of JAX_PLATFORMS={platforms} is there"


def default_platform() -> str:
    """The platform that jax uses where none is named: its back end is started.

    Raises ValueError where none starts.
    """
    import jax  # only here: what else is in this file comes before it

    try:
        return jax.default_backend()
    except BACK_END_ERRORS as error:
        raise ValueError(f"jax finds no devices: {why_no_devices(error)}") from None


def visible_gpus() -> int:
    """The CUDA devices that jax would use here; 0 with another platform, plugin or no driver."""
    if first_platform() not in ("", *_CUDA_NAMES) or not cuda_plugins():
        return 0
    # Imports numpy, whose threads start at once: not before a process is pinned.
    from ffi_transport.topology import cuda_addresses

    return len(cuda_addresses())


def set_gpus(node: NodeConfig) -> None:
    """Let this process see its share of the node's GPUs and no other, and take its memory.

    Nothing is changed for a node without GPUs. CUDA_VISIBLE_DEVICES, where it is set, says which
    devices `mesh.gpus` counts (by number or UUID); else they count by PCI address, as nvidia-smi
    does. A failing CUDA back end is made an error, where jax would go on with a CPU.

    Raises ValueError naming `gpus` where this jax has no CUDA back end or was told to use another
    platform, and for a device that is not there; or `gpu_memory` where no GPU would be used.
    """
    gpus = node.mesh.gpus_of(node.process)
    if gpus:
        if problem := _jax_problem():
            raise ValueError(f"{_words(gpus)}: {problem}")
        os.environ[VISIBLE] = ",".join(_named(gpus))
        os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu")
        _check_there(gpus, os.environ[VISIBLE])
    if node.gpu_memory:
        if not gpus and not visible_gpus():
            why = _jax_problem() or "there is no CUDA device"
            raise ValueError(f"gpu_memory={node.gpu_memory:g}: {why}")
        # jax refuses both names at once; the second is the older one.
        os.environ["XLA_CLIENT_MEM_FRACTION"] = f"{node.gpu_memory:g}"
        os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)
    if node.dtype == "float32" and (gpus or visible_gpus()):
        # By itself XLA multiplies float32 matrices in TF32 there, with 10 bits of mantissa.
        os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")


def count_by_address() -> None:
    """Let CUDA number the devices by PCI address, as nvidia-smi does; before its driver starts.

    By itself it puts the fastest first. Where CUDA_VISIBLE_DEVICES is set its order stays.
    """
    if VISIBLE not in os.environ:
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def _words(gpus: tuple[int, ...]) -> str:
    return f"gpus={'+'.join(map(str, gpus))}"


def _jax_problem() -> str | None:
    """Why jax would use no GPU of any machine, or None."""
    if first_platform() not in ("", *_CUDA_NAMES):
        return f"JAX_PLATFORMS={os.environ['JAX_PLATFORMS']} uses none"
    return None if cuda_plugins() else _CPUS_ALONE


def _named(gpus: tuple[int, ...]) -> list[str]:
    """The devices as CUDA_VISIBLE_DEVICES takes them."""
    outer = os.environ.get(VISIBLE)
    if outer is None:
        count_by_address()
        return [str(gpu) for gpu in gpus]
    names = [name.strip() for name in outer.split(",") if name.strip()]
    for gpu in gpus:
        if gpu >= len(names):
            raise ValueError(f"gpus={gpu}: {VISIBLE}={outer} names {len(names)} devices")
    return [names[gpu] for gpu in gpus]


def _check_there(gpus: tuple[int, ...], named: str) -> None:
    """CUDA hides a device that is not there, and all that are named after it."""
    from ffi_transport.topology import cuda_addresses

    found = len(cuda_addresses())
    if found < len(gpus):
        raise ValueError(
            f"gpus={gpus[found]}: no such CUDA device ({VISIBLE}={named} shows {found} of "
            f"{len(gpus)})"
        )
