"""scripts/mesh_sweep.py --run: what both engines count is what the plan predicts, exactly."""

import json
from pathlib import Path

import pytest
from mesh_sweeping import sweep


def ran(capsys, tmp_path: Path, expected: int = 0, **options) -> list[dict]:
    file = tmp_path / "ran.json"
    sweep(capsys, expected, run=True, json=file, **options)
    return json.loads(file.read_text())["rows"]


def check(row: dict, page_writes: int, bytes_moved: int) -> None:
    """Figures worked by hand, of one request, against a row's measured and predicted ones."""
    assert (row["page_writes"], row["bytes"]) == (page_writes, bytes_moved)
    found, n = row["measured"], row["measured"]["requests"]
    for kind in ("posted", "acknowledged", "counted"):
        assert found[f"page_writes_{kind}"] == n * page_writes
    for kind in ("posted", "acknowledged"):
        assert found[f"bytes_{kind}"] == n * bytes_moved
    for name, value in (("page_writes", page_writes), ("bytes", bytes_moved)):
        assert sum(f[name] for f in found["nics"] if f["side"] == "prefill") == n * value
    counted = (f["page_writes"] for f in found["nics"] if f["side"] == "decode")
    assert sum(counted) == n * page_writes
    assert found["ttft_ms"] > 0


def test_pairs_of_a_latent_model_move_what_is_predicted(capsys, tmp_path, golden_folder):
    # 4 layers of a latent of 48 in f32: a page of 16 is 3,072 bytes; 39 tokens are three pages.
    folder = golden_folder("deepseek_serving")
    config = json.loads((folder / "config.json").read_text())
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    page = 16 * (config["kv_lora_rank"] + config["qk_rope_head_dim"]) * 4
    options = {"config": str(folder), "dtype": "float32", "tokens": [40], "requests": 2}
    rows = ran(capsys, tmp_path, prefill=["tp=2"], decode=["tp=1", "tp=2,dp=2"], **options)
    for row, ranks in zip(rows, (1, 2), strict=True):
        check(row, ranks * (3 * layers + 1), ranks * (3 * layers * page + hidden * 4))


def test_pairs_of_a_head_sharded_model_move_what_is_predicted(capsys, tmp_path, golden_folder):
    folder = golden_folder("qwen3_moe_serving")
    config = json.loads((folder / "config.json").read_text())
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    heads, token = config["num_key_value_heads"], 2 * config["head_dim"] * 4
    assert heads == 4
    options = {"config": str(folder), "dtype": "float32", "tokens": [40], "requests": 2}
    nics = [f"127.0.0.{n}" for n in (3, 4, 5, 6)]
    decode = ["tp=1", f"tp=4,page_size=24,nics={'+'.join(nics)}"]
    rows = ran(
        capsys, tmp_path, prefill=["tp=2,nics=127.0.0.1+127.0.0.2"], decode=decode, **options
    )
    whole = layers * heads * 48 * token  # three pages of 16, the last partly filled
    check(rows[0], 2 * 3 * layers + 1, whole + hidden * 4)  # parts of two ranks
    # Tokens are cut at 16, 24 and 32 of 48: four spans of a head each, K and V apart.
    check(rows[1], heads * 4 * 2 * layers + 4, whole + 4 * hidden * 4)
    found = [f for f in rows[1]["measured"]["nics"] if f["side"] == "decode"]
    one = 2 * (4 * 2 * layers + 1)  # each rank, and its NIC, gets one head, in two requests
    assert [f["nics"] for f in found] == [[{"name": nic, "page_writes": one}] for nic in nics]


def test_another_count_than_predicted_ends_with_1(capsys, tmp_path, monkeypatch, serving_folder):
    from jaxdisagg.sweep import execute
    from jaxdisagg.transfer_plan import Traffic

    honest = execute.request_traffic

    def one_more(*args, **more) -> Traffic:
        moved = honest(*args, **more)
        return Traffic(moved.units + 1, moved.bytes)

    monkeypatch.setattr(execute, "request_traffic", one_more)
    options = {"config": str(serving_folder), "tokens": [20], "requests": 1}
    (row,) = ran(capsys, tmp_path, 1, prefill=["tp=1"], decode=["tp=1"], **options)
    found = row["measured"]
    assert found["page_writes_counted"] == found["predicted"]["page_writes"] - 1


def test_nodes_that_cannot_run_have_a_line_and_end_with_1(capsys, serving_folder):
    meshes = {"prefill": ["tp=4,dp=2"], "decode": ["tp=1", "tp=2,processes=2"]}
    text = sweep(capsys, 1, config=str(serving_folder), run=True, tokens=[20], **meshes)
    assert "tp=4,dp=2 -> tp=1: tp=1: needs devices 8..8, 8 are there" in text
    assert "processes=2, a run keeps each node in one process" in text


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepseek_serving", "qwen3_moe_serving"])
def test_all_pairs_agree(capsys, tmp_path, golden_folder, model):
    meshes = ["tp=1", "tp=4", "tp=2,dp=2", "tp=2,page_size=24"]
    rows = ran(
        capsys, tmp_path, config=str(golden_folder(model)), prefill=meshes, decode=meshes,
        tokens=[2, 17, 100], requests=2,
    )  # fmt: skip
    assert len(rows) == 3 * len(meshes) ** 2
    assert all("measured" in row for row in rows)
