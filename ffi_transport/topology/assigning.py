"""Deals a machine's NICs to its devices, the nearest first, none idle (M4, M12, M22)."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ffi_transport.topology.machine import Nic, NicKind, PciDevice, Topology, pci_address

MAX_DEVICES = 4096
UNKNOWN = -256
"""The closeness of what is not known to be near: below that of any NUMA distance."""

type Nearness = Callable[[int, int], int]


@dataclass(frozen=True)
class DeviceNics:
    """What one device uses.

    `device` is its PCI address, or a name such as "device 0" where that is not known. `nics` are
    names, the nearest first, and `near` says for each what it shares with the device. `cpus` are
    near the device and allowed; () is any. `why` says how it came to this, in a few words.
    """

    device: str
    nics: tuple[str, ...]
    near: tuple[str, ...]
    cpus: tuple[int, ...]
    why: str


def closeness(topology: Topology, one: PciDevice | None, other: PciDevice | None) -> int:
    """How near two devices are; more is nearer.

    Positive: the length of the path from the host bridge that they share. 0: one NUMA node, no
    host bridge. Negative: minus the distance of their NUMA nodes, as the firmware has it (10 is
    itself), or UNKNOWN.
    """
    if one is None or other is None:
        return UNKNOWN
    shared = 0
    for a, b in zip(one.path, other.path, strict=False):
        if a != b:
            break
        shared += 1
    if shared:
        return shared
    if one.numa_node < 0 or other.numa_node < 0:
        return UNKNOWN
    if one.numa_node == other.numa_node:
        return 0
    nodes = {node.id: dict(node.distances) for node in topology.numa}
    return -nodes[one.numa_node].get(other.numa_node, -UNKNOWN - 1)


def closeness_words(value: int) -> str:
    """A closeness as people say it."""
    if value >= 2:
        return "PCIe switch"
    if value == 1:
        return "host bridge"
    if value == 0:
        return "NUMA node"
    return "unknown" if value == UNKNOWN else "another NUMA node"


def usable(topology: Topology, kind: NicKind) -> list[Nic]:
    """The NICs of a kind that may be chosen without being named."""
    return [nic for nic in topology.nics if nic.kind == kind and nic.problem is None]


def assign(
    topology: Topology,
    devices: Sequence[str] | int,
    nics: Sequence[str] = (),
    *,
    kind: NicKind | None = None,
    allowed: Collection[int] | None = None,
) -> tuple[DeviceNics, ...]:
    """The NICs and CPUs of each device; the same for the same machine, whatever the order of files.

    `devices` are PCI addresses of accelerators, or a number of devices whose place is not known.
    `nics` are names, of sysfs or of libfabric; () takes the RDMA NICs that work (of `kind`; None:
    EFA if there are any, else verbs) and are nearer to these devices than to the machine's other
    accelerators. `allowed` are the CPUs that may be used (None: all).

    With at least as many NICs as devices, each NIC serves one device: of those nearest to it the
    one with the fewest NICs. So the counts of devices that are equally near to every NIC differ by
    at most one. A device that would have none takes one, the nearest, from a device with several.
    With fewer NICs than devices the roles are exchanged: each device has one NIC, each NIC a
    device. Devices of unknown place have equal shares, or where the NICs do not divide evenly all
    of them have all.

    Raises ValueError naming `devices` or `nics` if one is not there or is named twice.
    """
    places = _places(topology, devices)
    if nics:
        chosen = _named(topology, nics)
    else:
        kinds: tuple[NicKind, ...] = ("efa", "verbs") if kind is None else (kind,)
        chosen = next(filter(None, (usable(topology, k) for k in kinds)), [])
        if not isinstance(devices, int):
            chosen = _nearer_than_others(topology, chosen, devices)
    names = _names(devices)
    if not chosen:
        why = _why_none(topology, kind)
        return tuple(
            DeviceNics(name, (), (), _cpus(place, allowed), why)
            for name, place in zip(names, places, strict=True)
        )
    dealt = _shares(topology, places, chosen)
    return tuple(
        _describe(topology, name, place, [chosen[n] for n in share], dealt, allowed)
        for name, place, share in zip(names, places, dealt, strict=True)
    )


def _names(devices: Sequence[str] | int) -> list[str]:
    if isinstance(devices, int):
        return [f"device {i}" for i in range(devices)]
    return [pci_address(device) for device in devices]


def _places(topology: Topology, devices: Sequence[str] | int) -> list[PciDevice | None]:
    if isinstance(devices, int):
        if not 1 <= devices <= MAX_DEVICES:
            raise ValueError(f"devices: {devices} is not a number from 1 to {MAX_DEVICES}")
        return [None] * devices
    if not devices:
        raise ValueError("devices: none are named")
    found: list[PciDevice | None] = []
    for device in devices:
        try:
            gpu = topology.gpu(pci_address(device))
        except ValueError as error:
            raise ValueError(f"devices: {error}") from None
        if gpu is None:
            there = ", ".join(gpu.address for gpu in topology.gpus) or "none"
            raise ValueError(f"devices: {device} is no accelerator of this machine; it has {there}")
        if gpu.pci in found:
            raise ValueError(f"devices: {device} is named twice")
        found.append(gpu.pci)
    return found


def _named(topology: Topology, nics: Sequence[str]) -> list[Nic]:
    """The NICs by their names; one that sysfs does not show, such as an address, has no place."""
    found: list[Nic] = []
    for name in nics:
        nic = topology.nic(name) or Nic(name, "ip", None)
        if nic in found:
            raise ValueError(f"nics: {name!r} is named twice")
        found.append(nic)
    return found


def _nearer_than_others(topology: Topology, chosen: list[Nic], devices: Sequence[str]) -> list[Nic]:
    """Those that fall to these devices when all the machine's accelerators have their share."""
    everyone = [gpu.pci for gpu in topology.gpus]
    if not chosen:
        return []
    shares = _shares(topology, everyone, chosen)
    ours = {pci_address(device) for device in devices}
    kept = {n for place, share in zip(everyone, shares, strict=True) if place.address in ours
            for n in share}  # fmt: skip
    return [nic for n, nic in enumerate(chosen) if n in kept]


def _shares(
    topology: Topology, places: Sequence[PciDevice | None], nics: Sequence[Nic]
) -> list[list[int]]:
    """For each device the indices of its NICs, the nearest first."""
    devices = range(len(places))
    if None in places and len(nics) % len(places):
        return [list(range(len(nics))) for _ in devices]

    def near(n: int, d: int) -> int:
        return closeness(topology, nics[n].pci, places[d])

    if len(nics) >= len(places):
        owner = _deal(len(nics), len(places), near)
        shares = [[n for n, d in enumerate(owner) if d == device] for device in devices]
    else:
        shares = [[n] for n in _deal(len(places), len(nics), lambda d, n: near(n, d))]
    return [sorted(share, key=lambda n, d=d: -near(n, d)) for d, share in enumerate(shares)]


def _deal(items: int, holders: int, near: Nearness) -> list[int]:
    """The holder of each item, of which there are as many or more; see `assign`.

    Items with the fewest nearest holders come first. Where the sets of nearest holders are nested
    or apart, as in a tree, that is as even as nearness allows.
    """
    ranks = [[near(item, holder) for holder in range(holders)] for item in range(items)]
    nearest = [[h for h in range(holders) if row[h] == max(row)] for row in ranks]
    owner = [0] * items
    count = [0] * holders
    for item in sorted(range(items), key=lambda i: (len(nearest[i]), i)):
        owner[item] = min(nearest[item], key=lambda h: (count[h], h))
        count[owner[item]] += 1
    for holder in range(holders):
        if not count[holder]:
            spare = [i for i in range(items) if count[owner[i]] > 1]
            item = max(spare, key=lambda i: (ranks[i][holder], count[owner[i]], i))
            count[owner[item]] -= 1
            owner[item] = holder
            count[holder] = 1
    return owner


def _cpus(place: PciDevice | None, allowed: Collection[int] | None) -> tuple[int, ...]:
    if place is None:
        return ()
    return tuple(cpu for cpu in place.cpus if allowed is None or cpu in allowed)


def _describe(
    topology: Topology,
    name: str,
    place: PciDevice | None,
    nics: list[Nic],
    dealt: list[list[int]],
    allowed: Collection[int] | None,
) -> DeviceNics:
    near = tuple(closeness_words(closeness(topology, nic.pci, place)) for nic in nics)
    cpus = _cpus(place, allowed)
    words = [f"{near.count(word)} by {word}" for word in dict.fromkeys(near)]
    if place is None:
        words = ["the device's place is not known"]
    if sum(map(len, dealt)) > len({n for share in dealt for n in share}):
        words.append("shared")
    if place is not None and place.cpus and not cpus:
        words.append("none of its CPUs is allowed")
    return DeviceNics(name, tuple(nic.name for nic in nics), near, cpus, ", ".join(words))


def _why_none(topology: Topology, kind: NicKind | None) -> str:
    broken = [nic for nic in topology.nics if nic.rdma and kind in (None, nic.kind)]
    if not broken:
        return "the machine has no RDMA NIC" + (f" of kind {kind}" if kind else "")
    return "no RDMA NIC works: " + "; ".join(f"{nic.name}: {nic.problem}" for nic in broken)
