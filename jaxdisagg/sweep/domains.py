"""What the NICs of two nodes carried, beside what the plan says each of them must have.

A device's page-writes go over its own NICs alone, so the NICs that some devices share carry
together what these devices send, or receive. Where it is open which device that is (another dp rank
may take the request, the seed may choose another copy) nothing but the whole node's sum is known.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ffi_transport.engine import TransferEngine
from jaxdisagg.fabric import device_domains
from jaxdisagg.sweep.predict import Side, request_traffic

SEEDS_TRIED = 8
Counters = list[dict[str, Any]]


def nic_groups(
    engine: TransferEngine, devices: Sequence[jax.Device], loads: np.ndarray | None
) -> list[tuple[list[int], list[int]]]:
    """(domains, devices by their place in `devices`) of devices that share NICs with no others.

    One group of all where `loads` (of each device) is None: not known.
    """
    every = list(range(len(engine.domain_counters())))
    if loads is None:
        return [(every, list(range(len(devices))))]
    shares = device_domains(engine, devices)
    found: list[tuple[set[int], list[int]]] = []
    for place, share in enumerate(shares):
        mine, members = set(every if share is None else share), [place]
        for group in [g for g in found if g[0] & mine]:
            found.remove(group)
            mine, members = mine | group[0], group[1] + members
        found.append((mine, members))
    return [(sorted(domains), members) for domains, members in found]


def device_loads(prefill: Side, decode: Side, tokens: int, *, source: bool) -> np.ndarray | None:
    """int64[tp, 2]: page-writes and bytes that each device of one side sends or receives.

    None where that depends on a choice: between dp ranks, or of the seed.
    """
    if (prefill if source else decode).node.mesh.dp > 1:
        return None
    loads = []
    for seed in range(SEEDS_TRIED):
        moved = request_traffic(prefill, decode, tokens, seed)
        axis = 1 if source else 0
        loads.append(np.stack([moved.units.sum(axis), moved.bytes.sum(axis)], axis=-1))
    return loads[0] if all((load == loads[0]).all() for load in loads) else None


def nic_rows(
    prefill: tuple[Side, TransferEngine, Sequence[jax.Device], Counters],
    decode: tuple[Side, TransferEngine, Sequence[jax.Device], Counters],
    tokens: int,
    requests: int,
) -> list[dict[str, Any]]:
    """A row for each group of NICs of either side; each side is given with its counters before.

    Keys: side, page_writes and page_writes_predicted, of the prefill side bytes and
    bytes_predicted, and nics, a list with each one's name and share of the same.
    """
    moved = request_traffic(prefill[0], decode[0], tokens, seed=0)
    whole = np.array([moved.units.sum(), moved.bytes.sum()])
    rows = []
    for name, (_, engine, devices, before) in (("prefill", prefill), ("decode", decode)):
        source = name == "prefill"
        loads = device_loads(prefill[0], decode[0], tokens, source=source)
        after = engine.domain_counters()
        for domains, members in nic_groups(engine, devices, loads):
            each = [_carried(before[d], after[d], source=source) for d in domains]
            predicted = requests * (whole if loads is None else loads[members].sum(axis=0))
            row: dict[str, Any] = {"side": name, "nics": each}
            for kind, value in zip(("page_writes", "bytes"), predicted, strict=True):
                if kind in each[0]:
                    row[kind] = sum(nic[kind] for nic in each)
                    row[f"{kind}_predicted"] = int(value)
            rows.append(row)
    return rows


def _carried(before: dict[str, Any], after: dict[str, Any], *, source: bool) -> dict[str, Any]:
    """What a NIC posted, or counted, between two looks at its counters."""
    if not source:
        counted = after["units_counted"] - before["units_counted"]
        return {"name": after["name"], "page_writes": counted}
    return {
        "name": after["name"],
        "page_writes": after["units_posted"] - before["units_posted"],
        "bytes": after["bytes_posted"] - before["bytes_posted"],
    }
