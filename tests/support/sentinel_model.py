"""A model family whose cache says where each of its bytes belongs; see sentinel_values.py.

Its values go into the pages by the models' own page write and follow the same hook, so that plans,
triggers and writes do what they do for any model. Its tokens need no cache, and show no damage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from sentinel_values import (
    HEAD_DIM,
    HIDDEN,
    LATENT,
    LAYERS,
    POSITIONS,
    ROPE,
    VOCABULARY,
    Sentinels,
    next_token,
)

from jaxdisagg.config import NodeConfig
from jaxdisagg.mesh import make_mesh
from jaxdisagg.model_loading import LoadedModel
from models import gqa, mla
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
)
from models.sharding import ShardingRules, make_rules

QUERY_HEADS = 24  # as the vocabulary
QUERY_DIM = 4


@dataclass(frozen=True, kw_only=True)
class SentinelConfig(ModelConfig):
    """`kv_heads` as in `Sentinels`."""

    family = "sentinel"

    kv_heads: int


def sentinel_config(kv_heads: int) -> SentinelConfig:
    """The config with so many KV heads, 0 for a latent cache."""
    return SentinelConfig(
        vocab_size=VOCABULARY,
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        max_position=POSITIONS,
        dtype="float32",
        kv_heads=kv_heads,
    )


class SentinelFamily:
    """`models.interface.ModelFamily` that needs no parameters."""

    name = SentinelConfig.family
    architectures = ("SentinelForTests",)

    def config_from_hf(self, hf: Mapping[str, Any]) -> SentinelConfig:
        """Of config.json it reads the number of KV heads alone."""
        return sentinel_config(hf["num_key_value_heads"])

    def abstract_params(self, config: SentinelConfig) -> dict[str, ParamSpec]:
        """One that nothing reads: a checkpoint holds something."""
        source = HFSource("nothing", (1,), (1,), (0,))
        return {"nothing": ParamSpec((1,), config.dtype, (None,), (source,))}

    def ignores_tensor(self, config: SentinelConfig, name: str) -> bool:
        return False

    def check_mesh(self, config: SentinelConfig, mesh: Mesh, rules: ShardingRules) -> None:
        rules.check(mesh, {"heads": ("query heads", QUERY_HEADS), "vocab": ("words", VOCABULARY)})

    def cache_spec(self, config: SentinelConfig) -> CacheSpec:
        if config.kv_heads:
            return CacheSpec(LAYERS, config.kv_heads, HEAD_DIM, config.dtype)
        return CacheSpec(LAYERS, 1, LATENT + ROPE, config.dtype, "mla")

    def forward(
        self,
        config: SentinelConfig,
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
        where: dict[str, Any] = {"mesh": mesh, "rules": rules}
        place = batch.tokens * POSITIONS + batch.positions  # [T]
        x = (place[:, None] * HIDDEN + jnp.arange(HIDDEN) + 1).astype(jnp.float32)
        new = []
        for layer, cache in enumerate(caches):
            # Each layer waits for the one before, as in a model: x may be infinite, for all that
            # the compiler knows.
            zero = x[:, 0] * 0
            values = _values(Sentinels(config.kv_heads), place, layer) + zero[:, None, None, None]
            write = _write_latent if not config.kv_heads else _write_heads
            cache = write(values, cache, batch, mode, where)
            x = call_hook(hook, hook_operands, x, cache, layer, **where)
            new.append(cache)
        return x, tuple(new)

    def logits(
        self,
        config: SentinelConfig,
        params: Params,
        hidden: jax.Array,
        *,
        mesh: Mesh,
        rules: ShardingRules,
    ) -> jax.Array:
        token = (hidden[:, 0].astype(jnp.int32) - 1) // (HIDDEN * POSITIONS)
        logits = 8.0 * jax.nn.one_hot(next_token(token), VOCABULARY)
        sharding = rules.sharding(mesh, ("batch", "vocab"))
        return jax.lax.with_sharding_constraint(logits, sharding)


def _values(sentinels: Sentinels, place: jax.Array, layer: int) -> jax.Array:
    """f32 [T, heads, planes, values]."""
    heads, planes, values = sentinels.row
    code = (place * LAYERS + layer)[:, None] * heads + jnp.arange(heads)
    code = code[..., None] * planes + jnp.arange(planes)
    code = code[..., None] * values + jnp.arange(values)
    return (code + 1).astype(jnp.float32)


def _write_heads(
    values: jax.Array, cache: jax.Array, batch: StepBatch, mode: Mode, where: dict[str, Any]
) -> jax.Array:
    q = jnp.zeros((len(values), QUERY_HEADS, HEAD_DIM), jnp.float32)
    k, v = values[:, :, 0], values[:, :, 1]
    return gqa.write_and_attend(q, k, v, cache, batch, mode=mode, scale=1.0, **where)[1]


def _write_latent(
    values: jax.Array, cache: jax.Array, batch: StepBatch, mode: Mode, where: dict[str, Any]
) -> jax.Array:
    tokens = len(values)
    weights = jnp.zeros((QUERY_HEADS, QUERY_DIM, LATENT), jnp.float32)
    return mla.write_and_attend(
        jnp.zeros((tokens, QUERY_HEADS, QUERY_DIM), jnp.float32),
        jnp.zeros((tokens, QUERY_HEADS, ROPE), jnp.float32),
        values[:, 0, 0],
        cache,
        batch,
        weights,
        weights,
        mode=mode,
        scale=1.0,
        **where,
    )[1]


def load(node: NodeConfig, devices: Sequence[jax.Device], kv_heads: int) -> LoadedModel:
    """The sentinel model on the node's mesh; in f32, whatever the node says of its dtype."""
    config, family = sentinel_config(kv_heads), SentinelFamily()
    mesh = make_mesh(
        tp=node.mesh.tp,
        dp=node.mesh.dp,
        kv_heads=family.cache_spec(config).num_kv_heads,
        devices=devices,
    )
    name = f"sentinel-{kv_heads}"
    return LoadedModel(name, family, config, {}, mesh, make_rules(), name)
