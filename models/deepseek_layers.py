"""The layers of DeepSeek-V3: what parameters they have, and one layer of a step."""

import functools

import jax
from flax import nnx
from jax.sharding import Mesh

from models.deepseek_config import DeepSeekConfig
from models.hook import call_hook
from models.interface import Hook, Mode, StepBatch
from models.layers import (
    GatedMLP,
    RMSNorm,
    Table,
    declare,
    gated_mlp,
    output_projection,
    rms_norm,
)
from models.mla import CACHE_AXES, LatentAttention, Parameters, latent_attention
from models.moe import Experts, moe, route_on_shards, route_sigmoid_grouped
from models.mtp import MTPModule
from models.sharding import ShardingRules


class MixtureOfExperts(nnx.Module):
    """Router, experts, and the MLP that every token passes (if any)."""

    def __init__(self, config: DeepSeekConfig, prefix: str) -> None:
        c, router = config, f"{prefix}.gate"
        shape = (c.hidden_size, c.num_experts)
        self.router = declare(f"{router}.weight", shape, ("embed", None), c.dtype, inputs=1)
        self.bias = declare(f"{router}.e_score_correction_bias", shape[1:], (None,), "float32")
        self.experts = Experts(
            f"{prefix}.experts", c.hidden_size, c.expert_ffn, c.num_experts, c.dtype
        )
        if c.shared_experts:
            self.shared = GatedMLP(f"{prefix}.shared_experts", c.hidden_size, c.shared_ffn, c.dtype)


class DecoderLayer(nnx.Module):
    """Attention, then an MLP or experts, each behind a norm and added to the residual stream."""

    def __init__(self, config: DeepSeekConfig, layer: int) -> None:
        c, prefix = config, f"model.layers.{layer}"
        self.attention_norm = RMSNorm(
            f"{prefix}.input_layernorm.weight", c.hidden_size, "embed", c.dtype
        )
        self.attention = LatentAttention(f"{prefix}.self_attn", c.hidden_size, c.attention, c.dtype)
        self.mlp_norm = RMSNorm(
            f"{prefix}.post_attention_layernorm.weight", c.hidden_size, "embed", c.dtype
        )
        self.mlp = (
            GatedMLP(f"{prefix}.mlp", c.hidden_size, c.ffn_size, c.dtype)
            if c.is_dense(layer)
            else MixtureOfExperts(c, f"{prefix}.mlp")
        )


class Decoder(nnx.Module):
    """Embedding, layers, final norm, the head unless it is tied, and the MTP module if wanted."""

    def __init__(self, config: DeepSeekConfig) -> None:
        c = config
        self.embedding = Table("model.embed_tokens.weight", c.vocab_size, c.hidden_size, c.dtype)
        self.layers = nnx.List([DecoderLayer(c, layer) for layer in range(c.num_layers)])
        self.norm = RMSNorm("model.norm.weight", c.hidden_size, "embed", c.dtype)
        if not c.tied:
            self.head = Table("lm_head.weight", c.vocab_size, c.hidden_size, c.dtype)
        if c.mtp:
            layer = DecoderLayer(c, c.num_layers)
            self.mtp = MTPModule(mtp_prefix(c), c.hidden_size, layer, c.dtype)


def mtp_prefix(config: DeepSeekConfig) -> str:
    """Where a checkpoint keeps the MTP module: as one more layer."""
    return f"model.layers.{config.num_layers}"


def run_layer(
    config: DeepSeekConfig,
    layer: int,
    p: Parameters,
    x: jax.Array,
    cache: jax.Array,
    batch: StepBatch,
    rope: tuple[jax.Array, jax.Array],
    *,
    mesh: Mesh,
    rules: ShardingRules,
    mode: Mode,
    hook: Hook | None,
    hook_operands: tuple[jax.Array, ...],
) -> tuple[jax.Array, jax.Array]:
    """The residual stream x [dp*T, D] through one layer: (x, the layer's new cache).

    `p` gives the parameters of `DecoderLayer`; `layer` is the number that the hook is told.
    """
    where = {"mesh": mesh, "rules": rules}
    residual = rules.sharding(mesh, ("batch", None))
    h = rms_norm(x, p("attention_norm.scale"), config.rms_eps)
    attended, cache = latent_attention(
        h,
        lambda name: p(f"attention.{name}"),
        config.attention,
        cache,
        batch,
        rope,
        interleaved=config.interleaved,
        mode=mode,
        scale=config.softmax_scale,
        **where,
    )
    out = output_projection(attended, p("attention.o"))
    x = x + jax.lax.with_sharding_constraint(out, residual)  # sums the heads: one all-reduce
    x = call_hook(hook, hook_operands, x, cache, layer, cache_axes=CACHE_AXES, **where)
    h = rms_norm(x, p("mlp_norm.scale"), config.rms_eps)
    if config.is_dense(layer):
        out = gated_mlp(h, p("mlp.gate"), p("mlp.up"), p("mlp.down"))
        return x + jax.lax.with_sharding_constraint(out, residual), cache
    return x + _experts(config, p, h, batch.rows >= 0, **where), cache


def _experts(
    config: DeepSeekConfig,
    p: Parameters,
    h: jax.Array,
    live: jax.Array,
    *,
    mesh: Mesh,
    rules: ShardingRules,
) -> jax.Array:
    """h [dp*T, D] through the experts of a layer, sharded like the residual stream."""
    route = functools.partial(
        route_sigmoid_grouped,
        k=config.experts_per_token,
        groups=config.groups,
        top_groups=config.top_groups,
        normalise=config.normalise_weights,
        scale=config.weight_scale,
    )
    where = {"mesh": mesh, "rules": rules}
    ids, weights = route_on_shards(route, h, p("mlp.router"), p("mlp.bias"), **where)
    experts = (p("mlp.experts.gate"), p("mlp.experts.up"), p("mlp.experts.down"))
    shared = None
    if config.shared_experts:
        shared = (p("mlp.shared.gate"), p("mlp.shared.up"), p("mlp.shared.down"))
    return moe(h, ids, weights, live, *experts, shared=shared, **where)
