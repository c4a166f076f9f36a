"""Block-quantised fp8: what a config may ask for, and what the loader makes of it."""

import dataclasses
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from golden_cases import MODELS
from random_checkpoint import write_checkpoint
from tensor_files import load_file, save_file

from jaxdisagg.mesh import make_mesh
from models.checkpoint import load_params
from models.quantization import BlockFp8, read_quantization
from models.registry import load_config
from models.sharding import make_rules

WEIGHTS = "model.safetensors"
SCALE = "_scale_inv"
Q = "model.layers.1.self_attn.q_proj.weight"

DEEPSEEK = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


def test_the_released_form_is_read():
    assert read_quantization({"quantization_config": DEEPSEEK}) == BlockFp8(128, 128)
    more = {**DEEPSEEK, "modules_to_not_convert": ["lm_head"], "scale_fmt": "ue8m0"}
    assert read_quantization({"quantization_config": more}) == BlockFp8(128, 128)
    # transformers leaves `fmt` out; the dtype of the tensors says the same
    without = {k: v for k, v in DEEPSEEK.items() if k != "fmt"}
    assert read_quantization({"quantization_config": without}) == BlockFp8(128, 128)
    assert read_quantization({}) is None
    assert read_quantization({"quantization_config": None}) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "gptq"}, r"quantization_config\.quant_method: 'gptq' .*'fp8'"),
        ({"fmt": "e5m2"}, r"quantization_config\.fmt: 'e5m2' .*'e4m3'"),
        ({"activation_scheme": "static"}, r"quantization_config\.activation_scheme: 'static'"),
        ({"scale_fmt": "float"}, r"quantization_config\.scale_fmt: 'float'"),
        ({"weight_block_size": None}, r"weight_block_size: expected two integers > 0, got None"),
        ({"weight_block_size": [128]}, r"weight_block_size: expected two integers > 0"),
        ({"weight_block_size": [128, 0]}, r"weight_block_size: expected two integers > 0"),
        ({"weight_block_size": [128, True]}, r"weight_block_size: expected two integers > 0"),
        ({"kv_cache_scheme": {}}, r"quantization_config\.kv_cache_scheme: .*unknown field"),
    ],
)
def test_anything_else_is_refused_by_name(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        read_quantization({"quantization_config": {**DEEPSEEK, **change}})


@pytest.mark.parametrize("name", ["quant_method", "weight_block_size"])
def test_a_missing_field_is_named(name: str):
    fields = {k: v for k, v in DEEPSEEK.items() if k != name}
    with pytest.raises(ValueError, match=rf"quantization_config\.{name}: missing"):
        read_quantization({"quantization_config": fields})


def test_it_must_be_an_object():
    with pytest.raises(ValueError, match="quantization_config: expected an object, got 'fp8'"):
        read_quantization({"quantization_config": "fp8"})


# Sizes past one block that no block divides: 200 = 128 + 72, 144 = 128 + 16.
DENSE = {
    **MODELS["qwen3_untied"][0],
    "hidden_size": 144,
    "intermediate_size": 200,
    "head_dim": 18,
    "quantization_config": DEEPSEEK,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 144,
    "intermediate_size": 200,
    "moe_intermediate_size": 136,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "q_lora_rank": 40,
    "kv_lora_rank": 150,
    "qk_nope_head_dim": 40,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
    "quantization_config": DEEPSEEK,
}
GATE = "model.layers.1.mlp.gate_proj.weight"


def write(folder: Path, config: dict) -> dict[str, np.ndarray]:
    """The stored tensors; the scales are not those of the script, so that every block differs."""
    write_checkpoint(folder, config)
    tensors = load_file(folder / WEIGHTS)
    rng = np.random.default_rng(1)
    for name, tensor in tensors.items():
        if name.endswith(SCALE):
            tensors[name] = rng.uniform(0.001, 1, tensor.shape).astype(np.float32)
    save_file(tensors, folder / WEIGHTS)
    return tensors


def dequantised(tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Element by element: value times the scale of the 128 x 128 block that it lies in."""
    stored, scales = tensors[name].astype(np.float32), tensors[name + SCALE]
    out = np.empty(stored.shape, np.float32)
    for r in range(stored.shape[0]):
        for c in range(stored.shape[1]):
            out[r, c] = stored[r, c] * scales[r // 128, c // 128]
    return out


def load(folder: Path, dtype: str, tp: int = 1, dp: int = 1, **axes: list[str]):
    family, config = load_config(folder)
    config = dataclasses.replace(config, dtype=dtype)
    mesh = make_mesh(tp=tp, dp=dp, kv_heads=family.cache_spec(config).num_kv_heads)
    return load_params(folder, config, mesh, make_rules(axes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_dense_weights(tmp_path: Path, tp: int, dtype: str):
    tensors = write(tmp_path, DENSE)
    assert tensors[GATE].dtype == ml_dtypes.float8_e4m3fn
    assert tensors[GATE + SCALE].shape == (2, 2)
    params = load(tmp_path, dtype, tp)
    q = dequantised(tensors, "model.layers.0.self_attn.q_proj.weight")
    o = dequantised(tensors, "model.layers.0.self_attn.o_proj.weight")
    expected = {
        "layers.0.attention.q": q.reshape(8, 18, 144).transpose(2, 0, 1),
        "layers.0.attention.o": o.reshape(144, 8, 18).transpose(1, 2, 0),
        "layers.1.mlp.gate": dequantised(tensors, GATE).T,
        "layers.1.mlp.down": dequantised(tensors, GATE.replace("gate", "down")).T,
        "head.table": tensors["lm_head.weight"],
        "layers.1.mlp_norm.scale": tensors["model.layers.1.post_attention_layernorm.weight"],
    }
    for name, value in expected.items():
        np.testing.assert_array_equal(np.asarray(params[name]), value.astype(dtype), name)
        for shard in params[name].addressable_shards:
            np.testing.assert_array_equal(shard.data, value.astype(dtype)[shard.index])


@pytest.mark.parametrize(
    ("tp", "dp", "axes"),
    [
        (1, 1, {}),
        (4, 1, {}),
        (2, 2, {"experts": ["dp"]}),
        (2, 2, {"experts": ["dp", "kv", "rep"], "expert_ffn": []}),
    ],
)
def test_latent_attention_and_experts(tmp_path: Path, tp: int, dp: int, axes: dict):
    tensors = write(tmp_path, DEEPSEEK_V3)
    params = load(tmp_path, "float32", tp, dp, **axes)
    prefix = "model.layers.1"
    # kv_b_proj is [heads * (nope + value), latent]; its two parts are parameters of their own.
    both = dequantised(tensors, f"{prefix}.self_attn.kv_b_proj.weight").reshape(4, 64, 150)
    down = [dequantised(tensors, f"{prefix}.mlp.experts.{e}.down_proj.weight") for e in range(4)]
    expected = {
        "attention.w_uk": both[:, :40],
        "attention.w_uv": both[:, 40:],
        "attention.kv_a": dequantised(tensors, f"{prefix}.self_attn.kv_a_proj_with_mqa.weight").T,
        "mlp.experts.down": np.stack([d.T for d in down]),
        "mlp.router": tensors[f"{prefix}.mlp.gate.weight"].T,
        "mlp.bias": tensors[f"{prefix}.mlp.gate.e_score_correction_bias"],
    }
    for name, value in expected.items():
        for shard in params[f"layers.1.{name}"].addressable_shards:
            np.testing.assert_array_equal(shard.data, value.astype(np.float32)[shard.index], name)


def test_what_is_wrong_with_scales_is_listed(tmp_path: Path):
    tensors = write(tmp_path, DENSE)
    up, down, k = (GATE.replace("gate", "up"), GATE.replace("gate", "down"), Q.replace("q_", "k_"))
    del tensors[GATE + SCALE]
    tensors[up + SCALE] = tensors[up + SCALE][:1]
    tensors[down + SCALE] = tensors[down + SCALE].astype(np.float64)
    tensors[k] = tensors[k].astype(np.float32)
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match="4 problems") as error:
        load(tmp_path, "float32")
    text = str(error.value)
    assert f"missing: {GATE}{SCALE} [2, 2]" in text
    assert f"misshapen: {up}{SCALE} [1, 2], expected [2, 2]" in text
    assert f"dtype F64: {down}{SCALE}" in text
    assert f"unknown: {k}{SCALE} [1, 2]" in text


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scales_must_be_finite(tmp_path: Path, value: float):
    tensors = write(tmp_path, DENSE)
    tensors[GATE + SCALE][-1, -1] = value
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=f"{GATE}{SCALE} has values that are not finite"):
        load(tmp_path, "float32")


def test_fp8_needs_the_config_to_say_so(tmp_path: Path):
    write(tmp_path, DENSE)
    (tmp_path / "config.json").write_text(json.dumps({**DENSE, "quantization_config": None}))
    with pytest.raises(ValueError, match=r"dtype F8_E4M3: .*no quantization_config") as error:
        load(tmp_path, "float32")
    assert f"unknown: {GATE}{SCALE} [2, 2]" in str(error.value)


def test_a_vector_in_fp8_is_refused(tmp_path: Path):
    tensors = write(tmp_path, DENSE)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(ml_dtypes.float8_e4m3fn)
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=r"dtype F8_E4M3: model\.norm\.weight \(only matrices"):
        load(tmp_path, "float32")
