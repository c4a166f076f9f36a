"""The CUDA driver and its devices: what RDMA to and from their memory could use."""

import os
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from jaxdisagg.doctor.finding import Finding, Values, problem
from jaxdisagg.gpu_setup import count_by_address

SUBJECT = "CUDA"
NVIDIA = 0x10DE
# CUcomputemode of cuda.h
_MODES = {0: "shared", 2: "prohibited", 3: "one process at a time"}
# CUGPUDirectRDMAWritesOrdering of cuda.h
_ORDERINGS = {0: "none", 100: "own device", 200: "all devices"}
_FLUSH_FROM_HOST = 1  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")


def probe(sysfs: Path) -> Values:
    """The driver's version and devices, and what speaks of NVIDIA devices without it.

    Devices are numbered as `gpus=` takes them, for which this process's environment is changed.
    """
    from ffi_transport.topology import CudaQuery, CudaUnavailable, read_topology

    try:
        gpus = [gpu.address for gpu in read_topology(sysfs).gpus if gpu.vendor == NVIDIA]
    except ValueError:
        gpus = []
    try:
        python = metadata.version("cuda-bindings")
    except metadata.PackageNotFoundError:
        python = ""
    found: Values = {
        "pci": gpus,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "peer_modules": [name for name in PEER_MODULES if (sysfs / "module" / name).exists()],
        "cuda_python": python,
    }
    count_by_address()
    try:
        query = CudaQuery()
        version = ".".join(map(str, query.version()))
        devices = [asdict(device) for device in query.devices()]
    except (CudaUnavailable, ValueError) as error:
        return found | {"error": str(error)}
    return found | {"version": version, "devices": devices}


def findings(values: Values) -> list[Finding]:
    """Judge what `probe` found."""
    if failed := problem(SUBJECT, "driver", values, needed=False):
        return failed
    if "error" in values:
        there = len(values["pci"])
        why = values["error"]
        if there:
            why += f"; {there} NVIDIA devices are on the PCI bus: install their driver"
        return [Finding(SUBJECT, "driver", "-", "absent", why)]
    found = [Finding(SUBJECT, "driver", f"for CUDA {values['version']}")]
    if not values["devices"]:
        visible = values["visible"]
        why = "the driver shows none"
        if visible is not None:
            why += f": CUDA_VISIBLE_DEVICES={visible}"
        return [*found, Finding(SUBJECT, "devices", "none", "absent", why)]
    for device in values["devices"]:
        found += _device(device, values["peer_modules"])
    if values["cuda_python"]:
        found.append(Finding(SUBJECT, "cuda-python", values["cuda_python"]))
    else:
        why = "cuda12 and cuda13 bring it; only ffi_transport/cumem.py uses it, which no node does"
        found.append(Finding(SUBJECT, "cuda-python", "-", "absent", why))
    return found


def _device(device: Values, peer_modules: list[str]) -> list[Finding]:
    attributes = device["attributes"] or {}
    name = f"device {device['ordinal']}"
    about = [device["name"] or "?", device["address"]]
    if device["memory"]:
        about.append(f"{device['memory'] / 2**30:.1f} GiB")
    if "capability_major" in attributes:
        about.append(f"sm_{attributes['capability_major']}{attributes['capability_minor']}")
    if device["uuid"]:
        about.append(device["uuid"])
    found = [Finding(SUBJECT, name, ", ".join(about))]
    mode = attributes.get("compute_mode", 0)
    if mode:
        why = "nodes cannot share this GPU (nvidia-smi --compute-mode=DEFAULT)"
        found.append(
            Finding(SUBJECT, f"{name} sharing", _MODES.get(mode, str(mode)), "absent", why)
        )
    return [*found, _registration(name, attributes, peer_modules), _ordering(name, attributes)]


def _registration(name: str, attributes: Values, peer_modules: list[str]) -> Finding:
    """By what a NIC could reach the device's memory."""
    ways = []
    if attributes.get("dmabuf"):
        ways.append("dmabuf")
    if attributes.get("rdma") and peer_modules:
        ways.append(peer_modules[0])
    if attributes.get("memory_mapping") and attributes.get("rdma_with_memory_mapping"):
        ways.append("cuMem")
    what = f"{name} RDMA"
    if "dmabuf" in ways or (peer_modules and attributes.get("rdma")):
        return Finding(SUBJECT, what, ", ".join(ways))
    if attributes.get("rdma"):
        why = f"neither dmabuf nor a module of {', '.join(PEER_MODULES)}: transfers are staged"
    else:
        why = "the device has no GPUDirect RDMA: transfers go through host memory"
    return Finding(SUBJECT, what, ", ".join(ways) or "-", "absent", why)


def _ordering(name: str, attributes: Values) -> Finding:
    """Whether writes by RDMA must be flushed before the device may read them (R17)."""
    what = f"{name} writes ordered"
    if "rdma_writes_ordering" not in attributes:
        return Finding(SUBJECT, what, "?", "absent", "the driver does not say")
    ordering = attributes["rdma_writes_ordering"]
    text = _ORDERINGS.get(ordering, str(ordering))
    if ordering >= 100:
        return Finding(SUBJECT, what, f"{text}: no flush needed")
    if attributes.get("rdma_flush_options", 0) & _FLUSH_FROM_HOST:
        return Finding(SUBJECT, what, f"{text}: flushed before a request is ready")
    why = "writes are not ordered and the host cannot flush them: staged transfers alone are safe"
    return Finding(SUBJECT, what, text, "absent", why)
