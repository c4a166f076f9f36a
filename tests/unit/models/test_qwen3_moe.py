"""Qwen3-MoE's config and parameters: what is read, what is refused by name."""

import math
from typing import Any

import pytest

from jaxdisagg.mesh import expert_axes, make_mesh
from models.qwen3_moe import QWEN3_MOE
from models.sharding import make_rules

# config.json of the released Qwen3-Coder-480B-A35B, all but what concerns training alone.
RELEASED: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "intermediate_size": 8192,
    "max_position_embeddings": 262144,
    "max_window_layers": 62,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 2560,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts": 160,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "output_router_logits": False,
    "qkv_bias": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_qk_norm": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
# Qwen3-30B-A3B, where it differs.
SMALLER = {
    "attention_bias": False,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rope_theta": 1000000.0,
}


def changed(**fields: Any) -> dict[str, Any]:
    """The released config with some fields changed, or left out where the value is `...`."""
    return {k: v for k, v in (RELEASED | fields).items() if v is not ...}


@pytest.mark.parametrize(("changes", "billions"), [({}, 480.155), (SMALLER, 30.532)])
def test_the_released_models_have_their_published_sizes(changes: dict, billions: float):
    config = QWEN3_MOE.config_from_hf(changed(**changes))
    specs = QWEN3_MOE.abstract_params(config)
    total = sum(math.prod(spec.shape) for spec in specs.values())
    assert total / 1e9 == pytest.approx(billions, abs=1e-3)


def test_tensors_and_axes():
    config = QWEN3_MOE.config_from_hf(changed(num_hidden_layers=2, mlp_only_layers=[0]))
    specs = QWEN3_MOE.abstract_params(config)
    router, gate = specs["layers.1.mlp.router"], specs["layers.1.mlp.experts.gate"]
    assert (router.shape, router.axes) == ((6144, 160), ("embed", None))
    assert router.sources[0].name == "model.layers.1.mlp.gate.weight"
    assert (gate.shape, gate.axes) == ((160, 6144, 2560), ("experts", "embed", "expert_ffn"))
    assert gate.sources[7].name == "model.layers.1.mlp.experts.7.gate_proj.weight"
    assert specs["layers.0.mlp.gate"].shape == (6144, 8192)
    assert "layers.0.mlp.router" not in specs
    assert "layers.0.attention.q_norm" in specs


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({}, ()),
        ({"mlp_only_layers": ..., "decoder_sparse_step": ...}, ()),
        ({"mlp_only_layers": None}, ()),
        ({"mlp_only_layers": [4, 1]}, (1, 4)),
        ({"decoder_sparse_step": 2}, (0, 2, 4)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, (0, 1, 2, 3, 4)),
    ],
)
def test_which_layers_are_dense(changes: dict, dense: tuple[int, ...]):
    config = QWEN3_MOE.config_from_hf(changed(num_hidden_layers=6, **changes))
    assert config.dense_layers == dense


def test_both_spellings_of_the_number_of_experts():
    new = changed(num_experts=..., num_local_experts=160)
    assert QWEN3_MOE.config_from_hf(new) == QWEN3_MOE.config_from_hf(RELEASED)
    assert QWEN3_MOE.config_from_hf(changed(num_local_experts=160)).num_experts == 160


def test_weights_are_normalised_when_the_config_says_so():
    assert QWEN3_MOE.config_from_hf(RELEASED).normalise_weights
    assert not QWEN3_MOE.config_from_hf(changed(norm_topk_prob=False)).normalise_weights
    assert not QWEN3_MOE.config_from_hf(changed(norm_topk_prob=...)).normalise_weights


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": ...}, "num_experts: missing"),
        ({"num_experts": 0}, "num_experts: expected an integer > 0, got 0"),
        ({"num_local_experts": 128}, "num_local_experts: 128 differs from num_experts 160"),
        ({"num_experts_per_tok": ...}, "num_experts_per_tok: missing"),
        ({"num_experts_per_tok": 161}, "num_experts_per_tok: 161 is more than num_experts 160"),
        ({"moe_intermediate_size": ...}, "moe_intermediate_size: missing"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step: expected an integer > 0, got 0"),
        (
            {"mlp_only_layers": "0"},
            "mlp_only_layers: expected a list of layer numbers below 62",
        ),
        ({"mlp_only_layers": [62]}, r"mlp_only_layers: .* below 62, got \[62\]"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob: expected true or false"),
        ({"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size: 512 is not"),
        ({"qkv_bias": True}, "qkv_bias: True is not supported"),
        ({"use_qk_norm": False}, "use_qk_norm: False is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        QWEN3_MOE.config_from_hf(changed(**changes))


@pytest.mark.parametrize(
    ("changes", "mesh", "message"),
    [
        ({}, {"tp": 4, "dp": 2, "ep": 8}, None),
        ({"num_experts": 12, "intermediate_size": 3}, {"tp": 4, "dp": 2, "ep": 2}, None),
        ({"num_experts": 12}, {"tp": 4, "dp": 2, "ep": 8}, "num_experts 12 .* 8 shards"),
        ({"num_experts": 9}, {"tp": 4, "dp": 2, "ep": 1}, None),
        ({"moe_intermediate_size": 6}, {"tp": 4, "dp": 2, "ep": 2}, "moe_intermediate_size 6 .* 4"),
        ({"moe_intermediate_size": 6}, {"tp": 4, "dp": 2, "ep": 4}, None),
        (
            {"intermediate_size": 3, "decoder_sparse_step": 2},
            {"tp": 4, "dp": 2, "ep": 8},
            "intermediate_size 3 .* 4",
        ),
        # no layer has experts: their sizes do not matter
        ({"num_experts": 9, "mlp_only_layers": [0, 1]}, {"tp": 2, "dp": 1, "ep": 2}, None),
    ],
)
def test_a_mesh_that_does_not_divide(changes: dict, mesh: dict, message: str | None):
    config = QWEN3_MOE.config_from_hf(changed(num_hidden_layers=2, **changes))
    rules = make_rules(expert_axes(**mesh))
    devices = make_mesh(tp=mesh["tp"], dp=mesh["dp"], kv_heads=config.num_kv_heads)
    if message is None:
        QWEN3_MOE.check_mesh(config, devices, rules)
    else:
        with pytest.raises(ValueError, match=message):
            QWEN3_MOE.check_mesh(config, devices, rules)
