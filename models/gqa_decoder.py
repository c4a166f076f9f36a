"""Decoders with grouped-query attention, rotary positions and a gated MLP or experts in each layer.

What Qwen3, Llama and Qwen3-MoE share: config, parameters, the forward pass.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from models import hf_config
from models.gqa import GQAttention, write_and_attend
from models.hook import call_hook
from models.interface import (
    Caches,
    CacheSpec,
    Hook,
    Mode,
    ModelConfig,
    Params,
    ParamSpec,
    StepBatch,
    require_positive,
)
from models.layers import (
    GatedMLP,
    RMSNorm,
    Table,
    abstract_params,
    embed,
    gated_mlp,
    output_projection,
    rms_norm,
    vocabulary_logits,
)
from models.quantization import read_quantization
from models.rope import RopeConfig, rope_from_hf, rope_tables, rotate
from models.sharding import ShardingRules


@dataclass(frozen=True, kw_only=True)
class GQAConfig(ModelConfig):
    """A decoder with grouped-query attention, rotary positions and a gated MLP in each layer.

    A family with experts adds theirs and says which layers keep the MLP (`models.qwen3_moe`).
    """

    architectures: ClassVar[tuple[str, ...]]
    qk_norm: ClassVar[bool]

    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    rms_eps: float
    rope: RopeConfig
    tied: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "num_heads", "num_kv_heads", "head_dim", "ffn_size")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_key_value_heads: {self.num_kv_heads} does not divide "
                f"num_attention_heads {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: {self.head_dim} is odd; rotary positions need pairs")


class DecoderLayer(nnx.Module):
    """Attention and `mlp`, each behind a norm and added to the residual stream."""

    def __init__(self, config: GQAConfig, layer: int, mlp: nnx.Module) -> None:
        c, prefix = config, f"model.layers.{layer}"
        self.attention_norm = RMSNorm(
            f"{prefix}.input_layernorm.weight", c.hidden_size, "embed", c.dtype
        )
        self.attention = GQAttention(
            f"{prefix}.self_attn",
            c.hidden_size,
            c.num_heads,
            c.num_kv_heads,
            c.head_dim,
            c.dtype,
            qk_norm=c.qk_norm,
        )
        self.mlp_norm = RMSNorm(
            f"{prefix}.post_attention_layernorm.weight", c.hidden_size, "embed", c.dtype
        )
        self.mlp = mlp


class Decoder(nnx.Module):
    """Embedding, layers, final norm and, unless it is tied to the embedding, the head."""

    def __init__(self, config: GQAConfig, mlp: Callable[[int], nnx.Module]) -> None:
        c = config
        self.embedding = Table("model.embed_tokens.weight", c.vocab_size, c.hidden_size, c.dtype)
        self.layers = nnx.List(
            [DecoderLayer(c, layer, mlp(layer)) for layer in range(c.num_layers)]
        )
        self.norm = RMSNorm("model.norm.weight", c.hidden_size, "embed", c.dtype)
        if not c.tied:
            self.head = Table("lm_head.weight", c.vocab_size, c.hidden_size, c.dtype)


@functools.lru_cache(maxsize=16)
def _abstract_params(family: "GQAFamily", config: GQAConfig) -> dict[str, ParamSpec]:
    declare_mlp = functools.partial(family.declare_mlp, config)
    return abstract_params(lambda: Decoder(config, declare_mlp))


class GQAFamily[C: GQAConfig]:
    """`interface.ModelFamily` for one config; a family with other MLPs overrides what is theirs."""

    def __init__(self, config_type: type[C]) -> None:
        self.name = config_type.family
        self.architectures = config_type.architectures
        self.config_type = config_type

    def config_from_hf(self, hf: Mapping[str, Any]) -> C:
        """Read config.json; ValueError names what is missing or not supported."""
        return self.config_type(**self.fields_from_hf(hf))

    def fields_from_hf(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the config; ValueError as `config_from_hf`."""
        hf_config.refuse(
            hf,
            {
                "hidden_act": ("silu",),
                "attention_bias": (False, None),
                "mlp_bias": (False, None),
            },
        )
        read_quantization(hf)  # refuses what loading could not undo
        hf_config.refuse_sliding_window(hf)
        heads = hf_config.integer(hf, "num_attention_heads")
        hidden = hf_config.integer(hf, "hidden_size")
        if hf.get("head_dim") is None and hidden % heads:
            raise ValueError(f"head_dim: missing, and {heads} heads do not divide hidden_size")
        return {
            "vocab_size": hf_config.integer(hf, "vocab_size"),
            "num_layers": hf_config.integer(hf, "num_hidden_layers"),
            "hidden_size": hidden,
            "max_position": hf_config.integer(hf, "max_position_embeddings"),
            "dtype": hf_config.dtype_of(hf),
            "num_heads": heads,
            "num_kv_heads": hf_config.integer(hf, "num_key_value_heads", default=heads),
            "head_dim": hf_config.integer(hf, "head_dim", default=hidden // heads),
            "ffn_size": hf_config.integer(hf, "intermediate_size"),
            "rms_eps": hf_config.number(hf, "rms_norm_eps", default=1e-6),
            "rope": rope_from_hf(hf),
            "tied": hf_config.flag(hf, "tie_word_embeddings", default=False),
        }

    def abstract_params(self, config: C) -> dict[str, ParamSpec]:
        """Every parameter by path; see the nnx modules above."""
        return dict(_abstract_params(self, config))

    def declare_mlp(self, config: C, layer: int) -> nnx.Module:
        """The MLP of a layer."""
        return GatedMLP(
            f"model.layers.{layer}.mlp", config.hidden_size, config.ffn_size, config.dtype
        )

    def mlp(
        self,
        config: C,
        layer: int,
        p: Callable[[str], jax.Array],
        x: jax.Array,
        live: jax.Array,
        *,
        mesh: Mesh,
        rules: ShardingRules,
    ) -> jax.Array:
        """The MLP of a layer on x [dp*T, D]; the result may be partial sums, to be constrained.

        `p` gives the layer's parameters by name, `live` bool [dp*T] is False for rows of padding.
        """
        return gated_mlp(x, p("mlp.gate"), p("mlp.up"), p("mlp.down"))

    def ignores_tensor(self, config: C, name: str) -> bool:
        """A tied head stored all the same, and the rotary tables of old checkpoints."""
        return (config.tied and name == "lm_head.weight") or name.endswith("rotary_emb.inv_freq")

    def cache_spec(self, config: C) -> CacheSpec:
        """One grouped-query array per layer."""
        return CacheSpec(config.num_layers, config.num_kv_heads, config.head_dim, config.dtype)

    def check_mesh(self, config: C, mesh: Mesh, rules: ShardingRules) -> None:
        """Raise ValueError naming each field that the mesh does not divide."""
        rules.check(mesh, self.sharded_sizes(config))

    def sharded_sizes(self, config: C) -> dict[str, tuple[str, int]]:
        """Logical axis -> (field of config.json, size) of all that the mesh must divide."""
        return {
            "heads": ("num_attention_heads", config.num_heads),
            "kv_heads": ("num_key_value_heads", config.num_kv_heads),
            "ffn": ("intermediate_size", config.ffn_size),
            "vocab": ("vocab_size", config.vocab_size),
            "embed": ("hidden_size", config.hidden_size),
        }

    def forward(
        self,
        config: C,
        params: Params,
        batch: StepBatch,
        caches: Caches,
        *,
        mesh: Mesh,
        rules: ShardingRules,
        mode: Mode,
        hook: Hook | None = None,
        hook_operands: tuple[jax.Array, ...] = (),
    ) -> tuple[jax.Array, Caches]:
        """See `interface.ModelFamily.forward`."""
        residual = rules.sharding(mesh, ("batch", None))
        norm = functools.partial(rms_norm, eps=config.rms_eps)
        rope = rope_tables(config.rope, config.head_dim, batch.positions)
        live = batch.rows >= 0

        def reduced(x: jax.Array) -> jax.Array:  # sums the shards' parts: one all-reduce
            return jax.lax.with_sharding_constraint(x, residual)

        x = reduced(embed(params["embedding.table"], batch.tokens))
        new_caches = []
        for layer, cache in enumerate(caches):
            p = functools.partial(_layer_param, params, layer)
            h = norm(x, p("attention_norm.scale"))
            q = jnp.einsum("td,dnh->tnh", h, p("attention.q"))
            k = jnp.einsum("td,dkh->tkh", h, p("attention.k"))
            v = jnp.einsum("td,dkh->tkh", h, p("attention.v"))
            if config.qk_norm:
                q, k = norm(q, p("attention.q_norm")), norm(k, p("attention.k_norm"))
            out, cache = write_and_attend(
                rotate(q, rope),
                rotate(k, rope),
                v,
                cache,
                batch,
                mesh=mesh,
                rules=rules,
                mode=mode,
                scale=config.head_dim**-0.5,
            )
            x = x + reduced(output_projection(out, p("attention.o")))
            x = call_hook(hook, hook_operands, x, cache, layer, mesh=mesh, rules=rules)
            h = norm(x, p("mlp_norm.scale"))
            x = x + reduced(self.mlp(config, layer, p, h, live, mesh=mesh, rules=rules))
            new_caches.append(cache)
        return norm(x, params["norm.scale"]), tuple(new_caches)

    def logits(
        self,
        config: C,
        params: Params,
        hidden: jax.Array,
        *,
        mesh: Mesh,
        rules: ShardingRules,
    ) -> jax.Array:
        """See `interface.ModelFamily.logits`."""
        table = params["embedding.table" if config.tied else "head.table"]
        return vocabulary_logits(hidden, table, mesh=mesh, rules=rules)


def _layer_param(params: Params, layer: int, name: str) -> jax.Array:
    return params[f"layers.{layer}.{name}"]
