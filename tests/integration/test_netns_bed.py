"""The test bed of network namespaces: run where it may run, refused with a reason elsewhere.

The kernel's counters at the links say what really went through each NIC. Rates are not asserted:
they are the machine's.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from repository import REPOSITORY

from jaxdisagg.bench import netns
from jaxdisagg.bench.netns import Bed, BedUnavailable
from jaxdisagg.bench.netns_bars import add_speed_ups, missed_bars
from jaxdisagg.bench.netns_nodes import Answer, Split

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
        # Headers and the provider's own are some percent; acknowledgements go the other way.
        assert sent < frame_bytes < 1.1 * sent


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
        "--max-tokens", 8, "--json", file,
    )  # fmt: skip
    document = json.loads(file.read_text())
    assert document["environment"]["rate_mbit"] == 1000
    transfer, split = document["rows"]
    check_transfer_row(transfer)
    assert transfer["line_gbps"] == pytest.approx(0.25)
    assert transfer["payload_line_gbps"] == pytest.approx(0.25 * 1448 / 1514)
    check_split_row(split)
    assert split["tokens"] == 24


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


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_however_it_ends(end):
    links = set(os.listdir("/sys/class/net"))
    process = subprocess.Popen(
        command("--nics", 2, "--megabytes", 64, "--rounds", 1000, "--no-nodes"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60.0
        while len(processes_of(process.pid)) < 2:  # the receiving side is there: so is the bed
            if process.poll() is not None:
                said = process.communicate()[0]
                assert process.returncode == UNAVAILABLE, said
                pytest.skip(said.strip())
            assert time.monotonic() < deadline, "no receiving process"
            time.sleep(0.05)
        receivers = [pid for pid in processes_of(process.pid) if pid != process.pid]
        process.send_signal(end)
        said = process.communicate(timeout=60.0)[0]
        while processes_of(process.pid):
            assert time.monotonic() < deadline + 60.0, f"still there: {receivers}"
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
        (("--json", "/nonexistent/rows.json"), "json: no folder /nonexistent"),
    ],
)
def test_bad_options_are_answered_in_a_line(arguments, message):
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stdout


@pytest.mark.parametrize(
    ("field", "value"), [("left", 0), ("right", 17), ("rate_mbit", -1), ("mtu", 100)]
)
def test_numbers_that_no_bed_has_are_refused_by_name(field, value):
    values = {"left": 1, "right": 1, "rate_mbit": 1000, "mtu": 1500} | {field: value}
    with pytest.raises(ValueError, match=f"{field}={value} must be in"):
        Bed(**values)


# ---- the bars ------------------------------------------------------------------------------------


def row_of(nics, gbps, *, peer_nics=None, page_bytes=PAGE):
    return {
        "nics": nics,
        "peer_nics": peer_nics or nics,
        "page_bytes": page_bytes,
        "gbps": gbps,
        "of_line": gbps / (nics * 0.125),
    }


def test_bars_are_missed_below_them_alone():
    rows = [row_of(1, 0.1126), row_of(2, 0.2027), row_of(4, 0.3829)]
    add_speed_ups(rows)
    assert [row["speed_up"] for row in rows] == pytest.approx([1.0, 1.8002, 3.4005], abs=1e-4)
    assert missed_bars(rows) == []
    rows = [row_of(1, 0.1124), row_of(2, 0.2020), row_of(4, 0.3820)]
    add_speed_ups(rows)
    one, two, four = missed_bars(rows)
    assert one.startswith("1 NIC: 89.9% of the line rate")
    assert two.startswith("2 NICs: 1.80 times one, below 1.8")
    assert four.startswith("4 NICs: 3.40 times one, below 3.4")


def test_bars_are_those_of_one_page_size_and_equal_numbers():
    rows = [row_of(1, 0.05, page_bytes=4096), row_of(2, 0.12, peer_nics=4), row_of(2, 0.15)]
    add_speed_ups(rows)
    assert [row["speed_up"] for row in rows] == [1.0, None, None]
    assert missed_bars(rows) == []


# ---- what a split deployment must show -----------------------------------------------------------

ANSWERS = (Answer(("a", "b"), (-0.5, -0.25), 6), Answer(("c",), (-1.0,), 4))
SPLIT = Split(ANSWERS, 10, 10, (500, 500), (600, 540), (5, 5))


def test_a_split_that_adds_up_has_no_problem():
    assert SPLIT.problem(ANSWERS) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"answers": (ANSWERS[0], Answer(("d",), (-1.0,), 4))}, r"answer 1: \('d',\) apart"),
        ({"answers": (ANSWERS[0], Answer(("c",), (-1.0,), 3))}, r"page-writes: .*\(10, 10, 10\)"),
        ({"pushed": 11}, r"page-writes: .*\(11, 10, 10\)"),
        ({"counted": 9}, r"page-writes: .*\(10, 9, 10\)"),
        ({"received_units": (5, 4)}, r"page-writes: .*\(10, 10, 9\)"),
        ({"frame_bytes": (1100, 40)}, "nic1 has sent 40 bytes, the engine says 500"),
    ],
)
def test_a_split_that_does_not_add_up_is_told(change, words):
    problem = replace(SPLIT, **change).problem(ANSWERS)
    assert problem is not None
    assert re.search(words, problem)
