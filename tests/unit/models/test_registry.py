"""Reading model folders: what is understood, and what is refused by name."""

import dataclasses
import json
from pathlib import Path

import pytest
from golden_cases import MODELS

from jaxdisagg.mesh import make_mesh
from models.registry import family_of, load_config
from models.rope import RopeConfig
from models.sharding import DEFAULT_RULES

QWEN3 = MODELS["qwen3_untied"][0]
LLAMA = MODELS["llama_untied"][0]


def folder(tmp_path: Path, hf: object, name: str = "config.json") -> Path:
    (tmp_path / name).write_text(hf if isinstance(hf, str) else json.dumps(hf))
    return tmp_path


def test_qwen3_is_read(tmp_path: Path):
    family, config = load_config(folder(tmp_path, QWEN3))
    assert family.name == config.family == "qwen3"
    assert family_of(config) is family
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 32)
    assert config.rope == RopeConfig(1e6)
    assert config.qk_norm
    assert not config.tied
    assert family.cache_spec(config).shape(10, 16) == (10, 4, 2, 16, 32)


def test_llama_is_read_with_a_derived_head_dim(tmp_path: Path):
    family, config = load_config(folder(tmp_path, LLAMA))
    assert family.name == "llama"
    assert config.head_dim == 8
    assert not any("q_norm" in name for name in family.abstract_params(config))


@pytest.mark.parametrize(
    ("written", "dtype"), [("bfloat16", "bfloat16"), ("float16", "bfloat16"), (None, "float32")]
)
@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_both_spellings_of_the_dtype(tmp_path: Path, field: str, written: str | None, dtype: str):
    hf = {k: v for k, v in QWEN3.items() if k != "torch_dtype"}
    assert load_config(folder(tmp_path, {**hf, field: written}))[1].dtype == dtype


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported .*Qwen3For"),
        ({"architectures": None}, "architectures: expected a list"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.*gptq"),
        ({"attention_bias": True}, "attention_bias: True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window: sliding-window"),
        ({"sliding_window": 64}, "sliding_window: sliding-window"),
        ({"layer_types": ["sliding_attention"]}, "layer_types: sliding_attention"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 4}}, "rope_type: 'ntk'"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype: 'float8_e4m3fn' is not supported"),
        ({"vocab_size": None}, "vocab_size: missing"),
        ({"vocab_size": "many"}, "vocab_size: expected an integer > 0, got 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected an integer > 0, got 0"),
        ({"hidden_size": "wide"}, "hidden_size: expected an integer"),
        (
            {"num_key_value_heads": 3},
            "num_key_value_heads: 3 does not divide num_attention_heads 8",
        ),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: expected true or false"),
        ({"head_dim": 7}, "head_dim: 7 is odd"),
        ({"torch_dtype": ["bfloat16"]}, r"dtype: \['bfloat16'\] is not supported"),
        ({"layer_types": 4}, "layer_types: expected a list, got 4"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps: expected a number > 0, got inf"),
        ({"head_dim": None, "hidden_size": 63}, "head_dim: missing, and 8 heads do not divide"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, change: dict, message: str):
    with pytest.raises(ValueError, match=message) as error:
        load_config(folder(tmp_path, {**QWEN3, **change}))
    assert str(tmp_path / "config.json") in str(error.value)


def test_an_idle_sliding_window_is_no_window(tmp_path: Path):
    load_config(folder(tmp_path, {**QWEN3, "use_sliding_window": False, "sliding_window": 4096}))


def test_missing_and_broken_files(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"model folder not found: .*none"):
        load_config(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"no config\.json in the model folder"):
        load_config(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        load_config(folder(tmp_path, "{"))
    with pytest.raises(ValueError, match=r"config\.json: expected a JSON object, got list"):
        load_config(folder(tmp_path, "[]"))


def test_a_mesh_that_does_not_fit_is_refused_by_field(tmp_path: Path):
    family, config = load_config(folder(tmp_path, {**QWEN3, "intermediate_size": 162}))
    with pytest.raises(ValueError, match="intermediate_size 162 does not divide into 4 shards"):
        family.check_mesh(config, make_mesh(tp=4, dp=1, kv_heads=4), DEFAULT_RULES)
    family.check_mesh(config, make_mesh(tp=2, dp=1, kv_heads=4), DEFAULT_RULES)


def test_fingerprints_differ_with_any_field(tmp_path: Path):
    _, config = load_config(folder(tmp_path, QWEN3))
    other_rope = dataclasses.replace(config, rope=RopeConfig(1e5))
    other_dtype = dataclasses.replace(config, dtype="bfloat16")
    prints = {c.fingerprint() for c in (config, other_rope, other_dtype)}
    assert len(prints) == 3
    assert dataclasses.replace(config).fingerprint() == config.fingerprint()
