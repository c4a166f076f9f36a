"""The golden models with experts and grouped-query attention: Qwen3-MoE."""

from typing import Any

BASE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
_NEW_SPELLING = {k: v for k, v in BASE.items() if k not in ("num_experts", "torch_dtype")}
_NEW_SPELLING = {k: v for k, v in _NEW_SPELLING.items() if not k.startswith("rope_")}

# name -> (config.json, seed of the weights)
CASES: dict[str, tuple[dict[str, Any], int]] = {
    # the released spelling of config.json
    "qwen3_moe_untied": (BASE, 11),
    # the spelling that transformers 5 writes; heads and experts in ratios of their own
    "qwen3_moe_tied": (
        {
            **_NEW_SPELLING,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            "tie_word_embeddings": True,
            "dtype": "float32",
        },
        12,
    ),
    # weights of the chosen experts that do not add up to one; as many KV heads as query heads
    "qwen3_moe_unnormalised": (
        {
            **BASE,
            "num_key_value_heads": 8,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
        },
        13,
    ),
    # layers 0 and 2 are dense by the step, 3 by name; 1 has experts, one of them chosen
    "qwen3_moe_sparse_step": (
        {
            **BASE,
            "num_hidden_layers": 4,
            "num_experts_per_tok": 1,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
        14,
    ),
    "qwen3_moe_rope_yarn": (
        {
            **BASE,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "num_experts_per_tok": 6,
            "rope_theta": 1e4,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        15,
    ),
}

SERVING = ({**BASE, "vocab_size": 256, "max_position_embeddings": 1024}, 16)
