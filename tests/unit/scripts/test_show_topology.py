"""The topology script on other machines' trees, on this machine, and on what is no tree."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from repository import REPOSITORY
from show_topology import main
from sysfs_tree import connectx_8, no_nic, p5_like
from typer import Typer
from typer.testing import CliRunner, Result


def run(*arguments: str, columns: int = 160) -> Result:
    app = Typer()
    app.command()(main)
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, list(arguments))


def test_tables_of_p5(tmp_path):
    shown = run("--root", str(p5_like(tmp_path).root))
    assert shown.exit_code == 0, shown.output
    rows = [" ".join(line.split()) for line in shown.output.splitlines()]
    assert "1 48-95,144-191 32 10" in rows
    assert "rdmap82s0 efa 0000:52:00.0 0 100 rdmap82s0-rdm works 0000:53:00.0" in rows
    assert "ens32 ip 0000:20:05.0 0 100 ens32 works -" in rows
    assert (
        "0000:ca:00.0 1 rdmap198s0 rdmap199s0 rdmap200s0 rdmap201s0 4 by PCIe switch 48-95,144-191"
    ) in rows
    assert "32 efa NICs by topology" in shown.output


@pytest.mark.parametrize("make", [p5_like, connectx_8, no_nic])
def test_the_tables_of_the_documentation(tmp_path, make):
    """Each is printed so, line by line; lines may have been left out."""
    text = (REPOSITORY / "docs/topology.md").read_text()
    _, _, rest = text.partition(f"show_topology.py --root {make.__name__}\n")
    lines = rest.partition("```")[0].splitlines()
    assert len(lines) > 10
    shown = run("--root", str(make(tmp_path).root), columns=110).output
    printed = [line.rstrip() for line in shown.splitlines()]
    for line in lines:
        assert line in printed or line.strip() == "...", line


def test_json_of_some_devices_with_named_nics(tmp_path):
    file = tmp_path / "out.json"
    shown = run(
        "--root", str(connectx_8(tmp_path / "sys").root), "--devices", "18:00.0,0000:58:00.0",
        "--nics", "mlx5_1+mlx5_7+mlx5_6", "--json", str(file),
    )  # fmt: skip
    assert (shown.exit_code, shown.output) == (0, "")
    document = json.loads(file.read_text())
    assert [(d["device"], d["nics"]) for d in document["devices"]] == [
        ("0000:18:00.0", ["mlx5_1"]),
        ("0000:58:00.0", ["mlx5_7", "mlx5_6"]),
    ]
    assert [way["domains"] for way in document["engine"]] == [["mlx5_1", "mlx5_7", "mlx5_6"]]
    assert document["nics"][0]["pci"]["address"] == "0000:1a:00.0"
    assert document["nics"][0]["domain"] == "mlx5_0"


def test_problems_are_shown(tmp_path):
    tree = connectx_8(tmp_path)
    tree.write("devices/system/node/node1/cpulist", "[all]")
    shown = run("--root", str(tree.root))
    assert shown.exit_code == 0
    assert "not understood: devices/system/node/node1/cpulist: '[all]' is no list" in shown.output


def test_this_machine_as_people_call_it():
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts/show_topology.py"), "--json", "-"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert "lo" in [nic["name"] for nic in document["nics"]]
    assert len(document["devices"]) >= 1
    assert document["engine"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--root", "/nowhere"), "root: /nowhere is no folder"),
        (("--root", "{tree}/bus"), "is no sysfs tree"),
        (("--root", "{tree}", "--provider", "loopback"), "provider: 'loopback' is none of auto"),
        (("--root", "{tree}", "--devices", "0"), "devices: 0 is not a number from 1 to"),
        (("--root", "{tree}", "--devices", "4097"), "devices: 4097 is not a number from 1 to"),
        (("--root", "{tree}", "--devices", "gpu"), "devices: 'gpu' is no PCI address"),
        (("--root", "{tree}", "--nics", "mlx5_0+mlx5_9"), "nics: "),
        (("--root", "{tree}", "--nics", "mlx5_0+mlx5_0"), "nics: 'mlx5_0' is named twice"),
        (("--root", "{tree}", "--json", "/nowhere/x"), "No such file or directory"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, arguments, words):
    tree = str(connectx_8(tmp_path).root)
    shown = run(*(argument.format(tree=tree) for argument in arguments))
    assert shown.exit_code == 2
    assert words in " ".join(shown.output.split())
    assert "Traceback" not in shown.output
