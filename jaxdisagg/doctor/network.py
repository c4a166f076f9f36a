"""libfabric, its providers, the engine, and the network devices that sysfs shows."""

from pathlib import Path

from jaxdisagg.doctor.finding import Finding, Values, problem

SUBJECT = "network"
ADDRESS = "127.0.0.1"
# What the engine takes, in the order of its choice, and how people call it.
RDMA = {"efa": "efa", "verbs;ofi_rxm": "verbs"}
INSTALL = "Debian, Ubuntu: apt-get install libfabric1; Fedora: dnf install libfabric"


def probe_libfabric() -> Values:
    """libfabric's version and providers."""
    from jaxdisagg.doctor.libfabric import ask

    return ask()


def probe_engine() -> Values:
    """The provider with which an engine opens on loopback, or why it does not."""
    from ffi_transport.engine import TransferEngine
    from ffi_transport.errors import TransportError
    from ffi_transport.types import EngineConfig

    try:
        with TransferEngine(EngineConfig(bind=ADDRESS), hello=None) as engine:
            return {"provider": engine.provider}
    except TransportError as error:
        return {"error": str(error)}


def probe_nics(sysfs: Path) -> Values:
    """The network devices that are there."""
    from ffi_transport.topology import read_topology

    try:
        topology = read_topology(sysfs)
    except ValueError as error:
        return {"error": str(error)}
    nics = [
        {"name": nic.name, "kind": nic.kind, "speed": nic.speed, "problem": nic.problem}
        for nic in topology.nics
    ]
    return {"nics": nics, "problems": list(topology.problems)}


def libfabric_findings(values: Values) -> list[Finding]:
    """Judge what `probe_libfabric` found."""
    if failed := problem(SUBJECT, "libfabric", values, needed=True):
        return failed
    if "error" in values:
        return [Finding(SUBJECT, "libfabric", "-", "missing", f"{values['error']}; {INSTALL}")]
    found = [Finding(SUBJECT, "libfabric", values["version"])]
    for name, entry in values["providers"].items():
        words = ", ".join(entry["domains"])
        if entry["device_memory"]:
            words += "; takes device memory"
        found.append(Finding(SUBJECT, f"provider {RDMA.get(name, name)}", words))
    for provider, name in RDMA.items():
        if provider not in values["providers"]:
            why = "libfabric has no such provider, or no device for it"
            found.append(Finding(SUBJECT, f"provider {name}", "-", "absent", why))
    if not any(entry["device_memory"] for entry in values["providers"].values()):
        why = (
            "no provider sends from GPUs by itself (FI_HMEM): transfers are staged through the host"
        )
        found.append(Finding(SUBJECT, "device memory", "-", "absent", why))
    return found


def engine_findings(values: Values) -> list[Finding]:
    """Judge what `probe_engine` found."""
    if failed := problem(SUBJECT, "engine", values, needed=True):
        return failed
    if "error" in values:
        return [Finding(SUBJECT, "engine", "-", "missing", values["error"])]
    return [Finding(SUBJECT, "engine", f"opens with provider {values['provider']} on {ADDRESS}")]


def nic_findings(values: Values) -> list[Finding]:
    """Judge what `probe_nics` found."""
    if failed := problem(SUBJECT, "NICs", values, needed=False):
        return failed
    if "error" in values:
        return [Finding(SUBJECT, "NICs", "-", "absent", values["error"])]
    found = []
    for nic in values["nics"]:
        speed = "" if nic["speed"] is None else f", {nic['speed']:g} Gbit/s"
        state = "absent" if nic["problem"] and nic["kind"] != "ip" else "ok"
        why = nic["problem"] or ""
        found.append(Finding(SUBJECT, f"NIC {nic['name']}", f"{nic['kind']}{speed}", state, why))
    if not any(nic["kind"] in ("efa", "verbs") for nic in values["nics"]):
        why = "no RDMA NIC: transfers go over IP"
        found.append(Finding(SUBJECT, "RDMA NIC", "-", "absent", why))
    return found
