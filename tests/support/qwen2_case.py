"""The random Qwen2 and the prompts of its golden: plain data, read by tests and generators."""

NAME = "qwen2_plugin"
SEED = 21
STD = 0.25
VOCAB = 264
PROMPT_LENGTHS = (1, 17, 40, 100)
LOGITS_UP_TO = 40  # of longer prompts the golden has the continuation alone
NEW_TOKENS = 12

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
