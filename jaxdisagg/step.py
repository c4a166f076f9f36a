"""The two jitted step programs of a node, prefill and decode, one compiled shape per bucket.

Prefill takes a flat batch of chunks, fills the cache and leaves each finished prompt's last hidden
state in the context buffer; it never samples. Decode takes one token per row and draws the next;
with drafts it is another program (speculative_step.py). The trigger, when there is one, is called
once per layer and device, and once more for the context.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import shard_map
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdisagg.sampler import sample
from models.interface import Caches, Hook, ModelConfig, Params, StepBatch
from models.sharding import ShardingRules

# Columns of the packed per-row inputs of a decode step.
SEAT, TOKEN, POSITION, LIMIT, CONTEXT, TOP_K, SEED = range(7)
TEMPERATURE, TOP_P = range(2)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillInputs[A]:
    """Host inputs of a prefill step, int32; first axes are dp-major (T tokens, R rows a rank)."""

    tokens: A  # [dp*T, 4] token, position, row (-1: padding), the token that follows
    page_table: A  # [dp*R, W]
    lengths: A  # [dp*R] tokens in the cache after the step
    last: A  # [dp*R, 2] index in T of a finished prompt's last token or -1,
    #                               and the context row that takes its hidden state


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeInputs[A]:
    """Host inputs of a decode step; first axes are dp-major (B rows a rank).

    A token of -1 means: what was sampled last at this seat, which the host may not know yet. A
    position of -1 marks a padding row. `limit` (the last position to run) and `context` (the
    context row of a row's first step, or -1) are read with drafts only, where the position counts
    in a row's first step alone.
    """

    ints: A  # i32 [dp*B, 7] seat, token, position, limit, context, top_k, seed
    floats: A  # f32 [dp*B, 2] temperature, top_p
    page_table: A  # i32 [dp*B, W]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeOutputs:
    """What a decode step drew, per row [dp*B]; `top_*` are [dp*B, n], best first.

    With drafts there are two rows for each (dp*2B of them), of which the first `counts` stand.
    """

    tokens: jax.Array
    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    counts: jax.Array | None = None  # i32 [dp*B] 1, 2, or 0 for a row that had ended
    drafts: jax.Array | None = None  # i32 [dp*B] the token that was proposed, -1: none


def cache_slots(
    table: jax.Array, rows: jax.Array, positions: jax.Array, page_size: int
) -> jax.Array:
    """Flat cache slots [T] of tokens; a padding token goes to the scratch page 0."""
    pages = table[jnp.maximum(rows, 0), positions // page_size]
    return jnp.where(rows >= 0, pages * page_size + positions % page_size, 0)


class StepPrograms:
    """The step programs of one model on one mesh. Pure functions; the caller keeps the state."""

    def __init__(
        self,
        family: Any,  # a ModelFamily; where the config says mtp, a DraftingFamily
        config: ModelConfig,
        mesh: Mesh,
        rules: ShardingRules,
        *,
        page_size: int,
        trigger: Hook | None = None,
    ) -> None:
        self.mesh = mesh
        self._family = family
        self._config = config
        self._rules = rules
        self._page_size = page_size
        self._trigger = trigger
        self.by_rank = NamedSharding(mesh, P("dp"))
        self.replicated = NamedSharding(mesh, P())
        # The host reads what is drawn, and of several processes each has devices of its own alone.
        drawn = self.replicated if mesh.is_multi_process else self.by_rank
        spec = family.cache_spec(config)
        self._layers = spec.num_layers
        caches = (NamedSharding(mesh, spec.partition),) * spec.num_layers
        self.prefill = jax.jit(
            self._prefill,
            donate_argnames=("caches", "context"),
            out_shardings=(caches, self.by_rank, self.by_rank),
        )
        self.decode = jax.jit(
            self._decode,
            donate_argnames=("caches", "seats"),
            out_shardings=(caches, self.by_rank, drawn),
        )

    def empty_seats(self, count: int) -> Any:
        """The state that decode steps keep for each seat of a rank: i32 [dp*count] last tokens."""
        return self._on_device(lambda: jnp.zeros(self.mesh.shape["dp"] * count, jnp.int32))

    def _on_device(self, make: Callable[[], Any]) -> Any:
        """What `make` gives, sharded by rank, and made there: some devices may be out of reach."""
        return jax.jit(make, out_shardings=self.by_rank)()

    def _by_rank(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """Run f on each dp rank's own part of its arguments: ids in them are local to a rank."""
        return shard_map(f, mesh=self.mesh, in_specs=P("dp"), out_specs=P("dp"), check_vma=False)

    def _prefill(
        self,
        params: Params,
        caches: Caches,
        context: jax.Array,
        step: jax.Array,
        inputs: PrefillInputs[jax.Array],
    ) -> tuple[Caches, jax.Array, jax.Array]:
        """Returns (caches, context, last states of model and module [dp*R or dp*2R, D])."""
        tokens, positions, rows, following = (inputs.tokens[:, i] for i in range(4))
        slots = self._by_rank(functools.partial(cache_slots, page_size=self._page_size))(
            inputs.page_table, rows, positions
        )
        batch = StepBatch(
            tokens=tokens,
            positions=positions,
            rows=rows,
            slots=slots,
            page_table=inputs.page_table,
            lengths=inputs.lengths,
        )
        hook = {"hook": self._trigger, "hook_operands": (step,) if self._trigger else ()}
        main = self._config.num_layers
        hidden, new = self._family.forward(
            self._config,
            params,
            batch,
            caches[:main],
            mesh=self.mesh,
            rules=self._rules,
            mode="prefill",
            **hook,
        )
        results = (hidden,)
        if self._config.mtp:
            state, layer = self._family.draft(
                self._config,
                params,
                batch,
                hidden,
                following,
                caches[main],
                mesh=self.mesh,
                rules=self._rules,
                mode="prefill",
                **hook,
            )
            results, new = (hidden, state), (*new, layer)
        store = shard_map(
            self._store_context,
            mesh=self.mesh,
            in_specs=(P(), P("dp"), P("dp"), P("dp")),
            out_specs=(P("dp"), P("dp")),
            check_vma=False,
        )
        context, states = store(step, results, inputs.last, context)
        return new, context, states

    def _store_context(
        self, step: jax.Array, results: tuple[jax.Array, ...], last: jax.Array, context: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        rows = [x[jnp.maximum(last[:, 0], 0)] for x in results]
        context = context.at[jnp.where(last[:, 0] >= 0, last[:, 1], 0)].set(rows[0])
        # All that a layer's trigger precedes is an operand here: nothing else needs the module's
        # state, and without a use of it the compiler drops the module's trigger.
        states = jnp.concatenate(rows)
        if self._trigger is not None:
            states = self._trigger(step, states, context, self._layers)
        return context, states

    def _decode(
        self,
        params: Params,
        caches: Caches,
        seats: Any,
        context: jax.Array,
        inputs: DecodeInputs[jax.Array],
    ) -> tuple[Caches, Any, DecodeOutputs]:
        """Returns (caches, seats, what was drawn). `context` is for drafts alone."""
        seat, given, position = (inputs.ints[:, i] for i in (SEAT, TOKEN, POSITION))
        used = position >= 0
        tokens = self._by_rank(lambda s, i, t: jnp.where(t >= 0, t, s[i]))(seats, seat, given)
        at = jnp.maximum(position, 0)

        def slots_of(table: jax.Array, used: jax.Array, at: jax.Array) -> tuple[jax.Array, ...]:
            rows = jnp.where(used, jnp.arange(used.shape[0]), -1)
            return rows, cache_slots(table, rows, at, self._page_size)

        rows, slots = self._by_rank(slots_of)(inputs.page_table, used, at)
        batch = StepBatch(
            tokens=tokens,
            positions=at,
            rows=rows,
            slots=slots,
            page_table=inputs.page_table,
            lengths=position + 1,
        )
        hidden, caches = self._family.forward(
            self._config,
            params,
            batch,
            caches,
            mesh=self.mesh,
            rules=self._rules,
            mode="decode",
        )
        logits = self._family.logits(
            self._config, params, hidden, mesh=self.mesh, rules=self._rules
        )
        drawn, logprobs, top_ids, top_logprobs = sample(
            logits,
            at,
            jax.lax.bitcast_convert_type(inputs.ints[:, SEED], jnp.uint32),
            inputs.floats[:, TEMPERATURE],
            inputs.ints[:, TOP_K],
            inputs.floats[:, TOP_P],
            mesh=self.mesh,
        )
        seats = self._by_rank(lambda s, i, t: s.at[i].set(t))(seats, seat, drawn)
        return caches, seats, DecodeOutputs(drawn, logprobs, top_ids, top_logprobs)


def empty_prefill(dp: int, tokens: int, rows: int, width: int) -> PrefillInputs[np.ndarray]:
    """Padding alone: a prefill step that touches scratch pages only."""
    packed = np.zeros((dp * tokens, 4), np.int32)
    packed[:, 2] = -1
    last = np.zeros((dp * rows, 2), np.int32)
    last[:, 0] = -1
    return PrefillInputs(
        tokens=packed,
        page_table=np.zeros((dp * rows, width), np.int32),
        lengths=np.zeros(dp * rows, np.int32),
        last=last,
    )


def empty_decode(dp: int, rows: int, width: int, scratch_seat: int) -> DecodeInputs[np.ndarray]:
    """Padding alone: a decode step that touches scratch pages and the scratch seat only."""
    ints = np.zeros((dp * rows, 7), np.int32)
    ints[:, SEAT] = scratch_seat
    ints[:, [POSITION, LIMIT, CONTEXT]] = -1
    floats = np.zeros((dp * rows, 2), np.float32)
    floats[:, TOP_P] = 1.0
    return DecodeInputs(ints=ints, floats=floats, page_table=np.zeros((dp * rows, width), np.int32))
