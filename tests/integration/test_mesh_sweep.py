"""scripts/mesh_sweep.py end to end: estimates of the big models, and what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mesh_sweeping import sweep
from repository import REPOSITORY

SCRIPT = REPOSITORY / "scripts" / "mesh_sweep.py"


def run(*arguments: str, columns: int = 100) -> subprocess.CompletedProcess[str]:
    # As from a user's shell: the script itself says how many devices there are.
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment | {"COLUMNS": str(columns)},
        check=False,
    )


def test_the_big_models_have_sane_tables(tmp_path: Path):
    meshes = ("--prefill", "tp=8", "--decode", "tp=8", "--decode", "tp=4,dp=2")
    file, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    done = run("--config", "qwen3-coder-480b", *meshes, "--json", str(file), "--png", str(picture))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 KV heads of 128, bfloat16: 253,952 cache bytes" in " ".join(done.stdout.split())
    assert "rebuilt: a decode rank's page comes in parts from 2 prefill ranks" in done.stdout
    assert "…" not in done.stdout
    document = json.loads(file.read_text())
    environment = document["environment"]
    assert {"cpu", "cores", "jax", "jaxlib", "python"} <= set(environment)
    assert environment["model"] == "qwen3-coder-480b"
    assert environment["device"] == {"tflops": 989.0, "mfu": 0.4}
    rows = document["rows"]
    assert [(r["prefill"], r["decode"], r["tokens"]) for r in rows] == [
        ("tp=8", "tp=8", 4096),
        ("tp=8", "tp=4,dp=2", 4096),
    ]
    for row in rows:
        for key, value in row.items():
            if isinstance(value, int) and not isinstance(value, bool):
                assert f"{value:,}" in done.stdout or key.endswith("nic_bytes"), key
    head = picture.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(head[at : at + 4]) for at in (16, 20))
    assert (width, height) > (1000, 300)
    done = run("--config", "deepseek-r1", *meshes, columns=80)
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert "each of 8 decode ranks gets a copy of every latent page" in said
    assert "4 of 8 prefill ranks send it, chosen by the seed" in said
    assert "…" not in done.stdout


def test_help_needs_no_jax():
    code = (
        "import sys; sys.argv = ['mesh_sweep.py', '--help']\n"
        f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "import runpy\n"
        "try:\n"
        f"    runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "except SystemExit: pass\n"
        "sys.exit('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert b"--nic-gbps" in done.stdout


def test_what_does_not_fit_has_a_line_and_the_rest_its_rows(capsys, tmp_path: Path):
    file = tmp_path / "rows.json"
    text = sweep(
        capsys, config="qwen3-30b", prefill=["tp=4", "tp=3"], decode=["tp=2", "pp=2"], json=file
    )
    assert "tp=4 -> tp=2: GQA: a page's" not in text
    assert "tp=4 -> tp=2: GQA: rebuilt" in text
    assert "tp=4 -> pp=2: decode: 'pp=2': expected tp=" in text
    assert "tp=3 -> tp=2: prefill: tp=3 does not fit 4 KV heads" in text
    assert "tp=3 -> pp=2: prefill: tp=3 does not fit 4 KV heads" in text
    assert ["error" in row for row in json.loads(file.read_text())["rows"]] == [0, 1, 1, 1]
    text = sweep(capsys, 2, config="qwen3-30b", prefill=["tp=3"], decode=["tp=2"])
    assert "error: tp=3 -> tp=2: prefill: tp=3" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": "gpt-5"}, "config: 'gpt-5' is no file"),
        ({"decode": []}, "decode: name at least one mesh"),
        ({"tokens": [1]}, "tokens: 1, must be 2 to 8192"),
        ({"dtype": "int8"}, "dtype: 'int8' is not one of"),
        ({"page_size": 0}, "page_size=0 must be at least 1"),
        ({"nics_per_device": "1,2,3"}, "nics-per-device='1,2,3'"),
        ({"nics_per_device": "none"}, "nics-per-device='none'"),
        ({"nics_per_device": "0"}, "nics_per_device"),
        ({"nic_gbps": [0.0]}, "nic_gbps"),
        ({"tflops": 0.0}, "tflops: 0.0"),
        ({"mfu": 1.5}, "mfu: 1.5"),
        ({"chunk": -1}, "chunk: -1"),
        ({"seeds": 0}, "seeds: 0"),
        ({"requests": 0, "run": True}, "requests: 0"),
        ({"run": True}, "--run: smollm2-135m has no weights"),
        ({"mtp": True}, "mtp: this model has no MTP module"),
        ({"rules": Path("/none.toml")}, "no such file: /none.toml"),
        ({"json": Path("/none/rows.json")}, "--json: no folder /none"),
        ({"json": Path("/")}, "--json: / is a folder"),
        ({"png": Path("/none/rows.png")}, "--png: no folder /none"),
        ({"png": Path("rows.svg")}, "--png: rows.svg must end in .png"),
    ],
)
def test_bad_input_is_a_line_that_names_the_field(capsys, options, message):
    options = {"config": "smollm2-135m", "prefill": ["tp=1"], "decode": ["tp=3"]} | options
    assert message in sweep(capsys, 2, **options)


def test_a_plot_without_matplotlib_says_what_to_install(capsys, monkeypatch, tmp_path: Path):
    monkeypatch.setattr("jaxdisagg.sweep.plot.find_spec", lambda name: None)
    options = {"config": "smollm2-135m", "prefill": ["tp=1"], "decode": ["tp=3"]}
    text = sweep(capsys, 2, png=tmp_path / "rows.png", **options)
    assert "--png: matplotlib is missing; pip install 'jaxdisagg[plot]'" in text
