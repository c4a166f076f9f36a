"""Qwen2 for jaxdisagg, from outside its tree: Llama's architecture with biases on q, k and v."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
    HFSource,
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
    parameter,
    project_to_vocabulary,
    rms_norm,
)
from models.quantization import read_quantization
from models.rope import RopeConfig, rope_from_hf, rope_tables, rotate
from models.sharding import ShardingRules


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(ModelConfig):
    """What the programs are made from. Frozen and hashable: a jitted step closes over it."""

    family = "qwen2"

    num_heads: int
    num_kv_heads: int
    ffn_size: int
    rms_eps: float
    rope: RopeConfig
    tied: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "num_heads", "num_kv_heads", "ffn_size")
        if self.num_heads % self.num_kv_heads or self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"num_attention_heads: {self.num_heads} must be a multiple of num_key_value_heads "
                f"{self.num_kv_heads} and cut hidden_size {self.hidden_size} into even heads"
            )

    @property
    def head_dim(self) -> int:
        """Qwen2 has no head_dim of its own."""
        return self.hidden_size // self.num_heads


class BiasedAttention(GQAttention):
    """The projections of `GQAttention`, with a bias for each output of q, k and v."""

    def __init__(self, prefix: str, c: Qwen2Config) -> None:
        super().__init__(
            prefix, c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim, c.dtype, qk_norm=False
        )
        self.q_bias = bias(f"{prefix}.q_proj.bias", c.num_heads, "heads", c)
        self.k_bias = bias(f"{prefix}.k_proj.bias", c.num_kv_heads, "kv_heads", c)
        self.v_bias = bias(f"{prefix}.v_proj.bias", c.num_kv_heads, "kv_heads", c)


def bias(name: str, heads: int, axis: str, c: Qwen2Config) -> nnx.Param:
    """[heads, head_dim] here, one flat vector on disk: a source that `declare` has no form for."""
    source = HFSource(name, (heads * c.head_dim,), (heads, c.head_dim), order=(0, 1))
    return parameter((heads, c.head_dim), (axis, "head_dim"), c.dtype, source)


class DecoderLayer(nnx.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self, c: Qwen2Config, layer: int) -> None:
        prefix, norm = f"model.layers.{layer}", (c.hidden_size, "embed", c.dtype)
        self.attention_norm = RMSNorm(f"{prefix}.input_layernorm.weight", *norm)
        self.attention = BiasedAttention(f"{prefix}.self_attn", c)
        self.mlp_norm = RMSNorm(f"{prefix}.post_attention_layernorm.weight", *norm)
        self.mlp = GatedMLP(f"{prefix}.mlp", c.hidden_size, c.ffn_size, c.dtype)


class Decoder(nnx.Module):
    """Every parameter of the model, by the name that the forward pass uses."""

    def __init__(self, c: Qwen2Config) -> None:
        self.embedding = Table("model.embed_tokens.weight", c.vocab_size, c.hidden_size, c.dtype)
        self.layers = nnx.List([DecoderLayer(c, layer) for layer in range(c.num_layers)])
        self.norm = RMSNorm("model.norm.weight", c.hidden_size, "embed", c.dtype)
        if not c.tied:
            self.head = Table("lm_head.weight", c.vocab_size, c.hidden_size, c.dtype)


class Qwen2Family:
    """`models.interface.ModelFamily` of Qwen2."""

    name = Qwen2Config.family
    architectures = ("Qwen2ForCausalLM",)

    def config_from_hf(self, hf: Mapping[str, Any]) -> Qwen2Config:
        """Read config.json; what would change the computation is read or refused by name."""
        hf_config.refuse(hf, {"hidden_act": ("silu",)})
        hf_config.refuse_sliding_window(hf)
        read_quantization(hf)  # refuses what loading could not undo
        heads = hf_config.integer(hf, "num_attention_heads")
        return Qwen2Config(
            vocab_size=hf_config.integer(hf, "vocab_size"),
            num_layers=hf_config.integer(hf, "num_hidden_layers"),
            hidden_size=hf_config.integer(hf, "hidden_size"),
            max_position=hf_config.integer(hf, "max_position_embeddings"),
            dtype=hf_config.dtype_of(hf),
            num_heads=heads,
            num_kv_heads=hf_config.integer(hf, "num_key_value_heads", default=heads),
            ffn_size=hf_config.integer(hf, "intermediate_size"),
            rms_eps=hf_config.number(hf, "rms_norm_eps", default=1e-6),
            rope=rope_from_hf(hf),
            tied=hf_config.flag(hf, "tie_word_embeddings", default=False),
        )

    def abstract_params(self, config: Qwen2Config) -> dict[str, ParamSpec]:
        """Every parameter by path: `layers.0.attention.q_bias` and so on."""
        return abstract_params(lambda: Decoder(config))

    def ignores_tensor(self, config: Qwen2Config, name: str) -> bool:
        """Tied checkpoints may store the head all the same."""
        return config.tied and name == "lm_head.weight"

    def cache_spec(self, config: Qwen2Config) -> CacheSpec:
        """One grouped-query array per layer."""
        return CacheSpec(config.num_layers, config.num_kv_heads, config.head_dim, config.dtype)

    def check_mesh(self, config: Qwen2Config, mesh: Mesh, rules: ShardingRules) -> None:
        """Raise ValueError naming each field that the mesh does not divide."""
        rules.check(
            mesh,
            {
                "heads": ("num_attention_heads", config.num_heads),
                "kv_heads": ("num_key_value_heads", config.num_kv_heads),
                "ffn": ("intermediate_size", config.ffn_size),
                "vocab": ("vocab_size", config.vocab_size),
                "embed": ("hidden_size", config.hidden_size),
            },
        )

    def forward(
        self,
        config: Qwen2Config,
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
        """Hidden states [dp*T, D] after the final norm, and the caches with the batch's K/V."""
        where = {"mesh": mesh, "rules": rules}
        norm = functools.partial(rms_norm, eps=config.rms_eps)
        rope = rope_tables(config.rope, config.head_dim, batch.positions)
        residual = rules.sharding(mesh, ("batch", None))

        def reduced(x: jax.Array) -> jax.Array:  # sums the shards' parts: one all-reduce
            return jax.lax.with_sharding_constraint(x, residual)

        x = reduced(embed(params["embedding.table"], batch.tokens))
        new_caches = []
        for layer, cache in enumerate(caches):
            p = of_layer(params, layer)
            h = norm(x, p["attention_norm.scale"])
            q = jnp.einsum("td,dnh->tnh", h, p["attention.q"]) + p["attention.q_bias"]
            k = jnp.einsum("td,dkh->tkh", h, p["attention.k"]) + p["attention.k_bias"]
            v = jnp.einsum("td,dkh->tkh", h, p["attention.v"]) + p["attention.v_bias"]
            q, k, scale = rotate(q, rope), rotate(k, rope), config.head_dim**-0.5
            out, cache = write_and_attend(q, k, v, cache, batch, mode=mode, scale=scale, **where)
            x = x + reduced(output_projection(out, p["attention.o"]))
            x = call_hook(hook, hook_operands, x, cache, layer, **where)
            h = norm(x, p["mlp_norm.scale"])
            x = x + reduced(gated_mlp(h, p["mlp.gate"], p["mlp.up"], p["mlp.down"]))
            new_caches.append(cache)
        return norm(x, params["norm.scale"]), tuple(new_caches)

    def logits(
        self,
        config: Qwen2Config,
        params: Params,
        hidden: jax.Array,
        *,
        mesh: Mesh,
        rules: ShardingRules,
    ) -> jax.Array:
        """f32 [dp*R, V], sharded over the vocabulary."""
        table = params["embedding.table" if config.tied else "head.table"]
        sharding = rules.sharding(mesh, ("batch", "vocab"))
        return jax.lax.with_sharding_constraint(project_to_vocabulary(hidden, table), sharding)


def of_layer(params: Params, layer: int) -> Params:
    """The parameters of one layer, by the rest of their path."""
    prefix = f"layers.{layer}."
    return {k.removeprefix(prefix): v for k, v in params.items() if k.startswith(prefix)}


QWEN2 = Qwen2Family()
