"""The dense golden models: Qwen3 and Llama."""

from typing import Any

BASE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
}
QWEN3 = {**BASE, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
LLAMA = {**BASE, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}

# name -> (config.json, seed of the weights)
CASES: dict[str, tuple[dict[str, Any], int]] = {
    # head_dim is not hidden / heads; the released spelling of config.json
    "qwen3_untied": (
        {
            **QWEN3,
            "head_dim": 32,
            "rope_theta": 1e6,
            "rope_scaling": None,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
        },
        1,
    ),
    # the spelling that transformers 5 writes
    "qwen3_tied": (
        {
            **QWEN3,
            "head_dim": 24,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            "tie_word_embeddings": True,
            "dtype": "float32",
        },
        2,
    ),
    # head_dim absent; as many KV heads as query heads
    "llama_untied": (
        {
            **LLAMA,
            "num_key_value_heads": 8,
            "rope_theta": 1e4,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
        },
        3,
    ),
    # Llama 3.1's scaling, with waves on both sides of both its bounds
    "llama_rope_llama3": (
        {
            **LLAMA,
            "head_dim": 16,
            "rope_theta": 5e5,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
        },
        4,
    ),
    "llama_rope_linear": (
        {
            **LLAMA,
            "head_dim": 16,
            "rope_theta": 1e4,
            "rope_scaling": {"type": "linear", "factor": 4.0},
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
        },
        5,
    ),
    # yarn as the cards of the released Qwen3 say to write it; 100 tokens go beyond the 32
    "qwen3_rope_yarn": (
        {
            **QWEN3,
            "head_dim": 32,
            "num_key_value_heads": 2,
            "rope_theta": 1e4,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
        },
        8,
    ),
}

SERVING = (
    {
        **QWEN3,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    },
    6,
)
