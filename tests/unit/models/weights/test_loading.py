"""Loading safetensors: dtypes, layouts, sharding, and one list of everything that is wrong."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from golden_cases import MODELS
from random_checkpoint import write_checkpoint
from repository import load_script
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from jaxdisagg.mesh import make_mesh
from models.checkpoint import load_measured, load_params, open_checkpoint, weights_fingerprint
from models.registry import load_config
from models.sharding import DEFAULT_RULES, make_rules

CONFIG = MODELS["qwen3_untied"][0]
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 2,
    "num_key_value_heads": 8,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_nextn_predict_layers": 1,
}
WEIGHTS = "model.safetensors"
Q = "model.layers.1.self_attn.q_proj.weight"
O = "model.layers.1.self_attn.o_proj.weight"


def write(folder: Path, files: int = 1, **change) -> Path:
    write_checkpoint(folder, {**CONFIG, **change}, files=files)
    return folder


def load(folder: Path, dtype: str = "float32", tp: int = 1, rules=DEFAULT_RULES):
    _, config = load_config(folder)
    mesh = make_mesh(tp=tp, dp=1, kv_heads=config.num_kv_heads)
    return load_params(folder, dataclasses.replace(config, dtype=dtype), mesh, rules)


def test_values_and_layout(tmp_path: Path):
    stored, params = load_file(write(tmp_path) / WEIGHTS), load(tmp_path)
    assert len(params) == len(stored)
    # [out, in] on disk; [in, heads, head_dim] and [heads, head_dim, out] in memory
    q = stored[Q].reshape(8, 32, 64).transpose(2, 0, 1)
    np.testing.assert_array_equal(params["layers.1.attention.q"], q)
    o = stored[O].reshape(64, 8, 32).transpose(1, 2, 0)
    np.testing.assert_array_equal(params["layers.1.attention.o"], o)
    gate = stored["model.layers.0.mlp.gate_proj.weight"].T
    np.testing.assert_array_equal(params["layers.0.mlp.gate"], gate)
    np.testing.assert_array_equal(params["head.table"], stored["lm_head.weight"])
    norm = stored["model.layers.2.self_attn.k_norm.weight"]
    np.testing.assert_array_equal(params["layers.2.attention.k_norm"], norm)


def test_each_device_holds_its_part(tmp_path: Path):
    write(tmp_path, num_key_value_heads=2)
    whole, params = load(tmp_path), load(tmp_path, tp=4)
    for name, array in params.items():
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(whole[name])[shard.index])
    shapes = {k: params[f"layers.0.{k}"].sharding.shard_shape for k in ("attention.q", "mlp.down")}
    assert shapes["attention.q"]((64, 8, 32)) == (64, 2, 32)
    assert shapes["mlp.down"]((160, 64)) == (40, 64)
    # two KV heads on four ranks: two replicas of each
    k = params["layers.0.attention.k"]
    assert k.sharding.shard_shape(k.shape) == (64, 1, 32)


def test_rules_move_a_parameter(tmp_path: Path):
    params = load(write(tmp_path), tp=4, rules=make_rules({"vocab": []}))
    head = params["head.table"]
    assert head.sharding.shard_shape(head.shape) == head.shape


def test_a_sharded_index_gives_the_same(tmp_path: Path):
    one, three = load(write(tmp_path / "1")), load(write(tmp_path / "3", files=3))
    assert not (tmp_path / "3" / WEIGHTS).exists()
    for name in one:
        np.testing.assert_array_equal(one[name], three[name])
    assert weights_fingerprint(tmp_path / "1") == weights_fingerprint(tmp_path / "3")


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes_are_converted(tmp_path: Path, stored, dtype: str):
    tensors = load_file(write(tmp_path) / WEIGHTS)
    tensors = {name: t.astype(stored) for name, t in tensors.items()}
    save_file(tensors, tmp_path / WEIGHTS)
    params = load(tmp_path, dtype)
    assert {p.dtype for p in params.values()} == {jnp.dtype(dtype)}
    expected = tensors["lm_head.weight"].astype(np.float32).astype(dtype)
    np.testing.assert_array_equal(np.asarray(params["head.table"]), expected)


def test_a_tied_model_has_no_head_and_may_store_one(tmp_path: Path):
    tensors = load_file(write(tmp_path, tie_word_embeddings=True) / WEIGHTS)
    assert "lm_head.weight" not in tensors
    extra = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file({**tensors, **extra}, tmp_path / WEIGHTS)
    assert "head.table" not in load(tmp_path)


def test_everything_wrong_is_listed_at_once(tmp_path: Path):
    tensors = load_file(write(tmp_path) / WEIGHTS)
    del tensors[Q]
    tensors[O] = tensors[O][:, :-1].copy()
    tensors["model.layers.7.mlp.gate_proj.bias"] = np.zeros(3, np.float32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int32)
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match="4 problems") as error:
        load(tmp_path)
    text = str(error.value)
    assert f"missing: {Q} [256, 64]" in text
    assert f"misshapen: {O} [64, 255], expected [64, 256]" in text
    assert "unknown: model.layers.7.mlp.gate_proj.bias [3]" in text
    assert "dtype I32: lm_head.weight" in text


def test_a_long_list_is_cut(tmp_path: Path):
    tensors = load_file(write(tmp_path) / WEIGHTS)
    extra = {f"extra.{i}": np.zeros(1, np.float32) for i in range(70)}
    save_file({**tensors, **extra}, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match="70 problems") as error:
        load(tmp_path)
    lines = str(error.value).splitlines()
    assert len(lines) == 52
    assert lines[-1].strip() == "... and 20 more"


def test_missing_experts_are_named(tmp_path: Path):
    tensors = load_file(write(tmp_path, **EXPERTS) / WEIGHTS)
    names = [f"model.layers.1.mlp.experts.{e}.up_proj.weight" for e in (2, 7)]
    for name in names:
        del tensors[name]
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match="2 problems") as error:
        load(tmp_path)
    for name in names:
        assert f"missing: {name} [32, 64]" in str(error.value)


def test_stacked_experts_on_every_layout(tmp_path: Path):
    stored = load_file(write(tmp_path, **EXPERTS) / WEIGHTS)
    up = [stored[f"model.layers.1.mlp.experts.{e}.up_proj.weight"].T for e in range(8)]
    for rules in (
        make_rules({"experts": ["kv", "rep"], "expert_ffn": []}),
        make_rules({"experts": ["rep"], "expert_ffn": ["kv"]}),
        DEFAULT_RULES,
    ):
        array = load(tmp_path, tp=4, rules=rules)["layers.1.mlp.experts.up"]
        assert array.shape == (8, 64, 32)
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.stack(up)[shard.index])


def with_mtp(folder: Path, *, mtp: bool = True):
    family, config = load_config(folder)
    mesh = make_mesh(tp=1, dp=1, kv_heads=family.cache_spec(config).num_kv_heads)
    return load_params(folder, dataclasses.replace(config, mtp=mtp), mesh, DEFAULT_RULES)


@pytest.mark.parametrize("copy", ["embed_tokens.weight", "shared_head.head.weight"])
def test_copies_in_the_mtp_module_must_be_equal(tmp_path: Path, copy: str):
    tensors = load_file(write(tmp_path, **DEEPSEEK) / WEIGHTS)
    assert any(name.startswith("mtp.") for name in with_mtp(tmp_path))
    name = f"model.layers.2.{copy}"
    tensors[name] = tensors[name].copy()
    tensors[name][-1, -1] += 1
    save_file(tensors, tmp_path / WEIGHTS)
    main = "model.embed_tokens.weight" if copy.startswith("embed") else "lm_head.weight"
    with pytest.raises(ValueError, match=rf"1 problems.*\n.*unequal: {name} .*copy of {main}"):
        with_mtp(tmp_path)
    assert not any(name.startswith("mtp.") for name in with_mtp(tmp_path, mtp=False))
    # A checkpoint without the copies is as good.
    save_file({n: t for n, t in tensors.items() if n != name}, tmp_path / WEIGHTS)
    assert any(name.startswith("mtp.") for name in with_mtp(tmp_path))


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("tp", [1, 4])
def test_host_memory_stays_near_the_largest_tensor(tmp_path: Path, tp: int, stacked: bool):
    sizes = {"hidden_size": 512, "vocab_size": 4096, "num_hidden_layers": 2}
    if stacked:  # the experts of a layer are more than any tensor that is stored
        sizes |= {**EXPERTS, "num_experts": 32, "moe_intermediate_size": 256}
    else:
        sizes |= {"intermediate_size": 4096, "num_hidden_layers": 3}
    write(tmp_path, files=3, **sizes)
    _, config = load_config(tmp_path)
    mesh = make_mesh(tp=tp, dp=1, kv_heads=config.num_kv_heads)
    params, stats = load_measured(open_checkpoint(tmp_path, config, mesh, DEFAULT_RULES))
    assert stats.parameters == sum(p.size for p in params.values())
    assert stats.device_bytes == sum(
        shard.data.nbytes for p in params.values() for shard in p.addressable_shards
    )
    assert stats.largest_tensor == 4 * 4096 * 512
    assert stats.device_bytes > 80e6
    assert stats.host_peak is not None
    assert stats.host_peak < stats.largest_tensor


def test_no_weights_at_all(tmp_path: Path):
    (write(tmp_path) / WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors and no model\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("damage", [b"", b"garbage", b"\xff" * 64])
def test_a_file_that_is_not_safetensors(tmp_path: Path, damage: bytes):
    (write(tmp_path) / WEIGHTS).write_bytes(damage)
    with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file"):
        load(tmp_path)


def test_a_truncated_file(tmp_path: Path):
    file = write(tmp_path) / WEIGHTS
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file"):
        load(tmp_path)


def test_a_broken_index(tmp_path: Path):
    write(tmp_path, files=2)
    index = tmp_path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": {Q: "../elsewhere.safetensors"}}))
    with pytest.raises(ValueError, match="weight_map: expected tensor names to file names"):
        load(tmp_path)
    more = {**good["weight_map"], "no.such.tensor": good["weight_map"][Q]}
    index.write_text(json.dumps({"weight_map": more}))
    with pytest.raises(ValueError, match=r"not in the file that it names: no\.such\.tensor"):
        load(tmp_path)
    index.write_text(json.dumps(good))
    (tmp_path / good["weight_map"][Q]).unlink()
    with pytest.raises(FileNotFoundError, match="names files that are missing"):
        load(tmp_path)


def test_a_mesh_that_does_not_fit_is_refused_before_reading(tmp_path: Path):
    (write(tmp_path, intermediate_size=162) / WEIGHTS).unlink()
    with pytest.raises(ValueError, match="intermediate_size 162"):
        load(tmp_path, tp=4)


def test_the_fingerprint_sees_other_weights(tmp_path: Path):
    before = weights_fingerprint(write(tmp_path))
    tensors = load_file(tmp_path / WEIGHTS)
    tensors[Q] = tensors[Q] + np.float32(1e-3)
    save_file(tensors, tmp_path / WEIGHTS)
    assert weights_fingerprint(tmp_path) != before


def test_the_script_repeats_itself_and_refuses_by_name(tmp_path: Path):
    script = load_script("make_checkpoint")
    app = script.typer.Typer()
    app.command()(script.main)
    run = CliRunner().invoke
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        assert run(app, [str(tmp_path / name), "--seed", seed, "--layers", "1"]).exit_code == 0
    prints = [weights_fingerprint(tmp_path / name) for name in "abc"]
    assert prints[0] == prints[1] != prints[2]
    result = run(app, [str(tmp_path / "d"), "--heads", "6", "--kv-heads", "4"])
    assert result.exit_code == 2
    assert "num_key_value_heads: 4 does not divide num_attention_heads 6" in result.output
