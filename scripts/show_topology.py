"""Show which NICs and CPUs are near which device, and what a node would use of them, and why.

Reads sysfs alone: no accelerator, NIC, driver or right is needed. What libfabric then offers under
these names is its own matter; a node says so when it starts.
"""

import json as json_module
import os
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ffi_transport.topology import (
    DeviceNics,
    FabricChoice,
    Nic,
    Topology,
    assign,
    choices,
    cpu_ranges,
    domain_name,
    read_topology,
)
from ffi_transport.types import PROVIDERS
from jaxdisagg.start_progress import print_error

SYSFS = Path("/sys")
NUMBER_OF_WORDS = 4


def parse_devices(text: str, topology: Topology) -> Sequence[str] | int:
    """`4`, or PCI addresses with commas; nothing is every accelerator, or one device if none."""
    if not text:
        return [gpu.address for gpu in topology.gpus] or 1
    if text.isascii() and text.isdecimal():
        return int(text)
    return [part.strip() for part in text.split(",")]


def table(title: str, *columns: str) -> Table:
    """A table in the look of the project's scripts."""
    made = Table(title=title, box=box.SIMPLE, title_justify="left", title_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def numa_table(topology: Topology) -> Table:
    """NUMA nodes and their CPUs."""
    made = table("NUMA nodes", "node", "CPUs", "distances")
    for node in topology.numa:
        distances = " ".join(str(distance) for _, distance in node.distances)
        made.add_row(str(node.id), cpu_ranges(node.cpus) or "?", distances or "?")
    return made


def device_table(topology: Topology, dealt: Sequence[DeviceNics]) -> Table:
    """Each device, its NICs and CPUs."""
    made = table("Devices", "device", "NUMA", "NICs", "near", "CPUs")
    for device in dealt:
        gpu = topology.gpu(device.device)
        numa = "?" if gpu is None or gpu.pci.numa_node < 0 else str(gpu.pci.numa_node)
        made.add_row(
            device.device, numa, shorten(device.nics), device.why, cpu_ranges(device.cpus) or "any"
        )
    return made


def nic_table(topology: Topology, dealt: Sequence[DeviceNics]) -> Table:
    """Every NIC, whether it works, and for which devices."""
    made = table("NICs", "NIC", "kind", "PCI", "NUMA", "Gbit/s", "libfabric", "state", "devices")
    for nic in topology.nics:
        users = [device.device for device in dealt if nic.name in device.nics]
        made.add_row(
            nic.name, nic.kind, nic.pci.address if nic.pci else "-", numa_of(nic),
            "?" if nic.speed is None else f"{nic.speed:g}", domain_name(nic),
            nic.problem or "works", shorten(users) or "-",
        )  # fmt: skip
    return made


def numa_of(nic: Nic) -> str:
    """Its NUMA node, if it has one and the firmware says so."""
    return "?" if nic.pci is None or nic.pci.numa_node < 0 else str(nic.pci.numa_node)


def choice_table(ways: Sequence[FabricChoice]) -> Table:
    """What a node with these devices tries, in order."""
    made = table("A node's engine, in the order tried", "provider", "domains", "threads on", "why")
    for way in ways:
        pinned = dict.fromkeys(cpu_ranges(cpus) or "any CPU" for cpus in way.domain_cpus)
        made.add_row(
            way.provider, shorten(way.domains) or "-", "; ".join(pinned) or "any CPU", way.why
        )
    return made


def shorten(words: Sequence[str]) -> str:
    """The words, those in the middle left out if there are many."""
    if len(words) <= NUMBER_OF_WORDS:
        return " ".join(words)
    half = NUMBER_OF_WORDS // 2
    return f"{' '.join(words[:half])} ... {' '.join(words[-half:])} ({len(words)})"


def document(
    topology: Topology, dealt: Sequence[DeviceNics], ways: Sequence[FabricChoice]
) -> dict[str, Any]:
    """All of it as plain values."""
    values: dict[str, Any] = asdict(topology)
    return values | {
        "nics": [asdict(nic) | {"domain": domain_name(nic)} for nic in topology.nics],
        "devices": [asdict(device) for device in dealt],
        "engine": [asdict(way) for way in ways],
    }


def main(
    root: Annotated[Path, typer.Option(help="a sysfs tree, such as a copy of another's")] = SYSFS,
    devices: Annotated[
        str, typer.Option(help="PCI addresses with commas, or a number; all accelerators if empty")
    ] = "",
    provider: Annotated[str, typer.Option(help=f"{', '.join(PROVIDERS[:-1])}")] = "auto",
    nics: Annotated[str, typer.Option(help="NICs to use, a+b; by topology if empty")] = "",
    json: Annotated[Path | None, typer.Option(help="write it here instead; - is stdout")] = None,
) -> None:
    """Show which NICs and CPUs are near which device, and what a node would use of them."""
    console = Console()
    try:
        if provider not in PROVIDERS[:-1]:
            raise ValueError(f"provider: {provider!r} is none of {', '.join(PROVIDERS[:-1])}")
        topology = read_topology(root)
        # The CPUs of another machine are not this process's to be allowed.
        allowed: Collection[int] | None = os.sched_getaffinity(0) if root == SYSFS else None
        which = parse_devices(devices, topology)
        named = tuple(filter(None, nics.split("+")))
        ways = choices(topology, provider, which, named, allowed=allowed)
        dealt = ways[0].devices or assign(topology, which, named, allowed=allowed)
        if json is not None:
            text = json_module.dumps(document(topology, dealt, ways), indent=2) + "\n"
            if str(json) == "-":
                typer.echo(text, nl=False)
            else:
                json.write_text(text)
            return
    except (ValueError, OSError) as error:
        print_error(Console(stderr=True), str(error))
        raise typer.Exit(2) from None
    for shown in (
        numa_table(topology),
        nic_table(topology, dealt),
        device_table(topology, dealt),
        choice_table(ways),
    ):
        console.print(shown)
    for problem in topology.problems:
        console.print(f"not understood: {problem}", markup=False, highlight=False)


if __name__ == "__main__":
    typer.run(main)
