"""What does not fit a model or a peer is refused from config.json alone, before any process."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import golden_cases
import numpy as np
import pytest

from jaxdisagg.cache_layout import CacheLayout
from jaxdisagg.config import CacheConfig, MeshConfig, NodeConfig, ServeConfig
from jaxdisagg.deployment import Deployment, DeploymentError
from jaxdisagg.model_fit import check_nodes, fit_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """From a serving model's name to a folder with its config.json and nothing else."""
    base = tmp_path_factory.mktemp("configs")

    def write(name: str, **changes) -> Path:
        config = {**golden_cases.MODELS[name][0], **changes}
        at = base / f"{name}-{abs(hash(json.dumps(changes, sort_keys=True)))}"
        at.mkdir(exist_ok=True)
        (at / "config.json").write_text(json.dumps(config))
        return at

    return write


def node(model: Path, role="mixed", **more) -> NodeConfig:
    mesh = MeshConfig(**{key: more.pop(key) for key in ("tp", "dp", "ep") if key in more})
    return NodeConfig(role=role, model=model, id=f"{role}-0", mesh=mesh, **more)


def pair(model: Path, prefill: dict, decode: dict) -> tuple[NodeConfig, NodeConfig]:
    return node(model, "prefill", **prefill), node(model, "decode", **decode)


def test_the_layout_is_that_of_the_config(folder):
    latent = golden_cases.MODELS["deepseek_serving"][0]
    model = folder("deepseek_serving")
    rows = latent["kv_lora_rank"] + latent["qk_rope_head_dim"]
    layers = latent["num_hidden_layers"]
    wanted = CacheLayout("mla", layers, 1, rows, page_size=8, itemsize=2, tp=4, dp=2)
    cache = CacheConfig(page_size=8)
    found = fit_model(node(model, tp=4, dp=2, dtype="bfloat16", cache=cache)).layout
    assert found == wanted
    with_mtp = fit_model(node(model, tp=4, dp=2, dtype="bfloat16", cache=cache, mtp=True)).layout
    assert with_mtp == replace(wanted, layers=layers + 1), "MTP has a layer of its own"
    dense = golden_cases.MODELS["qwen3_serving"][0]
    assert fit_model(node(folder("qwen3_serving"), tp=2)).layout == CacheLayout(
        "gqa",
        dense["num_hidden_layers"],
        dense["num_key_value_heads"],
        dense["head_dim"],
        page_size=16,
        itemsize=np.dtype(np.float32).itemsize,
        tp=2,
    )


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("qwen3_serving", {"tp": 3}, "mixed-0: tp=3 does not fit 4 KV heads"),
        ("qwen3_serving", {"tp": 2, "ep": 2}, "mixed-0: ep=2: a qwen3 model has no experts"),
        ("qwen3_serving", {"mtp": True}, "mtp: this model has no MTP module"),
        ("deepseek_serving", {"tp": 16}, "num_attention_heads"),
        ("deepseek_serving", {"tp": 3}, "num_attention_heads"),
        ("qwen3_moe_serving", {"tp": 8, "dp": 3, "ep": 24}, "num_experts"),
        ("qwen3_moe_serving", {"rules": Path("/none.toml")}, "/none.toml"),
    ],
)
def test_what_does_not_fit_its_model_is_named(folder, model, changes, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        check_nodes([node(folder(model), **changes)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ('vocab = ["dp"]', "'batch' and 'vocab' of one array both map to mesh axis 'dp'"),
        ('experts = ["rep"]', "'experts' and 'expert_ffn' of one array both map to .* 'rep'"),
    ],
)
def test_rules_that_collide_are_refused_before_start(folder, tmp_path, rule, message):
    file = tmp_path / "rules.toml"
    file.write_text(f"[rules]\n{rule}\n")
    with pytest.raises(ValueError, match=f"mixed-0: sharding rules: {message}"):
        check_nodes([node(folder("deepseek_serving"), rules=file)])


@pytest.mark.parametrize(
    ("model", "prefill", "decode"),
    [
        ("deepseek_serving", {"tp": 2}, {"tp": 1}),
        ("deepseek_serving", {"tp": 1}, {"tp": 4, "dp": 2}),
        ("deepseek_serving", {"tp": 8, "mtp": True}, {"dp": 8, "mtp": True}),
        ("qwen3_moe_serving", {"tp": 2, "ep": 2}, {"tp": 2, "dp": 2, "ep": 4}),
        ("qwen3_serving", {"tp": 8}, {"tp": 8}),
        ("qwen3_serving", {"tp": 2}, {"tp": 1, "dp": 4}),
        ("qwen3_serving", {}, {"tp": 4, "cache": CacheConfig(page_size=24)}),
        ("qwen3_moe_serving", {"tp": 2}, {"tp": 8}),
    ],
)
def test_nodes_that_fit_are_let_through(folder, model, prefill, decode):
    check_nodes(pair(folder(model), prefill, decode))


def test_every_prefill_node_is_compared_with_every_decode_node(folder):
    prefill, decode = pair(folder("qwen3_serving"), {"tp": 2}, {"tp": 2})
    odd = replace(prefill, id="prefill-1", model=folder("qwen3_serving", num_hidden_layers=7))
    with pytest.raises(ValueError, match="prefill-1 and decode-0: layers: 7"):
        check_nodes([prefill, decode, odd])


def test_nodes_of_other_models_are_refused_by_what_differs(folder):
    prefill, decode = pair(folder("qwen3_serving"), {}, {})
    other = replace(decode, model=folder("qwen3_serving", num_hidden_layers=7))
    with pytest.raises(ValueError, match="layers: 3 on the prefill node, 7 on the decode node"):
        check_nodes([prefill, other])
    odd = replace(decode, cache=CacheConfig(page_size=4099))
    with pytest.raises(ValueError, match=r"prefill-0 and decode-0: page_size: 16 on the .*, 4099"):
        check_nodes([prefill, odd])
    other = replace(decode, model=folder("deepseek_serving"))
    with pytest.raises(ValueError, match="kind: gqa on the prefill node, mla on the decode node"):
        check_nodes([prefill, other])


def test_a_deployment_is_refused_before_any_process(folder, monkeypatch):
    def popen(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", popen)
    prefill, decode = pair(folder("qwen3_serving"), {}, {})
    nodes = prefill, replace(decode, model=folder("qwen3_serving", num_hidden_layers=7))
    with pytest.raises(DeploymentError, match="layers: 3 on the prefill node"):
        Deployment(ServeConfig(nodes=nodes, port=0)).start()
    nowhere = node(Path("/nowhere"))
    with pytest.raises(DeploymentError, match="mixed-0: model folder not found: /nowhere"):
        Deployment(ServeConfig(nodes=(nowhere,), port=0)).start()


def test_the_check_starts_no_device(folder):
    """It runs in the process that only starts others: XLA's threads would idle there."""
    script = (
        "import sys, threading, os; from pathlib import Path;"
        "from jaxdisagg.config import *; from jaxdisagg.model_fit import check_nodes;"
        "before = len(os.listdir('/proc/self/task'));"
        "model = Path(sys.argv[1]);"
        "check_nodes([NodeConfig(role='mixed', model=model, mesh=MeshConfig(tp=8, dp=64))]);"
        "print(len(os.listdir('/proc/self/task')) - before)"
    )
    model = str(folder("deepseek_serving"))
    done = subprocess.run(
        [sys.executable, "-c", script, model], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "0"
