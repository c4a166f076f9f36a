"""The test bed of network namespaces: run where it may run, refused with a reason elsewhere.

The kernel's counters at the links say what really went through each NIC. Rates are not asserted:
they are the machine's.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from repository import REPOSITORY

from jaxdisagg.bench import netns
from jaxdisagg.bench.netns import Bed, BedUnavailable

SCRIPT = REPOSITORY / "scripts" / "netns_bed.py"
UNAVAILABLE = 77
PAGE = 64 << 10


def command(*arguments):
    return [sys.executable, str(SCRIPT), *map(str, arguments)]


def run(*arguments, **environment):
    done = subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"COLUMNS": "200"} | environment,
        check=False,
    )
    assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    return done


def run_or_skip(*arguments):
    """The rows of a run; skips where the machine makes no bed."""
    done = run(*arguments)
    if done.returncode == UNAVAILABLE:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def check_transfer_row(row):
    """Every page went through the NICs as they should share it, says the kernel as well."""
    frames, moved = row["nic_frame_bytes"], row["nic_bytes"]
    assert len(moved) == row["nics"]
    assert len(row["peer_nic_pages"]) == row["peer_nics"]
    assert max(moved) - min(moved) <= PAGE
    assert max(row["peer_nic_pages"]) - min(row["peer_nic_pages"]) <= 1
    assert sum(row["peer_nic_pages"]) * PAGE == sum(moved)
    for sent, frame_bytes in zip(moved, frames, strict=True):
        # Headers and the provider's own are some percent; acknowledgements go the other way. The
        # rest is for what TCP sends again where it was kept waiting; another NIC's share is as much
        # as this one's.
        assert sent < frame_bytes < 1.5 * sent


def check_split_row(row):
    assert row["pushed"] == row["counted"] == sum(row["received_units"]) > 0
    assert len(row["posted_bytes"]) == row["nics"]
    assert len(row["received_units"]) == row["peer_nics"]
    assert min(row["posted_bytes"]) > 0
    assert min(row["received_units"]) > 0


def test_pages_and_answers_cross_a_bed(serving_folder, tmp_path):
    file = tmp_path / "rows.json"
    run_or_skip(
        "--nics", "2:4", "--megabytes", 4, "--rounds", 1, "--model", serving_folder,
        "--prefill", "tp=2", "--max-tokens", 8, "--json", file,
    )  # fmt: skip
    document = json.loads(file.read_text())
    assert document["environment"]["rate_mbit"] == 1000
    transfer, split = document["rows"]
    check_transfer_row(transfer)
    assert transfer["line_gbps"] == pytest.approx(0.25)
    assert transfer["payload_line_gbps"] == pytest.approx(0.25 * 1448 / 1514)
    check_split_row(split)
    assert split["tokens"] == 24


def test_a_user_makes_a_bed_in_a_namespace_of_its_own():
    """Without the rights that root has, though as root: other users may not read this folder."""
    drop = ["setpriv", "--bounding-set", "-sys_admin,-net_admin"]
    if shutil.which("setpriv") is None or os.getuid() != 0:
        pytest.skip("only root can drop rights, with setpriv")
    done = subprocess.run(
        [*drop, *command("--nics", "2:1", "--megabytes", 4, "--rounds", 1, "--no-nodes")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode == UNAVAILABLE:
        assert "no permission" in done.stdout
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_pages_and_answers_cross_every_bed(serving_folder, tmp_path):
    file = tmp_path / "rows.json"
    run_or_skip("--megabytes", 16, "--rounds", 2, "--model", serving_folder, "--json", file)
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 10
    for row in rows[:5]:
        check_transfer_row(row)
    for row in rows[5:]:
        check_split_row(row)


@pytest.mark.slow
def test_nodes_of_two_processes_share_the_nics_of_a_bed(serving_folder, tmp_path):
    file = tmp_path / "rows.json"
    run_or_skip(
        "--nics", 2, "--no-transfer", "--model", serving_folder, "--json", file,
        "--prefill", "tp=2,processes=2", "--decode", "tp=2,processes=2",
    )  # fmt: skip
    (row,) = json.loads(file.read_text())["rows"]
    check_split_row(row)


def processes_of(session):
    """The processes of a session, of those that are there and no zombies."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            state, _, _, its_session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(its_session) == session and state != "Z":
            found.append(int(folder.name))
    return found


@pytest.mark.parametrize(
    ("end", "arguments"),
    [
        (signal.SIGINT, ("--no-nodes", "--rounds", 1000)),
        (signal.SIGTERM, ("--no-nodes", "--rounds", 1000)),
        (signal.SIGKILL, ("--no-nodes", "--rounds", 1000)),
        pytest.param(signal.SIGKILL, ("--no-transfer",), marks=pytest.mark.slow),
    ],
)
def test_nothing_is_left_however_it_ends(serving_folder, end, arguments):
    links = set(os.listdir("/sys/class/net"))
    process = subprocess.Popen(
        command("--nics", 2, "--model", serving_folder, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60.0
        while len(processes_of(process.pid)) < 2:  # another one is there: so is the bed
            if process.poll() is not None:
                said = process.communicate()[0]
                assert process.returncode == UNAVAILABLE, said
                pytest.skip(said.strip())
            assert time.monotonic() < deadline, "no receiving process"
            time.sleep(0.05)
        process.send_signal(end)
        said = process.communicate(timeout=60.0)[0]
        while processes_of(process.pid):
            assert time.monotonic() < deadline + 60.0, f"still there: {processes_of(process.pid)}"
            time.sleep(0.05)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == (-end if end == signal.SIGKILL else 130)
    assert "Traceback" not in said
    assert set(os.listdir("/sys/class/net")) == links


# ---- where it cannot run -------------------------------------------------------------------------


def test_missing_tools_are_named(tmp_path):
    done = run(PATH=str(tmp_path))
    assert done.returncode == UNAVAILABLE
    assert done.stdout.strip() == "skipped: no `ip` on PATH (package iproute2)"


@pytest.mark.parametrize(
    ("tool", "words"), [("ip", "cannot make a veth pair"), ("tc", "cannot make a token bucket")]
)
def test_what_the_kernel_lacks_is_named(tmp_path, tool, words):
    fakes = {"ip": "exit 0", "tc": "exit 0"} | {tool: "echo Error: kind is unknown. >&2; exit 2"}
    for name, body in fakes.items():
        (tmp_path / name).write_text(f"#!/bin/sh\ncat >/dev/null\n{body}\n")
        (tmp_path / name).chmod(0o755)
    done = run(PATH=f"{tmp_path}:/usr/bin:/bin")
    assert done.returncode == UNAVAILABLE
    assert words in done.stdout or "no permission" in done.stdout
    assert "kind is unknown" in done.stdout or "no permission" in done.stdout


@pytest.fixture
def tools(monkeypatch):
    """As if `ip` and `tc` were there."""
    monkeypatch.setattr(netns.shutil, "which", lambda tool: f"/sbin/{tool}")


@pytest.mark.parametrize("root", [True, False])
def test_missing_permission_is_named(monkeypatch, tools, root):
    def refuse(flags):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(netns.os, "unshare", refuse)
    monkeypatch.setattr(netns, "_may_make_networks", lambda: root)
    with pytest.raises(BedUnavailable, match=r"no permission .*CAP_NET_ADMIN.*not permitted"):
        Bed(1, 1, rate_mbit=1000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--nics", "one"), "nics='one': expected numbers or pairs"),
        (("--nics", "1:2:3"), "nics='1:2:3': expected numbers or pairs"),
        (("--pages", "64,many"), "pages='64,many'"),
        (("--pages", "2048"), "1 to 1024 KiB"),
        (("--model", "/nonexistent"), "model: no config.json in /nonexistent"),
        (("--rate", "10"), "megabytes=64: 54 s at 10 Mbit/s, at most 30"),
        (("--check", "--nics", "2"), "check: there are bars for 64 KiB pages"),
        (("--json", "/nonexistent/rows.json"), "json: no folder /nonexistent"),
        (("--json", "/"), "json: / is a folder"),
    ],
)
def test_bad_options_are_answered_in_a_line(arguments, message):
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stdout


def test_an_unknown_congestion_control_is_refused_by_name():
    done = run("--congestion", "bogus", "--no-nodes")
    if done.returncode == UNAVAILABLE:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 2
    assert "congestion='bogus': " in done.stdout
    assert "this kernel has " in done.stdout


@pytest.mark.parametrize(
    ("field", "value"), [("left", 0), ("right", 17), ("rate_mbit", 0), ("mtu", 100)]
)
def test_numbers_that_no_bed_has_are_refused_by_name(field, value):
    values = {"left": 1, "right": 1, "rate_mbit": 1000, "mtu": 1500} | {field: value}
    with pytest.raises(ValueError, match=f"{field}={value} must be in"):
        Bed(**values)
