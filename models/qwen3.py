"""Qwen3 dense, and the Llama architecture, which is the same without the norms of q and k."""

from models.gqa_decoder import GQAConfig, GQAFamily


class Qwen3Config(GQAConfig):
    """Qwen3 dense: a norm over each head of q and k, before the rotation."""

    family = "qwen3"
    architectures = ("Qwen3ForCausalLM",)
    qk_norm = True


class LlamaConfig(GQAConfig):
    """Llama and models of its architecture, such as SmolLM2."""

    family = "llama"
    architectures = ("LlamaForCausalLM",)
    qk_norm = False


QWEN3 = GQAFamily(Qwen3Config)
LLAMA = GQAFamily(LlamaConfig)
