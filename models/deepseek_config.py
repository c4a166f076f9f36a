"""What DeepSeek-V3 and R1 say in config.json, and what of it is supported."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models import hf_config
from models.interface import ModelConfig, require_positive
from models.mla import LatentShape
from models.quantization import read_quantization
from models.rope import RopeConfig, rope_from_hf

ROPE_KINDS = ("default", "linear", "yarn")


@dataclass(frozen=True, kw_only=True)
class DeepSeekConfig(ModelConfig):
    """Multi-head latent attention, dense layers first and mixtures of experts after them."""

    family = "deepseek_v3"

    attention: LatentShape
    ffn_size: int  # of the dense layers
    num_dense_layers: int  # the first ones; all others have experts
    expert_ffn: int
    num_experts: int
    experts_per_token: int
    shared_experts: int
    groups: int
    top_groups: int
    normalise_weights: bool
    weight_scale: float
    rms_eps: float
    rope: RopeConfig
    interleaved: bool  # whether rotary pairs lie side by side in the weights
    tied: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "ffn_size", "expert_ffn", "num_experts", "experts_per_token")
        require_positive(self, "groups", "top_groups")
        if self.mtp_layers > 1:
            raise ValueError(
                f"num_nextn_predict_layers: {self.mtp_layers} is not supported (supported: 0, 1)"
            )
        if self.num_dense_layers > self.num_layers:
            raise ValueError(
                f"first_k_dense_replace: {self.num_dense_layers} exceeds num_hidden_layers "
                f"{self.num_layers}"
            )
        if self.num_experts % self.groups or self.num_experts // self.groups < 2:
            # A group's score is the sum of its best two.
            raise ValueError(
                f"n_group: {self.groups} does not divide n_routed_experts {self.num_experts} into "
                f"groups of 2 or more"
            )
        if self.top_groups > self.groups:
            raise ValueError(f"topk_group: {self.top_groups} exceeds n_group {self.groups}")
        chosen_from = self.num_experts // self.groups * self.top_groups
        if self.experts_per_token > chosen_from:
            raise ValueError(
                f"num_experts_per_tok: {self.experts_per_token} exceeds the {chosen_from} experts "
                f"of topk_group {self.top_groups} groups"
            )

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has one MLP in place of experts; the MTP module's never has."""
        return layer < self.num_dense_layers

    @property
    def shared_ffn(self) -> int:
        """The width of the shared experts, which are one MLP; 0 for none."""
        return self.expert_ffn * self.shared_experts

    @property
    def softmax_scale(self) -> float:
        """(Hn + C)^-0.5, times the square of yarn's mscale of mscale_all_dim."""
        a = self.attention
        return (a.nope_dim + a.rope_dim) ** -0.5 * self.rope.softmax_factor


def read_config(hf: Mapping[str, Any]) -> DeepSeekConfig:
    """Read config.json in the released spelling or that of transformers 5.

    Raises ValueError naming a field that is missing, malformed or asks for what is not supported.
    """
    hf_config.refuse(
        hf,
        {
            "hidden_act": ("silu",),
            "attention_bias": (False, None),
            "mlp_bias": (False, None),
            "topk_method": ("noaux_tc", None),
            "scoring_func": ("sigmoid", None),
            "moe_layer_freq": (1, None),
        },
    )
    read_quantization(hf)  # refuses what loading could not undo
    hf_config.refuse_sliding_window(hf)
    heads = hf_config.integer(hf, "num_attention_heads")
    if hf_config.integer(hf, "num_key_value_heads", default=heads) != heads:
        raise ValueError(
            f"num_key_value_heads: {hf['num_key_value_heads']} is not supported: latent attention "
            f"has as many as num_attention_heads ({heads})"
        )
    mtp = "num_nextn_predict_layers" if "num_nextn_predict_layers" in hf else "num_mtp_layers"
    ranked = hf.get("q_lora_rank") is not None
    return DeepSeekConfig(
        vocab_size=hf_config.integer(hf, "vocab_size"),
        num_layers=hf_config.integer(hf, "num_hidden_layers"),
        hidden_size=hf_config.integer(hf, "hidden_size"),
        max_position=hf_config.integer(hf, "max_position_embeddings"),
        dtype=hf_config.dtype_of(hf),
        mtp_layers=hf_config.integer(hf, mtp, default=0, least=0),
        attention=LatentShape(
            heads=heads,
            query_rank=hf_config.integer(hf, "q_lora_rank") if ranked else None,
            latent=hf_config.integer(hf, "kv_lora_rank"),
            nope_dim=hf_config.integer(hf, "qk_nope_head_dim"),
            rope_dim=hf_config.integer(hf, "qk_rope_head_dim"),
            value_dim=hf_config.integer(hf, "v_head_dim"),
        ),
        ffn_size=hf_config.integer(hf, "intermediate_size"),
        num_dense_layers=hf_config.integer(hf, "first_k_dense_replace", least=0),
        expert_ffn=hf_config.integer(hf, "moe_intermediate_size"),
        num_experts=hf_config.integer(hf, "n_routed_experts"),
        experts_per_token=hf_config.integer(hf, "num_experts_per_tok"),
        shared_experts=hf_config.integer(hf, "n_shared_experts", default=0, least=0),
        groups=hf_config.integer(hf, "n_group"),
        top_groups=hf_config.integer(hf, "topk_group"),
        normalise_weights=hf_config.flag(hf, "norm_topk_prob", default=True),
        weight_scale=hf_config.number(hf, "routed_scaling_factor"),
        rms_eps=hf_config.number(hf, "rms_norm_eps", default=1e-6),
        rope=rope_from_hf(hf, ROPE_KINDS),
        interleaved=hf_config.flag(hf, "rope_interleave", default=True),
        tied=hf_config.flag(hf, "tie_word_embeddings", default=False),
    )
