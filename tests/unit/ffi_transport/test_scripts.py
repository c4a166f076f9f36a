"""The example and the transfer benchmark run, end to end."""

import json
import subprocess
import sys
from pathlib import Path

from repository import REPOSITORY


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts" / script), *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_example_moves_pages():
    done = run("example_transfer.py")
    assert done.returncode == 0, done.stderr
    assert "64 pages, 1048576 bytes, all equal" in done.stdout


def test_benchmark_writes_rows(tmp_path: Path):
    file = tmp_path / "rows.json"
    done = run(
        "bench_transfer.py", "--pages", "4,64", "--megabytes", "8", "--buffer", "4",
        "--rounds", "2", "--json", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert document["environment"]["cores"] >= 1
    assert [row["page_bytes"] for row in document["rows"]] == [4096, 65536]
    for row in document["rows"]:
        assert row["provider"] in ("tcp", "net", "tcp;ofi_rxm")
        assert row["rounds"] == 2
        assert row["bytes"] == 8 << 20
        for key in ("gbps", "writes_per_s", "raw_tcp_gbps", "memcpy_gbps", "ratio"):
            assert row[key] > 0


def test_benchmark_says_what_is_wrong():
    for arguments, words in (
        (("--provider", "bogus"), "provider: 'bogus' is none of"),
        (("--provider", "efa"), "offers no provider 'efa'"),
        (("--pages", "big"), "no numbers of KiB"),
        (("--pages", "4096"), "1 to 1024 KiB"),
    ):
        done = run("bench_transfer.py", *arguments)
        assert done.returncode == 2
        assert words in " ".join((done.stdout + done.stderr).split())
        assert "Traceback" not in done.stderr
