"""The golden models with latent attention: DeepSeek-V3, with and without its MTP module."""

from typing import Any

YARN = {
    "type": "yarn",
    "factor": 16.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 32,
}
# With these the turns over 32 tokens have pairs on both sides of both bounds.
RAMP = {"rope_theta": 100.0, "beta_fast": 2, "beta_slow": 0.25}
# What the released config.json holds, small.
BASE = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": YARN,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
# The same in the spelling of transformers 5, which leaves out what its model does not read.
_NEW_SPELLING = {
    k: v
    for k, v in BASE.items()
    if not k.startswith(("rope_", "topk_method", "scoring_func", "moe_layer_freq", "torch_dtype"))
} | {"dtype": "float32", "rope_interleave": True}


def _yarn(**change: Any) -> dict[str, Any]:
    merged = {"rope_theta": 10000.0, **YARN, **change, "rope_type": "yarn"}
    return {k: v for k, v in merged.items() if v is not None and k != "type"}


# name -> (config.json, seed of the weights)
CASES: dict[str, tuple[dict[str, Any], int]] = {
    # yarn whose two mscales cancel in cos and sin and stay in the softmax, as released; MTP
    "deepseek_yarn": ({**BASE, "num_nextn_predict_layers": 1}, 21),
    # two mscales that do not cancel; a ramp with pairs before, on and after it; values wider than
    # keys; 8 groups
    "deepseek_yarn_mscale": (
        {
            **_NEW_SPELLING,
            "rope_parameters": _yarn(factor=8.0, mscale=0.7, mscale_all_dim=1.3, **RAMP),
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 16,
            "v_head_dim": 24,
            "n_group": 8,
            "topk_group": 3,
        },
        22,
    ),
    # yarn without mscales: all of it is in cos and sin; bounds of the ramp between pairs; rotated
    # halves instead of pairs; all experts of the best group, those of negative score too
    "deepseek_yarn_halves": (
        {
            **_NEW_SPELLING,
            "rope_parameters": _yarn(mscale=None, mscale_all_dim=None, truncate=False, **RAMP),
            "rope_interleave": False,
            "qk_nope_head_dim": 24,
            "v_head_dim": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 8,
        },
        23,
    ),
    # no scaling, no low rank for q, no groups; norms of the latents keep an epsilon of their own
    "deepseek_plain": (
        {
            **BASE,
            "rope_scaling": None,
            "rms_norm_eps": 1e-2,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 3,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
        },
        24,
    ),
    # tied, two dense layers first, every group allowed, weights that do not add up; MTP
    "deepseek_tied": (
        {
            **BASE,
            "num_hidden_layers": 4,
            "first_k_dense_replace": 2,
            "num_nextn_predict_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "rope_scaling": None,
            "rope_theta": 5e5,
            "topk_group": 4,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "tie_word_embeddings": True,
        },
        25,
    ),
}

SERVING = (
    {
        **BASE,
        "vocab_size": 256,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 1024,
        "rope_scaling": {**YARN, "original_max_position_embeddings": 64},
    },
    26,
)
