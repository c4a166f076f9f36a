"""What is known of NICs while pairs run: which share devices, what they must carry, who agrees."""

from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from repository import REPOSITORY

from jaxdisagg.config import NodeConfig
from jaxdisagg.sweep import domains
from jaxdisagg.sweep.domains import device_loads, nic_groups, nic_rows
from jaxdisagg.sweep.execute import agrees
from jaxdisagg.sweep.predict import Side, fit_side
from jaxdisagg.sweep.shapes import find_config, read_shapes

BASE = NodeConfig(role="prefill", model=Path("none"))


def side(mesh: str, name: str = "deepseek-r1") -> Side:
    shapes = read_shapes(find_config(name, REPOSITORY / "scripts" / "model_configs"))
    return fit_side(mesh, BASE, shapes)


def engine(*counters: dict[str, Any]) -> Any:
    return SimpleNamespace(domain_counters=lambda: list(counters))


def nic(name: str, **numbers: int) -> dict[str, Any]:
    zeros = {"units_posted": 0, "bytes_posted": 0, "units_counted": 0}
    return {"name": name} | zeros | numbers


def shares(monkeypatch: pytest.MonkeyPatch, *of_devices: tuple[int, ...] | None) -> list[Any]:
    monkeypatch.setattr(domains, "device_domains", lambda *_: of_devices)
    return cast(list[Any], list(of_devices))


def test_devices_that_share_a_nic_are_one_group(monkeypatch):
    four = engine(*(nic(f"nic{i}") for i in range(4)))
    known = np.zeros((3, 2), np.int64)
    devices = shares(monkeypatch, (0,), (1,), (2,))
    assert nic_groups(four, devices, known) == [([0], [0]), ([1], [1]), ([2], [2])]
    devices = shares(monkeypatch, (0, 1), (3,), (1, 2))
    assert nic_groups(four, devices, known) == [([3], [1]), ([0, 1, 2], [0, 2])]
    devices = shares(monkeypatch, None, None, None)
    assert nic_groups(four, devices, known) == [([0, 1, 2, 3], [0, 1, 2])]
    devices = shares(monkeypatch, (0,), (1,), (2,))  # but nobody knows who sends
    assert nic_groups(four, devices, None) == [([0, 1, 2, 3], [0, 1, 2])]


def test_a_load_is_known_where_neither_rank_nor_seed_chooses():
    # 100 tokens are seven pages; a latent page is 18,432 bytes, a context 14,336.
    one = [7 * 61 + 1, 7 * 61 * 18432 + 14336]
    loads = device_loads(side("tp=2"), side("tp=2"), 100, source=True)
    assert loads is not None
    assert loads.tolist() == [one, one]
    loads = device_loads(side("tp=2"), side("tp=4"), 100, source=True)
    assert loads is not None
    assert loads.tolist() == [[2 * n for n in one]] * 2
    assert device_loads(side("tp=2"), side("tp=1"), 100, source=True) is None
    assert device_loads(side("tp=2,dp=2"), side("tp=2"), 100, source=True) is None
    loads = device_loads(side("tp=2,dp=2"), side("tp=1"), 100, source=False)
    assert loads is not None
    assert loads.tolist() == [one]
    assert device_loads(side("tp=2"), side("tp=1,dp=2"), 100, source=False) is None


def test_rows_set_counts_beside_what_the_devices_of_each_nic_must_have(monkeypatch):
    source, destination = side("tp=2"), side("tp=2")
    units, amount = 7 * 61 + 1, 7 * 61 * 18432 + 14336
    before = [nic("a", units_posted=5, bytes_posted=50, units_counted=9), nic("b")]
    sent = engine(
        nic("a", units_posted=5 + units, bytes_posted=50 + amount),
        nic("b", units_posted=units - 1, bytes_posted=amount),
    )
    got = engine(nic("a", units_counted=9 + units), nic("b", units_counted=units))
    devices = shares(monkeypatch, (0,), (1,))
    rows = nic_rows(
        (source, sent, devices, before), (destination, got, devices, before), tokens=100, requests=1
    )
    assert [(r["side"], [n["name"] for n in r["nics"]]) for r in rows] == [
        ("prefill", ["a"]), ("prefill", ["b"]), ("decode", ["a"]), ("decode", ["b"]),
    ]  # fmt: skip
    assert [r["page_writes_predicted"] for r in rows] == [units] * 4
    assert [r["page_writes"] for r in rows] == [units, units - 1, units, units]
    assert [r.get("bytes") for r in rows] == [amount, amount, None, None]


def test_every_count_must_agree():
    counts = {f"page_writes_{how}": 4 for how in ("posted", "acknowledged", "counted")}
    counts |= {f"bytes_{how}": 9 for how in ("posted", "acknowledged")}
    rows = [
        {"side": "prefill", "page_writes": 4, "page_writes_predicted": 4, "bytes": 9,
         "bytes_predicted": 9},
        {"side": "decode", "page_writes": 4, "page_writes_predicted": 4},
    ]  # fmt: skip
    good = {"predicted": {"page_writes": 4, "bytes": 9}, "nics": rows, **counts}
    assert agrees(good)
    for key in counts:
        assert not agrees(good | {key: counts[key] + 1}), key
    for i, row in enumerate(rows):
        for key in row:
            if key != "side":
                wrong = deepcopy(good)
                wrong["nics"][i][key] += 1
                assert not agrees(wrong), (i, key)
