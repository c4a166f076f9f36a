"""Qwen3-MoE: Qwen3 with experts in place of the MLP, in all layers or in some."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from models import hf_config
from models.gqa_decoder import GQAConfig, GQAFamily
from models.interface import require_positive
from models.layers import declare
from models.moe import Experts, moe, route_on_shards, route_softmax
from models.sharding import ShardingRules


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(GQAConfig):
    """`ffn_size` is that of the layers in `dense_layers`, which have no experts."""

    family = "qwen3_moe"
    architectures = ("Qwen3MoeForCausalLM",)
    qk_norm = True

    num_experts: int
    experts_per_token: int
    expert_ffn: int
    normalise_weights: bool  # weights of a token's experts add up to 1
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "num_experts", "experts_per_token", "expert_ffn")
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok: {self.experts_per_token} is more than "
                f"num_experts {self.num_experts}"
            )


class SparseMLP(nnx.Module):
    """A router and its experts."""

    def __init__(self, prefix: str, config: Qwen3MoeConfig) -> None:
        c = config
        shape = (c.hidden_size, c.num_experts)
        self.router = declare(f"{prefix}.gate.weight", shape, ("embed", None), c.dtype, inputs=1)
        self.experts = Experts(
            f"{prefix}.experts", c.hidden_size, c.expert_ffn, c.num_experts, c.dtype
        )


class Qwen3MoeFamily(GQAFamily[Qwen3MoeConfig]):
    """`interface.ModelFamily` of Qwen3-MoE."""

    def fields_from_hf(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `GQAFamily.fields_from_hf`."""
        hf_config.refuse(
            hf,
            {
                "shared_expert_intermediate_size": (0, None),
                "qkv_bias": (False, None),
                "use_qk_norm": (True, None),
            },
        )
        fields = super().fields_from_hf(hf)
        return fields | {
            "num_experts": _num_experts(hf),
            "experts_per_token": hf_config.integer(hf, "num_experts_per_tok"),
            "expert_ffn": hf_config.integer(hf, "moe_intermediate_size"),
            "normalise_weights": hf_config.flag(hf, "norm_topk_prob", default=False),
            "dense_layers": _dense_layers(hf, fields["num_layers"]),
        }

    def declare_mlp(self, config: Qwen3MoeConfig, layer: int) -> nnx.Module:
        """Experts, or the dense MLP of a layer without them."""
        if layer in config.dense_layers:
            return super().declare_mlp(config, layer)
        return SparseMLP(f"model.layers.{layer}.mlp", config)

    def mlp(
        self,
        config: Qwen3MoeConfig,
        layer: int,
        p: Callable[[str], jax.Array],
        x: jax.Array,
        live: jax.Array,
        *,
        mesh: Mesh,
        rules: ShardingRules,
    ) -> jax.Array:
        """See `GQAFamily.mlp`; of experts the result is complete."""
        if layer in config.dense_layers:
            return super().mlp(config, layer, p, x, live, mesh=mesh, rules=rules)
        where = {"mesh": mesh, "rules": rules}
        route = functools.partial(
            route_softmax, k=config.experts_per_token, normalise=config.normalise_weights
        )
        ids, weights = route_on_shards(route, x, p("mlp.router"), **where)
        experts = (p("mlp.experts.gate"), p("mlp.experts.up"), p("mlp.experts.down"))
        return moe(x, ids, weights, live, *experts, **where)

    def sharded_sizes(self, config: Qwen3MoeConfig) -> dict[str, tuple[str, int]]:
        """See `GQAFamily.sharded_sizes`."""
        sizes = super().sharded_sizes(config)
        if not config.dense_layers:
            del sizes["ffn"]
        if len(config.dense_layers) < config.num_layers:
            sizes["experts"] = ("num_experts", config.num_experts)
            sizes["expert_ffn"] = ("moe_intermediate_size", config.expert_ffn)
        return sizes


def _num_experts(hf: Mapping[str, Any]) -> int:
    """Under its name in released checkpoints or the one that transformers 5 writes."""
    names = [n for n in ("num_experts", "num_local_experts") if hf.get(n) is not None]
    values = [hf_config.integer(hf, name) for name in names or ["num_experts"]]
    if len(set(values)) > 1:
        raise ValueError(f"num_local_experts: {values[1]} differs from num_experts {values[0]}")
    return values[0]


def _dense_layers(hf: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Layers in `mlp_only_layers`, and all but every `decoder_sparse_step`-th."""
    listed = hf.get("mlp_only_layers") or []
    if not isinstance(listed, list) or any(n not in range(num_layers) for n in listed):
        raise ValueError(
            f"mlp_only_layers: expected a list of layer numbers below {num_layers}, got {listed!r}"
        )
    step = hf_config.integer(hf, "decoder_sparse_step", default=1)
    return tuple(n for n in range(num_layers) if n in listed or (n + 1) % step)


QWEN3_MOE = Qwen3MoeFamily(Qwen3MoeConfig)
