"""A small model with a tokenizer, for nodes that are processes of their own."""

import shutil
from pathlib import Path

import pytest
from repository import load_script

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 260,
}


@pytest.fixture(scope="session")
def serving_folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """Random Qwen3 weights (std 0.25, untied) beside the tiny byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("serving") / "tiny-qwen3"
    load_script("make_checkpoint").write_checkpoint(folder, CONFIG, std=0.25, seed=7)
    for file in tiny_folder.iterdir():
        shutil.copy(file, folder / file.name)
    return folder
