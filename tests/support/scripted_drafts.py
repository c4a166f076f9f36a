"""A family that drafts what a test has written down, beside a real main model.

Its module also keeps what it is given: row i of its cache layer holds the hidden state of token i
and the token that follows. It drafts the scripted token only where its attention covered exactly
the rows 0..i, so a wrong page, length or position shows as a draft that is never right.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdisagg.config import NodeConfig
from jaxdisagg.model_loading import LoadedModel, load_model
from models.gqa import write_and_attend
from models.hook import call_hook
from models.interface import Hook, Mode, ModelFamily, Params, StepBatch
from models.sharding import ShardingRules

SCRIPT = "script"


class ScriptedDrafts:
    """`DraftingFamily` around a grouped-query family; `params["script"]` is i32 [positions, V].

    For a newest token t at position p the draft of p+1 is script[p, t]. KV heads times head size
    must be the hidden size or more: a cache row is a hidden state, and zeros.
    """

    def __init__(self, base: ModelFamily) -> None:
        self._base = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def cache_spec(self, config: Any) -> Any:
        spec = self._base.cache_spec(config)
        return dataclasses.replace(spec, num_layers=config.num_layers + 1)

    def draft(
        self,
        config: Any,
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
        heads = (-1, config.num_kv_heads, config.head_dim)
        spare = config.num_kv_heads * config.head_dim - config.hidden_size
        values = jnp.zeros(heads[1:], hidden.dtype)
        values = jnp.broadcast_to(values, (len(next_tokens), *heads[1:]))
        values = values.at[:, :, 0].set(next_tokens[:, None].astype(hidden.dtype))
        values = values.at[:, :, 1].set(batch.positions[:, None].astype(hidden.dtype))
        out, cache = write_and_attend(
            jnp.zeros((len(next_tokens), config.num_heads, config.head_dim), hidden.dtype),
            jnp.pad(hidden, ((0, 0), (0, spare))).reshape(heads),
            values,
            cache,
            batch,
            mesh=mesh,
            rules=rules,
            mode=mode,
            scale=1.0,
        )
        out = jax.lax.with_sharding_constraint(out, rules.sharding(mesh, ("batch", None)))
        x = call_hook(hook, hook_operands, hidden, cache, config.num_layers, mesh=mesh, rules=rules)
        # All weights are equal: the mean of the positions 0..i is i / 2.
        whole = (jnp.abs(out[:, :, 1] - batch.positions[:, None] / 2) < 1e-3).all(-1)
        token = params[SCRIPT][batch.positions + 1, next_tokens]
        return x.at[:, 0].set(jnp.where(whole, token, -1).astype(x.dtype)), cache

    def draft_logits(
        self, config: Any, params: Params, state: jax.Array, *, mesh: Mesh, rules: ShardingRules
    ) -> jax.Array:
        far = jnp.arange(config.vocab_size, dtype=jnp.float32)[None] - state[:, :1]
        # Token -1 is outside of the vocabulary: then nothing is likely, and token 0 is first.
        logits = jnp.where(state[:, :1] < 0, 0.0, -(far**2))
        return jax.lax.with_sharding_constraint(logits, rules.sharding(mesh, ("batch", "vocab")))


def load_with_drafts(node: NodeConfig, devices: Sequence[jax.Device]) -> LoadedModel:
    """`model_loading.load_model` with the scripted module, its script all zeros."""
    model = load_model(dataclasses.replace(node, mtp=False), devices)
    config = dataclasses.replace(model.config, mtp_layers=1, mtp=True)
    script = np.zeros((node.batch.max_model_len, config.vocab_size), np.int32)
    params = model.params | {SCRIPT: place(model.mesh, script)}
    family = ScriptedDrafts(model.family)
    return dataclasses.replace(model, family=family, config=config, params=params)


def place(mesh: Mesh, script: np.ndarray) -> jax.Array:
    """A script on every device."""
    return jax.device_put(script.astype(np.int32), NamedSharding(mesh, PartitionSpec()))


def script_of(
    answers: Sequence[tuple[Sequence[int], Sequence[int]]], vocab: int, positions: int
) -> np.ndarray:
    """The script whose drafts continue these (prompt, answer) pairs; where two differ, the last."""
    script = np.zeros((positions, vocab), np.int32)
    for prompt, answer in answers:
        tokens = [*prompt, *answer]
        for p in range(len(prompt) - 1, len(tokens) - 1):
            script[p, tokens[p]] = tokens[p + 1]
    return script


def predicted(
    script: np.ndarray, prompt: Sequence[int], answer: Sequence[int], max_tokens: int
) -> tuple[int, int]:
    """Drafts (proposed, accepted) of an answer by a script, one step after the other, by hand.

    A stop token that ended the answer is the last of `answer`.
    """
    tokens = [*prompt, *answer]
    at, limit = len(prompt) - 1, len(prompt) - 1 + max_tokens - 1
    proposed = accepted = 0
    while at < len(tokens) - 1:
        drafting = at < limit and at > 0
        right = drafting and script[at, tokens[at]] == tokens[at + 1]
        proposed, accepted = proposed + drafting, accepted + right
        at += 1 + right
    return proposed, accepted
