"""Which provider, domains and progress-thread CPUs an engine is to be opened with, and why."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ffi_transport.topology.assigning import DeviceNics, assign, usable
from ffi_transport.topology.machine import Nic, NicKind, Topology, domain_name
from ffi_transport.types import MAX_CPUS, MAX_DOMAINS

_RDMA: tuple[NicKind, ...] = ("efa", "verbs")  # in the order of choice of EngineConfig's "auto"
_OVER_IP = ("tcp", "net", "tcp;ofi_rxm")


@dataclass(frozen=True)
class FabricChoice:
    """How an engine is to be opened: fields of EngineConfig, and what each device is to use.

    `domains` () is the provider's first. `domain_cpus` is () or has CPUs for each domain, where ()
    is not pinned. `devices` is () where they all use all domains. `why` is for a person.
    """

    provider: str
    domains: tuple[str, ...]
    domain_cpus: tuple[tuple[int, ...], ...]
    devices: tuple[DeviceNics, ...]
    why: str


def choices(
    topology: Topology,
    provider: str,
    devices: Sequence[str] | int,
    nics: Sequence[str] = (),
    *,
    allowed: Collection[int] | None = None,
) -> tuple[FabricChoice, ...]:
    """The ways to open an engine, in the order in which they are to be tried; never none.

    `provider` is that of EngineConfig, `devices`, `nics` and `allowed` are those of `assign`. Of
    more than one way the earlier may fail where libfabric lacks the provider. Raises ValueError
    naming `nics`, for a NIC that is not there or that the provider does not drive, and what
    `assign` raises.
    """
    if nics:
        return _named(topology, provider, devices, nics, allowed)
    found = [
        _automatic(topology, kind, devices, allowed)
        for kind in _RDMA
        if provider in ("auto", kind) and usable(topology, kind)
    ]
    if provider in ("auto", *_OVER_IP):
        why = "the provider's first for the node's address"
        if provider == "auto":
            why += " (no RDMA NIC works)" if not found else ", if that fails"
        found.append(FabricChoice(provider, (), (), (), why))
    elif not found:
        # Sysfs need not show all (in a container): libfabric has the last word.
        why = "; ".join({device.why for device in assign(topology, devices)})
        found.append(FabricChoice(provider, (), (), (), f"the provider's first: {why}"))
    return tuple(found)


def groups(
    topology: Topology, devices: Sequence[str] | int, domains: Sequence[str]
) -> tuple[tuple[int, ...] | None, ...]:
    """For each device the indices of its own among an engine's `domains`; None is all of them."""
    count = devices if isinstance(devices, int) else len(devices)
    if len(domains) < 2 or count < 2:
        return (None,) * count
    index = {_name_of(topology, domain): i for i, domain in enumerate(domains)}
    shares = [
        tuple(sorted(index[nic] for nic in device.nics))
        for device in assign(topology, devices, tuple(domains))
    ]
    return tuple(None if len(share) == len(domains) else share for share in shares)


def _name_of(topology: Topology, domain: str) -> str:
    nic = topology.nic(domain)
    return domain if nic is None else nic.name


def _automatic(
    topology: Topology,
    kind: NicKind,
    devices: Sequence[str] | int,
    allowed: Collection[int] | None,
) -> FabricChoice:
    dealt = assign(topology, devices, kind=kind, allowed=allowed)
    names = tuple(dict.fromkeys(name for device in dealt for name in device.nics))
    left = len(usable(topology, kind)) - len(names)
    why = f"{len(names)} {kind} NICs by topology"
    if left:
        why += f"; {left} are nearer to accelerators that the node does not use"
    return _opened(topology, kind, names, dealt, allowed, why)


def _named(
    topology: Topology,
    provider: str,
    devices: Sequence[str] | int,
    nics: Sequence[str],
    allowed: Collection[int] | None,
) -> tuple[FabricChoice, ...]:
    dealt = assign(topology, devices, nics, allowed=allowed)
    known = [topology.nic(name) for name in nics]
    kinds = {nic.kind if nic else _kind_of_unknown(provider) for nic in known}
    if len(kinds) > 1:
        said = ", ".join(
            f"{name} ({nic.kind if nic else 'unknown'})"
            for name, nic in zip(nics, known, strict=True)
        )
        raise ValueError(f"nics: one provider must drive them all, these are of several: {said}")
    kind = kinds.pop()
    drives: NicKind = provider if provider in _RDMA else "ip"
    if provider not in ("auto", kind) and drives != kind:
        there = ", ".join(nic.name for nic in usable(topology, drives)) or "none"
        raise ValueError(f"nics: {nics[0]} is no NIC of provider {provider}; it drives {there}")
    if kind in _RDMA:
        _check_known(topology, kind, nics)
        tried: tuple[str, ...] = (kind,)
    elif provider == "auto" and any(usable(topology, rdma) for rdma in _RDMA):
        tried = _OVER_IP  # "auto" would take the RDMA NICs, which were not asked for
    else:
        tried = (provider,)
    names = tuple(nic.name if nic else name for name, nic in zip(nics, known, strict=True))
    broken = [f"{nic.name}: {nic.problem}" for nic in known if nic and nic.problem]
    why = "; ".join(["as named", *broken])
    return tuple(_opened(topology, one, names, dealt, allowed, why) for one in tried)


def _kind_of_unknown(provider: str) -> NicKind:
    return provider if provider in _RDMA else "ip"


def _check_known(topology: Topology, kind: NicKind, nics: Sequence[str]) -> None:
    there = [nic.name for nic in topology.nics if nic.kind == kind]
    for name in nics:
        if there and topology.nic(name) is None:
            raise ValueError(f"nics: {name!r} is none of the machine's: {', '.join(there)}")


def _opened(
    topology: Topology,
    provider: str,
    names: tuple[str, ...],
    dealt: tuple[DeviceNics, ...],
    allowed: Collection[int] | None,
    why: str,
) -> FabricChoice:
    if len(names) > MAX_DOMAINS:
        raise ValueError(f"nics: {len(names)} are more than the {MAX_DOMAINS} of one engine")
    known = [topology.nic(name) for name in names]
    domains = tuple(
        domain_name(nic) if nic else name for name, nic in zip(names, known, strict=True)
    )
    cpus = tuple(_pinned(topology, nic, allowed) for nic in known)
    return FabricChoice(provider, domains, cpus if any(cpus) else (), dealt, why)


def _pinned(
    topology: Topology, nic: Nic | None, allowed: Collection[int] | None
) -> tuple[int, ...]:
    """The allowed CPUs near a NIC that a thread can be pinned to; () where none is, or all are."""
    if nic is None or nic.pci is None:
        return ()
    all_cpus = set(topology.cpus if allowed is None else allowed)
    near = tuple(cpu for cpu in nic.pci.cpus if cpu in all_cpus and cpu < MAX_CPUS)
    return () if len(near) == len(all_cpus) else near
