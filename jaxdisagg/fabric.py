"""A node's transfer engine: which provider and NICs it opens, and which NICs each device uses."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import jax

from ffi_transport.engine import TransferEngine
from ffi_transport.errors import FabricUnavailable
from ffi_transport.topology import (
    FabricChoice,
    Topology,
    choices,
    cuda_addresses,
    groups,
    read_topology,
)
from ffi_transport.types import EngineConfig
from jaxdisagg.config import NodeConfig
from jaxdisagg.gpu_setup import first_platform
from jaxdisagg.mesh import is_gpu

log = logging.getLogger(__name__)

SYSFS = Path("/sys")


def open_fabric(node: NodeConfig, sysfs: Path = SYSFS) -> TransferEngine:
    """The transfer engine of a node (or of one of its processes), at its fixed HELLO address.

    It greets nobody yet. Its NICs are `node.nics`, or by topology: before jax knows its devices,
    those that CUDA lists first are taken for them. Raises ValueError naming `nics` for one that is
    not there, and FabricUnavailable naming what is missing: the library, a provider, an interface
    or a free port.
    """
    topology = _topology(sysfs)
    devices = _expected_devices(node, topology)
    ways = choices(topology, node.provider, devices, node.nics, allowed=os.sched_getaffinity(0))
    for way in ways[:-1]:
        try:
            return _open(node, way)
        except FabricUnavailable as error:
            log.warning("%s is not used: %s", way.provider, error)
    try:
        return _open(node, ways[-1])
    except FabricUnavailable as error:
        if any(f"'{name}'" in str(error) for name in node.nics):
            text = f"nics={'+'.join(node.nics)}: {error}"
            raise FabricUnavailable(text, missing=error.missing) from None
        raise


def _open(node: NodeConfig, way: FabricChoice) -> TransferEngine:
    config = EngineConfig(
        provider=way.provider,
        bind=node.host,
        control_port=node.fabric_port,
        domains=way.domains,
        domain_cpus=way.domain_cpus,
        device_memory=node.device_memory,
    )
    engine = TransferEngine(config, hello=None)
    log.info("%s: provider %s, %s (%s)", node.id, engine.provider, way.domains or "-", way.why)
    return engine


def device_domains(
    engine: TransferEngine, devices: Sequence[jax.Device], sysfs: Path = SYSFS
) -> tuple[tuple[int, ...] | None, ...]:
    """Which of the engine's domains each of these, this process's devices, uses; None is all.

    With several domains and several devices each device has its share, by topology.
    """
    domains = engine.config.domains
    if len(domains) < 2 or len(devices) < 2:
        return (None,) * len(devices)
    topology = _topology(sysfs)
    addresses = cuda_addresses() if is_gpu(devices[0]) else []
    ordinals = [device.local_hardware_id for device in devices]
    places: Sequence[str] | int = len(devices)
    if all(0 <= o < len(addresses) and topology.gpu(addresses[o]) for o in ordinals):
        places = [addresses[ordinal] for ordinal in ordinals]
    shares = groups(topology, places, domains)
    log.info("of the domains %s the devices use %s", domains, shares)
    return shares


def _topology(sysfs: Path) -> Topology:
    try:
        topology = read_topology(sysfs)
    except ValueError as error:  # a container need not have it
        log.info("no topology: %s", error)
        return Topology()
    for problem in topology.problems:
        log.info("topology: %s", problem)
    return topology


def _expected_devices(node: NodeConfig, topology: Topology) -> Sequence[str] | int:
    """The accelerators that jax will use here, if it will use any; else their number.

    The driver is not loaded where they decide nothing: with named NICs, or without RDMA.
    """
    count = node.mesh.devices // node.mesh.processes
    on_cpu = first_platform() == "cpu"
    chosen = not node.nics and any(nic.rdma and nic.problem is None for nic in topology.nics)
    if on_cpu or not chosen or not topology.gpus:
        return count
    addresses = cuda_addresses()[:count]
    known = len(addresses) == count and all(map(topology.gpu, addresses))
    return addresses if known else count
