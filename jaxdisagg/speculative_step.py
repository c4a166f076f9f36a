"""The decode step with drafts: the model's MTP module proposes a token, the same step verifies it.

A row runs two positions at once: p with its known token, p+1 with the draft. Both are sampled as
without drafts (a draw depends on logits, seed and position alone), and the second counts when the
draft is what the first drew. So the tokens are those of the plain step, one or two at a time.

What a step has verified waits at the row's seat on the device: the next step first runs the module
over it (its cache has a row for every token but the newest) and takes the draft from the last row.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxdisagg.sampler import most_likely, sample
from jaxdisagg.step import (
    CONTEXT,
    LIMIT,
    POSITION,
    SEAT,
    SEED,
    TEMPERATURE,
    TOKEN,
    TOP_K,
    TOP_P,
    DecodeInputs,
    DecodeOutputs,
    StepPrograms,
    cache_slots,
)
from models.interface import Caches, Params, StepBatch

# Columns of Seats.ints, for a row whose newest known token is at position p: the token at p-1, the
# one at p, p itself, and over how many of the hidden states of p-2 and p-1 the module has yet to
# run: 2 is both, 1 that of p-1, 0 a prompt of one token in its first step, which has neither.
BEFORE, NEWEST, NEXT_POSITION, UNSEEN = range(4)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Seats:
    """What stays at a seat from step to step; first axes are dp-major, the last seat is scratch."""

    ints: jax.Array  # i32 [dp*(S+1), 4], see above
    hidden: jax.Array  # [dp*(S+1), 2, D] hidden states of p-2 and p-1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Rows:
    """The step's rows [dp*B] as found at their seats or, in their first step, in the inputs."""

    token: jax.Array
    position: jax.Array
    live: jax.Array  # not padding, and not past its limit
    drafting: jax.Array  # live, with a hidden state to draft from and room for a second token
    hidden: jax.Array  # [dp*2B, D] of p-2 and p-1
    following: jax.Array  # i32 [dp*2B] the tokens of p-1 and p
    module: StepBatch  # rows p-2 and p-1 of the module


class SpeculativePrograms(StepPrograms):
    """`StepPrograms` whose decode step drafts; prefill is the same. Needs a DraftingFamily."""

    def empty_seats(self, count: int) -> Seats:
        """See `Seats`."""
        n = self.mesh.shape["dp"] * count
        shape = (n, 2, self._config.hidden_size)
        return self._on_device(
            lambda: Seats(jnp.zeros((n, 4), jnp.int32), jnp.zeros(shape, self._config.dtype))
        )

    def _decode(
        self,
        params: Params,
        caches: Caches,
        seats: Seats,
        context: jax.Array,
        inputs: DecodeInputs[jax.Array],
    ) -> tuple[Caches, Seats, DecodeOutputs]:
        """Returns (caches, seats, what was drawn). A row's pages in the table hold its `limit`."""
        where = {"mesh": self.mesh, "rules": self._rules}
        rows = self._by_rank(self._take_seats)(seats, context, inputs)
        state, module_cache = self._family.draft(
            self._config,
            params,
            rows.module,
            rows.hidden,
            rows.following,
            caches[-1],
            mode="decode",
            **where,
        )
        newest = self._by_rank(lambda x: x[1::2])(state)
        drafts = most_likely(
            self._family.draft_logits(self._config, params, newest, **where), mesh=self.mesh
        )
        batch, seeds, floats, top_k = self._by_rank(self._pair_up)(rows, drafts, inputs)
        hidden, main_caches = self._family.forward(
            self._config, params, batch, caches[:-1], mode="decode", **where
        )
        logits = self._family.logits(self._config, params, hidden, **where)
        drawn = sample(
            logits,
            batch.positions,
            seeds,
            floats[:, TEMPERATURE],
            top_k,
            floats[:, TOP_P],
            mesh=self.mesh,
        )
        seats, counts, proposed = self._by_rank(_settle)(
            seats, inputs.ints[:, SEAT], rows, drafts, drawn[0], hidden
        )
        return (*main_caches, module_cache), seats, DecodeOutputs(*drawn, counts, proposed)

    def _take_seats(
        self, seats: Seats, context: jax.Array, inputs: DecodeInputs[jax.Array]
    ) -> _Rows:
        seat, given, start, limit, source = (
            inputs.ints[:, i] for i in (SEAT, TOKEN, POSITION, LIMIT, CONTEXT)
        )
        state, hidden = seats.ints[seat], seats.hidden[seat]
        fresh = given >= 0
        token = jnp.where(fresh, given, state[:, NEWEST])
        position = jnp.where(fresh, start, state[:, NEXT_POSITION])
        unseen = jnp.where(fresh, (source >= 0).astype(jnp.int32), state[:, UNSEEN])
        received = context[jnp.maximum(source, 0)].astype(hidden.dtype)
        last = jnp.where(fresh[:, None], received, hidden[:, 1])
        live = (start >= 0) & (position <= limit)
        return _Rows(
            token=token,
            position=position,
            live=live,
            drafting=live & (unseen > 0) & (position < limit),
            hidden=_interleave(hidden[:, 0], last),
            following=_interleave(state[:, BEFORE], token),
            module=self._batch(
                inputs.page_table,
                tokens=(token, token),  # not read
                positions=(position - 2, position - 1),
                used=(live & (unseen > 1), live & (unseen > 0)),
            ),
        )

    def _pair_up(
        self, rows: _Rows, drafts: jax.Array, inputs: DecodeInputs[jax.Array]
    ) -> tuple[StepBatch, jax.Array, jax.Array, jax.Array]:
        """The main model's batch [2B], and seeds, float parameters and top_k of its rows."""
        batch = self._batch(
            inputs.page_table,
            tokens=(rows.token, jnp.where(rows.drafting, drafts, 0)),
            positions=(rows.position, rows.position + 1),
            used=(rows.live, rows.drafting),
        )
        ints, floats = _twice(inputs.ints), _twice(inputs.floats)
        # A row that is not used is greedy, so that it asks for no draw.
        temperature = jnp.where(batch.rows >= 0, floats[:, TEMPERATURE], 0.0)
        floats = floats.at[:, TEMPERATURE].set(temperature)
        seeds = jax.lax.bitcast_convert_type(ints[:, SEED], jnp.uint32)
        return batch, seeds, floats, ints[:, TOP_K]

    def _batch(
        self,
        page_table: jax.Array,
        *,
        tokens: tuple[jax.Array, jax.Array],
        positions: tuple[jax.Array, jax.Array],
        used: tuple[jax.Array, jax.Array],
    ) -> StepBatch:
        """A decode batch of two neighbouring positions for each row of `page_table`."""
        table, mask = _twice(page_table), _interleave(*used)
        rows = jnp.where(mask, jnp.arange(mask.shape[0]), -1)
        at = jnp.where(mask, _interleave(*positions), 0)
        return StepBatch(
            tokens=_interleave(*tokens),
            positions=at,
            rows=rows,
            slots=cache_slots(table, rows, at, self._page_size),
            page_table=table,
            lengths=jnp.where(mask, at + 1, 0),
        )


def _settle(
    seats: Seats,
    seat: jax.Array,
    rows: _Rows,
    drafts: jax.Array,
    drawn: jax.Array,
    hidden: jax.Array,
) -> tuple[Seats, jax.Array, jax.Array]:
    """Verify: (the seats after the step, tokens that stand [B], drafts proposed or -1 [B]).

    A rejected draft has left its K/V at p+1; the row's next step writes that position anew before
    anything attends to it.
    """
    first, second = drawn[0::2], drawn[1::2]
    accepted = rows.drafting & (drafts == first)
    extra = accepted.astype(jnp.int32)
    columns = {
        BEFORE: first,
        NEWEST: jnp.where(accepted, second, first),
        NEXT_POSITION: rows.position + 1 + extra,
        UNSEEN: 1 + extra,
    }
    last = jnp.where(accepted[:, None], hidden[1::2], hidden[0::2])
    seat = jnp.where(rows.live, seat, seats.ints.shape[0] - 1)
    seats = Seats(
        seats.ints.at[seat].set(jnp.stack([columns[i] for i in sorted(columns)], axis=1)),
        seats.hidden.at[seat].set(jnp.stack([hidden[0::2], last], axis=1)),
    )
    return seats, jnp.where(rows.live, 1 + extra, 0), jnp.where(rows.drafting, drafts, -1)


def _interleave(first: jax.Array, second: jax.Array) -> jax.Array:
    """[B, ...] and [B, ...] as [2B, ...], a pair for each row."""
    return jnp.stack([first, second], axis=1).reshape(-1, *first.shape[1:])


def _twice(x: jax.Array) -> jax.Array:
    return _interleave(x, x)
