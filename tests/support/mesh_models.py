"""The small random models of the mesh matrix: GQA of 8, 2 and 1 KV heads, and a latent cache."""

from pathlib import Path
from typing import Any

from mesh_cases import Model
from random_checkpoint import write_checkpoint

LAYERS = 2
SEED = 11
_BOTH: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
_LATENT: dict[str, Any] = _BOTH | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "moe_layer_freq": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 0,
    "rope_scaling": None,
}


def write_models(folder: Path) -> dict[str, Model]:
    """Write all four, each into a folder of its own in `folder`; by name."""
    models = {}
    for heads in (8, 2, 1, 0):
        config = _LATENT
        if heads:
            config = _BOTH | {
                "architectures": ["Qwen3ForCausalLM"],
                "model_type": "qwen3",
                "num_key_value_heads": heads,
                "head_dim": 16,
            }
        name = f"qwen3-{heads}" if heads else "deepseek"
        write_checkpoint(folder / name, config, std=0.25, seed=SEED)
        models[name] = Model(name, heads, LAYERS, folder / name)
    return models
