"""The random models and prompts of the goldens: plain data, read by the tests and the generator.

Weights are wide (std 0.25) so that greedy tokens see a damaged cache. The models are small, yet
unlike each other in everything that a family reads from its config.
"""

VOCAB = 256
PROMPT_LENGTHS = (1, 2, 15, 16, 17, 40, 100)
NEW_TOKENS = 12
STD = 0.25

_BASE = {
    "vocab_size": VOCAB,
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
_QWEN3 = {**_BASE, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
_LLAMA = {**_BASE, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}

# name -> (config.json, seed of the weights)
CASES = {
    # head_dim is not hidden / heads; the released spelling of config.json
    "qwen3_untied": (
        {
            **_QWEN3,
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
            **_QWEN3,
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
            **_LLAMA,
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
            **_LLAMA,
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
            **_LLAMA,
            "head_dim": 16,
            "rope_theta": 1e4,
            "rope_scaling": {"type": "linear", "factor": 4.0},
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
        },
        5,
    ),
}

# The model of the end-to-end tests, whose goldens golden_serving.py reads: pages of 16 tokens and
# chunks of 64 meet prompts on both sides of their edges.
SERVING = "qwen3_serving"
SERVING_LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 128, 193)
SERVING_PER_LENGTH = 6
SERVING_BEST = 5

# Every model that `golden_folder` writes; those not in CASES have other goldens, or none.
MODELS = {
    **CASES,
    SERVING: (
        {
            **_QWEN3,
            "head_dim": 32,
            "max_position_embeddings": 1024,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
        },
        6,
    ),
    # No goldens: layers that take some milliseconds each, to see transfers overlap with compute.
    "qwen3_deep": (
        {
            **_QWEN3,
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_hidden_layers": 12,
            "head_dim": 64,
            "max_position_embeddings": 4096,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
        },
        7,
    ),
}
