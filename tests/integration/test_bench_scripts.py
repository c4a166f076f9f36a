"""The benchmarks run, and write the rows that docs/performance.md promises."""

import json
import os
import subprocess
import sys

import pytest
from repository import REPOSITORY


def run(name, *arguments):
    # As from a user's shell: the script itself says how many devices there are.
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts" / name), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        check=False,
    )


def test_bench_step_has_a_row_for_each_mesh_step_and_length(serving_folder, tmp_path):
    file = tmp_path / "rows.json"
    done = run(
        "bench_step.py", "--model", str(serving_folder), "--mesh", "tp=1", "--mesh", "tp=2,dp=2",
        "--chunks", "16", "--batch", "2", "--lengths", "0,32", "--repeats", "3",
        "--json", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(file.read_text())
    assert {"cpu", "cores", "jax", "jaxlib", "python"} <= set(document["environment"])
    seen = {(r["mesh"], r["step"], r["context"]) for r in document["rows"]}
    assert seen == {
        (mesh, step, context)
        for mesh in ("tp=1,dp=1", "tp=2,dp=2")
        for step in ("prefill", "decode")
        for context in (0, 32)
    }
    for row in document["rows"]:
        assert row["ms_trigger_off"] > 0
        assert row["tokens_per_s"] > 0
        if row["step"] == "prefill":
            assert {"ms_trigger_on", "on_off_ratio", "trigger_call_ns", "trigger_share"} <= set(row)
            assert row["trigger_call_ns"] >= 0


def test_bench_step_times_decode_with_drafts_beside_decode_without(golden_folder, tmp_path):
    file = tmp_path / "rows.json"
    done = run(
        "bench_step.py", "--model", str(golden_folder("deepseek_serving")), "--chunks", "16",
        "--batch", "2", "--lengths", "0", "--repeats", "2", "--mtp", "--json", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    prefill, decode = json.loads(file.read_text())["rows"]
    assert "ms_drafts" not in prefill
    ratio = decode["ms_drafts"] / decode["ms_trigger_off"]
    assert decode["drafts_ratio"] == pytest.approx(ratio)
    assert decode["break_even_acceptance"] == pytest.approx(ratio - 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mesh", "tp=3"), "tp=3 does not fit 4 KV heads"),
        (("--mesh", "pp=3"), "'pp=3': expected tp="),
        (("--chunks", "many"), "chunks='many'"),
        (("--rules", "/nonexistent.toml"), "no such file"),
        (("--mtp",), "mtp: this model has no MTP module"),
    ],
)
def test_bench_step_answers_bad_input_in_a_line(serving_folder, arguments, message):
    done = run("bench_step.py", "--model", str(serving_folder), *arguments)
    assert done.returncode == 2
    assert message in " ".join(done.stdout.split())
    assert "Traceback" not in done.stdout + done.stderr


def test_bench_experts_has_a_row_for_each_dtype_and_size(tmp_path):
    file = tmp_path / "rows.json"
    done = run(
        "bench_experts.py", "--tokens", "2,8", "--experts", "4", "--choices", "2", "--hidden", "16",
        "--ffn", "8", "--repeats", "1", "--json", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())["rows"]
    sizes = [(row["dtype"], row["tokens"]) for row in rows]
    assert sizes == [(dtype, n) for dtype in ("float32", "bfloat16") for n in (2, 8)]
    for row in rows:
        assert row["experts_read"] <= 4
        assert min(row[f"ms_{way}"] for way in ("blocked", "dense", "read", "all", "ragged")) > 0


def test_bench_experts_answers_bad_input_in_a_line():
    done = run("bench_experts.py", "--experts", "4", "--choices", "5")
    assert done.returncode == 2
    assert "choices=5 must not exceed experts=4" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_bench_experts_says_in_a_line_that_no_back_end_starts(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "abacus")
    done = run("bench_experts.py")
    assert done.returncode == 2
    assert "error: jax finds no devices: " in done.stdout
    assert "abacus" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
