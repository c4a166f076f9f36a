"""DeepSeek-V3 and R1: latent attention, experts chosen in groups, and the MTP module."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from models import mtp
from models.deepseek_config import DeepSeekConfig, read_config
from models.deepseek_layers import Decoder, mtp_prefix, run_layer
from models.interface import Caches, CacheSpec, Hook, Mode, Params, ParamSpec, StepBatch
from models.layers import abstract_params, embed, rms_norm, vocabulary_logits
from models.rope import rope_tables
from models.sharding import ShardingRules


@functools.lru_cache(maxsize=16)
def _abstract_params(config: DeepSeekConfig) -> dict[str, ParamSpec]:
    return abstract_params(lambda: Decoder(config))


class DeepSeekFamily:
    """`interface.DraftingFamily` of DeepSeek-V3, DeepSeek-R1 and models of their architecture."""

    name = DeepSeekConfig.family
    architectures: tuple[str, ...] = ("DeepseekV3ForCausalLM",)

    def config_from_hf(self, hf: Mapping[str, Any]) -> DeepSeekConfig:
        """Read config.json; ValueError names what is missing or not supported."""
        return read_config(hf)

    def abstract_params(self, config: DeepSeekConfig) -> dict[str, ParamSpec]:
        """Every parameter by path; see `deepseek_layers.Decoder`."""
        return dict(_abstract_params(config))

    def shared_tensors(self, config: DeepSeekConfig) -> dict[str, str]:
        """Tensors that the MTP module has as copies: name -> the main model's, which it uses."""
        head = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
        return mtp.shared_tensors(mtp_prefix(config), head) if config.mtp else {}

    def ignores_tensor(self, config: DeepSeekConfig, name: str) -> bool:
        """A tied head stored all the same, old rotary tables, and what of MTP is not used.

        That is the whole module without `config.mtp`, its copies of embedding and head with it.
        """
        if name.endswith("rotary_emb.inv_freq") or (config.tied and name == "lm_head.weight"):
            return True
        of_mtp = config.mtp_layers > 0 and name.startswith(f"{mtp_prefix(config)}.")
        return of_mtp and (not config.mtp or name in self.shared_tensors(config))

    def cache_spec(self, config: DeepSeekConfig) -> CacheSpec:
        """One array of latents and rotated keys per layer, the MTP module's last."""
        return CacheSpec(
            config.num_layers + config.mtp,
            num_kv_heads=1,
            head_dim=config.attention.latent + config.attention.rope_dim,
            dtype=config.dtype,
            kind="mla",
        )

    def check_mesh(self, config: DeepSeekConfig, mesh: Mesh, rules: ShardingRules) -> None:
        """Raise ValueError naming each field that the mesh does not divide."""
        c = config
        dense, experts, shared = {}, {}, {}
        if c.num_dense_layers:
            dense["ffn"] = ("intermediate_size", c.ffn_size)
        if c.num_dense_layers < c.num_layers or c.mtp:
            experts["experts"] = ("n_routed_experts", c.num_experts)
            experts["expert_ffn"] = ("moe_intermediate_size", c.expert_ffn)
            shared["ffn"] = ("moe_intermediate_size * n_shared_experts", c.shared_ffn)
        everywhere = {
            "heads": ("num_attention_heads", c.attention.heads),
            "vocab": ("vocab_size", c.vocab_size),
            "embed": ("hidden_size", c.hidden_size),
        }
        rules.check(mesh, everywhere, dense, experts, shared)

    def forward(
        self,
        config: DeepSeekConfig,
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
        rope = rope_tables(config.rope, config.attention.rope_dim, batch.positions)
        x = _embedded(params, batch.tokens, mesh, rules)
        new_caches = []
        for layer, cache in enumerate(caches):
            x, cache = run_layer(
                config,
                layer,
                functools.partial(_parameter, params, f"layers.{layer}"),
                x,
                cache,
                batch,
                rope,
                mesh=mesh,
                rules=rules,
                mode=mode,
                hook=hook,
                hook_operands=hook_operands,
            )
            new_caches.append(cache)
        return rms_norm(x, params["norm.scale"], config.rms_eps), tuple(new_caches)

    def logits(
        self,
        config: DeepSeekConfig,
        params: Params,
        hidden: jax.Array,
        *,
        mesh: Mesh,
        rules: ShardingRules,
    ) -> jax.Array:
        """See `interface.ModelFamily.logits`."""
        table = params["embedding.table" if config.tied else "head.table"]
        return vocabulary_logits(hidden, table, mesh=mesh, rules=rules)

    def draft(
        self,
        config: DeepSeekConfig,
        params: Params,
        batch: StepBatch,
        hidden: jax.Array,
        next_tokens: jax.Array,
        cache: jax.Array,
        *,
        mesh: Mesh,
        rules: ShardingRules,
        mode: Mode,
        hook: Hook | None = None,
        hook_operands: tuple[jax.Array, ...] = (),
    ) -> tuple[jax.Array, jax.Array]:
        """See `interface.DraftingFamily.draft`; needs `config.mtp`."""
        embedded = _embedded(params, next_tokens, mesh, rules)
        x, cache = run_layer(
            config,
            config.num_layers,
            functools.partial(_parameter, params, "mtp.layer"),
            mtp.combine(params, embedded, hidden, config.rms_eps),
            cache,
            batch,
            rope_tables(config.rope, config.attention.rope_dim, batch.positions),
            mesh=mesh,
            rules=rules,
            mode=mode,
            hook=hook,
            hook_operands=hook_operands,
        )
        return rms_norm(x, params["mtp.norm.scale"], config.rms_eps), cache

    def draft_logits(
        self,
        config: DeepSeekConfig,
        params: Params,
        state: jax.Array,
        *,
        mesh: Mesh,
        rules: ShardingRules,
    ) -> jax.Array:
        """See `interface.DraftingFamily.draft_logits`: the main model's head."""
        return self.logits(config, params, state, mesh=mesh, rules=rules)


def _embedded(params: Params, tokens: jax.Array, mesh: Mesh, rules: ShardingRules) -> jax.Array:
    x = embed(params["embedding.table"], tokens)
    return jax.lax.with_sharding_constraint(x, rules.sharding(mesh, ("batch", None)))


def _parameter(params: Params, layer: str, name: str) -> jax.Array:
    return params[f"{layer}.{name}"]


DEEPSEEK_V3 = DeepSeekFamily()
