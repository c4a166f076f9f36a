"""DeepSeek-V3's config and checkpoint: what is read, what is refused by name, what is ignored."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from jaxdisagg.mesh import expert_axes, make_mesh
from models.deepseek_v3 import DEEPSEEK_V3
from models.interface import ParamSpec
from models.registry import FAMILIES
from models.rope import RopeConfig
from models.sharding import make_rules

# config.json of the released DeepSeek-V3, all but what concerns training alone.
RELEASED: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
# The same as transformers 5 writes it.
REWRITTEN: dict[str, Any] = {
    **{
        k: v
        for k, v in RELEASED.items()
        if k
        not in {"torch_dtype", "rope_scaling", "rope_theta", "ep_size", "moe_layer_freq"}
        | {"scoring_func", "topk_method"}
    },
    "dtype": "bfloat16",
    "head_dim": 64,
    "qk_head_dim": 192,
    "rope_interleave": True,
    "rope_parameters": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "rope_theta": 10000,
        "rope_type": "yarn",
    },
}
SMALL = {
    **RELEASED,
    "hidden_size": 64,
    "intermediate_size": 160,
    "moe_intermediate_size": 48,
    "n_routed_experts": 16,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "vocab_size": 256,
    "max_position_embeddings": 2560,
}


def small(*, mtp: bool = False, **change: Any):
    return dataclasses.replace(DEEPSEEK_V3.config_from_hf({**SMALL, **change}), mtp=mtp)


def test_the_released_config_is_read():
    config = DEEPSEEK_V3.config_from_hf(RELEASED)
    assert DEEPSEEK_V3 in FAMILIES
    assert (config.family, DEEPSEEK_V3.name) == ("deepseek_v3",) * 2
    a = config.attention
    assert (a.heads, a.query_rank, a.latent) == (128, 1536, 512)
    assert (a.nope_dim, a.rope_dim, a.value_dim) == (128, 64, 128)
    assert [config.is_dense(layer) for layer in (0, 2, 3, 60, 61)] == [True, True] + [False] * 3
    assert (config.num_experts, config.experts_per_token, config.shared_experts) == (256, 8, 1)
    assert (config.groups, config.top_groups, config.weight_scale) == (8, 4, 2.5)
    assert (config.mtp_layers, config.mtp, config.dtype) == (1, False, "bfloat16")
    assert config.interleaved
    assert config.normalise_weights
    assert config.softmax_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    spec = DEEPSEEK_V3.cache_spec(config)
    assert (spec.num_layers, spec.shape(10, 64)) == (61, (10, 64, 576))
    assert DEEPSEEK_V3.cache_spec(dataclasses.replace(config, mtp=True)).num_layers == 62


def test_both_spellings_read_alike():
    assert DEEPSEEK_V3.config_from_hf(REWRITTEN) == DEEPSEEK_V3.config_from_hf(RELEASED)
    renamed = {k: v for k, v in RELEASED.items() if k != "num_nextn_predict_layers"}
    assert DEEPSEEK_V3.config_from_hf(renamed).mtp_layers == 0
    assert DEEPSEEK_V3.config_from_hf({**renamed, "num_mtp_layers": 1}).mtp_layers == 1


def test_the_released_model_has_671_billion_parameters():
    """As its report says, and 14 billion more in the MTP module, embedding and head aside."""

    def count(config) -> int:
        return sum(math.prod(s.shape) for s in DEEPSEEK_V3.abstract_params(config).values())

    config = DEEPSEEK_V3.config_from_hf(RELEASED)
    main = count(config)
    assert main == pytest.approx(671e9, rel=1e-3)
    module = count(dataclasses.replace(config, mtp=True)) - main
    assert module == pytest.approx(11.5e9, rel=1e-2)
    # "14B of the Multi-Token Prediction Module weights" counts its embedding and head
    assert module + 2 * 129280 * 7168 == pytest.approx(14e9, rel=0.05)


@pytest.mark.parametrize("scaling", [None, {"rope_type": "default"}])
def test_no_scaling(scaling: dict | None):
    config = small(rope_scaling=scaling)
    assert config.rope == RopeConfig(1e4)
    assert config.softmax_scale == 40**-0.5


def test_optional_parts():
    config = small(q_lora_rank=None, n_shared_experts=0, num_nextn_predict_layers=0)
    params = DEEPSEEK_V3.abstract_params(config)
    assert params["layers.0.attention.q"].shape == (64, 8, 40)
    assert not any("q_a" in name or "shared" in name or "mtp" in name for name in params)
    assert not small(rope_interleave=False).interleaved
    tied = DEEPSEEK_V3.abstract_params(small(tie_word_embeddings=True))
    assert "head.table" not in tied


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func: 'softmax' is not supported"),
        ({"topk_method": "greedy"}, "topk_method: 'greedy' is not supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq: 2 is not supported"),
        ({"attention_bias": True}, "attention_bias: True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers: 2 is not supported"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers: expected an integer >= 0"),
        ({"num_key_value_heads": 4}, "num_key_value_heads: 4 is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.*awq"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type: 'dynamic'"),
        ({"rope_scaling": {"type": "llama3", "factor": 2}}, "rope_type: 'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "mscale_all_dim": 1}}, "mscale_all_dim"),
        ({"rope_interleave": "yes"}, "rope_interleave: expected true or false"),
        ({"norm_topk_prob": 1}, "norm_topk_prob: expected true or false"),
        ({"q_lora_rank": 0}, "q_lora_rank: expected an integer > 0"),
        ({"kv_lora_rank": None}, "kv_lora_rank: missing"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim: 15 is odd"),
        ({"first_k_dense_replace": 5}, "first_k_dense_replace: 5 exceeds num_hidden_layers 4"),
        ({"n_group": 3}, "n_group: 3 does not divide n_routed_experts 16"),
        ({"n_group": 16}, "n_group: 16 does not divide n_routed_experts 16 into groups of 2"),
        ({"topk_group": 9}, "topk_group: 9 exceeds n_group 8"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: 9 exceeds the 8 experts"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor: expected a number > 0"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype: 'float8_e4m3fn' is not supported"),
        ({"layer_types": ["sliding_attention"]}, "layer_types: sliding_attention"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        DEEPSEEK_V3.config_from_hf({**SMALL, **change})


def test_mtp_needs_a_module():
    with pytest.raises(ValueError, match="mtp: this model has no MTP module"):
        small(mtp=True, num_nextn_predict_layers=0)


@pytest.mark.parametrize(
    ("mesh", "change", "message"),
    [
        ((4, 1, 1), {"num_attention_heads": 6, "num_key_value_heads": 6}, "num_attention_heads 6"),
        ((4, 1, 1), {"intermediate_size": 162}, "intermediate_size 162 .* 4 shards of 'ffn'"),
        ((4, 1, 1), {"moe_intermediate_size": 50}, "moe_intermediate_size 50 .*'expert_ffn'"),
        (
            (4, 1, 1),
            {"moe_intermediate_size": 49, "n_shared_experts": 2},
            r"moe_intermediate_size 49 .*; moe_intermediate_size \* n_shared_experts 98",
        ),
        ((4, 1, 4), {"n_routed_experts": 18, "n_group": 3, "topk_group": 2}, "n_routed_experts 18"),
        ((1, 8, 8), {"n_routed_experts": 20, "n_group": 2, "topk_group": 1}, "n_routed_experts 20"),
        ((2, 1, 1), {"vocab_size": 257}, "vocab_size 257"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_by_field(
    mesh: tuple[int, int, int], change: dict, message: str
):
    tp, dp, ep = mesh
    rules = make_rules(expert_axes(tp=tp, dp=dp, ep=ep))
    config = small(**change)
    with pytest.raises(ValueError, match=message):
        DEEPSEEK_V3.check_mesh(config, make_mesh(tp=tp, dp=dp, kv_heads=1), rules)
    DEEPSEEK_V3.check_mesh(config, make_mesh(tp=1, dp=1, kv_heads=1), rules)


def test_widths_of_layers_that_are_not_there_fit_every_mesh():
    mesh, rules = make_mesh(tp=8, dp=1, kv_heads=1), make_rules()
    DEEPSEEK_V3.check_mesh(small(intermediate_size=1, first_k_dense_replace=0), mesh, rules)
    dense = {"first_k_dense_replace": 4, "moe_intermediate_size": 1}
    DEEPSEEK_V3.check_mesh(small(**dense), mesh, rules)
    with pytest.raises(ValueError, match="moe_intermediate_size 1 "):
        DEEPSEEK_V3.check_mesh(small(mtp=True, **dense), mesh, rules)


def ignored(config, *names: str) -> list[bool]:
    return [DEEPSEEK_V3.ignores_tensor(config, name) for name in names]


def test_what_of_the_mtp_layer_is_ignored():
    layer = "model.layers.4"
    copies = (f"{layer}.embed_tokens.weight", f"{layer}.shared_head.head.weight")
    others = (f"{layer}.eh_proj.weight", f"{layer}.mlp.experts.3.up_proj.weight")
    main = ("model.layers.3.mlp.gate.weight", "model.norm.weight", "lm_head.weight")
    beyond = ("model.layers.5.eh_proj.weight", "model.layers.40.mlp.gate.weight")
    on, off, none = small(mtp=True), small(), small(num_nextn_predict_layers=0)
    assert ignored(on, *copies, *others) == [True] * 2 + [False] * 2
    assert ignored(off, *copies, *others) == [True] * 4
    for config in (on, off):
        assert not any(ignored(config, *main, *beyond))
    # A config without the module does not know the layer: it is one too many.
    assert not any(ignored(none, *copies, *others, *main))
    assert DEEPSEEK_V3.shared_tensors(on) == dict(
        zip(copies, ("model.embed_tokens.weight", "lm_head.weight"), strict=True)
    )
    assert DEEPSEEK_V3.shared_tensors(off) == {}
    tied = small(mtp=True, tie_word_embeddings=True)
    assert set(DEEPSEEK_V3.shared_tensors(tied).values()) == {"model.embed_tokens.weight"}
    assert ignored(tied, "lm_head.weight") == [True]


@pytest.mark.parametrize("mtp", [False, True])
def test_every_parameter_has_axes_and_an_origin(mtp: bool):
    specs = DEEPSEEK_V3.abstract_params(small(mtp=mtp))
    names = [source.name for spec in specs.values() for source in spec.sources]
    shared = [name for name in set(names) if names.count(name) > 1]
    assert sorted(shared) == [
        f"model.layers.{layer}.self_attn.kv_b_proj.weight" for layer in range(4 + mtp)
    ]
    for spec in specs.values():
        assert len(spec.axes) == len(spec.shape)
        assert make_rules().spec(*spec.axes) is not None
    bias = specs["layers.3.mlp.bias"]
    assert (bias.dtype, specs["layers.3.mlp.router"].dtype) == ("float32", "bfloat16")


def part_of(tensor: np.ndarray, spec: ParamSpec) -> np.ndarray:
    """A parameter of one source, by the words of `HFSource`."""
    (source,) = spec.sources
    assert tensor.shape == source.shape
    view = tensor.reshape(source.view)
    if source.take is not None:
        axis, begin, end = source.take
        view = view.take(range(begin, end), axis)
    return view.transpose(source.order)


def test_kv_b_proj_is_split_by_head():
    """The published layout: per head the rows of its key, then those of its value."""
    specs = DEEPSEEK_V3.abstract_params(small())
    kv_b = np.random.default_rng(0).standard_normal((8 * 44, 32))
    w_uk = part_of(kv_b, specs["layers.1.attention.w_uk"])
    w_uv = part_of(kv_b, specs["layers.1.attention.w_uv"])
    assert (w_uk.shape, w_uv.shape) == ((8, 24, 32), (8, 20, 32))
    latent = np.random.default_rng(1).standard_normal(32)
    per_head = (kv_b @ latent).reshape(8, 44)
    np.testing.assert_allclose(w_uk @ latent, per_head[:, :24], rtol=1e-10)
    np.testing.assert_allclose(w_uv @ latent, per_head[:, 24:], rtol=1e-10)
