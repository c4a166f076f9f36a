"""Drawing the next token inside the jitted step, from logits sharded over the vocabulary.

Each shard gives its best CANDIDATES logits; the gathered candidates serve greedy rows, small top-k
and any top-p whose mass they hold. A draw over the full vocabulary (Gumbel maximum, its limits
found by bisection rather than by a sort) runs only in steps where some row needs it. Which way a
row takes depends on that row alone, and its noise on (seed, position), so a row's tokens do not
depend on what else is in the batch.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax, shard_map
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

CANDIDATES = 64
MAX_LOGPROBS = 20
VOCAB_AXES = ("kv", "rep")


def _local_candidates(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Best logits and their ids over all shards, and the exact logsumexp; runs in shard_map.

    logits: f32 [B, V/tp] of this shard. Returns values [B, C] descending, ids [B, C], lse [B].
    Equal values keep ascending ids, so the first is what argmax over the whole row gives.
    """
    width = logits.shape[-1]
    values, ids = lax.top_k(logits, min(CANDIDATES, width))
    shard = lax.axis_index(VOCAB_AXES)
    values = lax.all_gather(values, VOCAB_AXES, axis=1, tiled=True)
    ids = lax.all_gather(ids + shard * width, VOCAB_AXES, axis=1, tiled=True)
    best, order = lax.top_k(values, min(CANDIDATES, values.shape[1]))
    peak = best[:, :1]
    total = lax.psum(jnp.exp(logits - peak).sum(-1), VOCAB_AXES)
    return best, jnp.take_along_axis(ids, order, axis=1), peak[:, 0] + jnp.log(total)


def most_likely(logits: jax.Array, *, mesh: Mesh) -> jax.Array:
    """The first best token i32 [B] of logits f32 [B, V], sharded as for `sample`."""

    def local(logits: jax.Array) -> jax.Array:
        best = logits.argmax(-1).astype(jnp.int32)
        values = jnp.take_along_axis(logits, best[:, None], axis=1)
        ids = best[:, None] + lax.axis_index(VOCAB_AXES) * logits.shape[-1]
        values = lax.all_gather(values, VOCAB_AXES, axis=1, tiled=True)
        ids = lax.all_gather(ids, VOCAB_AXES, axis=1, tiled=True)
        return jnp.take_along_axis(ids, values.argmax(-1)[:, None], axis=1)[:, 0]

    return shard_map(
        local, mesh=mesh, in_specs=P("dp", VOCAB_AXES), out_specs=P("dp"), check_vma=False
    )(logits)


def _row_keys(seeds: jax.Array, positions: jax.Array) -> jax.Array:
    return jax.vmap(lambda s, p: jax.random.fold_in(jax.random.key(s), p))(seeds, positions)


def _gumbel(keys: jax.Array, width: int) -> jax.Array:
    return jax.vmap(lambda key: jax.random.gumbel(key, (width,)))(keys)


def _kept(probabilities: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Which of the descending probabilities [B, C] top-k and top-p keep; the first always."""
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    rank = jnp.arange(probabilities.shape[-1])
    within_k = jnp.where(top_k[:, None] > 0, rank < top_k[:, None], True)
    return (within_k & (before < top_p[:, None])) | (rank == 0)


def _renormalised(scaled: jax.Array, lse: jax.Array, top_k: jax.Array) -> jax.Array:
    """Probabilities that top-p sees: those after top-k, as when top-k is applied first."""
    probabilities = jnp.exp(scaled - lse[:, None])
    rank = jnp.arange(scaled.shape[-1])
    in_k = jnp.where(top_k[:, None] > 0, rank < top_k[:, None], False)
    mass = jnp.where(top_k > 0, jnp.where(in_k, probabilities, 0).sum(-1), 1.0)
    return probabilities / mass[:, None]


def sample(
    logits: jax.Array,
    positions: jax.Array,
    seeds: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    *,
    mesh: Mesh,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Draw one token per row.

    logits: f32 [B, V], rows on 'dp', vocabulary on ('kv', 'rep'). positions i32 [B] and seeds
    u32 [B] make the noise; temperature f32 [B] (0: greedy), top_k i32 [B] (0: all), top_p f32 [B].
    Returns tokens i32 [B], their logprobs f32 [B] under the unscaled distribution, and the best
    MAX_LOGPROBS ids i32 and logprobs f32 [B, MAX_LOGPROBS] of it (fewer for a tiny vocabulary).
    A row whose logits hold NaN or +infinity, from which nothing can be drawn, gives token -1.
    """
    best, ids, lse = shard_map(
        _local_candidates,
        mesh=mesh,
        in_specs=P("dp", VOCAB_AXES),
        out_specs=(P("dp"), P("dp"), P("dp")),
        check_vma=False,
    )(logits)
    shown = min(MAX_LOGPROBS, best.shape[1])
    greedy = temperature <= 0
    token = lax.cond(
        jnp.all(greedy),
        lambda: ids[:, 0],
        lambda: _draw(logits, best, ids, positions, seeds, temperature, top_k, top_p, greedy),
    )
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    token = jnp.where(jnp.isfinite(lse), token, -1)
    return token, chosen - lse, ids[:, :shown], best[:, :shown] - lse[:, None]


def _draw(
    logits: jax.Array,
    best: jax.Array,
    ids: jax.Array,
    positions: jax.Array,
    seeds: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    greedy: jax.Array,
) -> jax.Array:
    """Tokens i32 [B] of a step in which some row is not greedy."""
    keys = _row_keys(seeds, positions)
    scale = jnp.where(greedy, 1.0, temperature)[:, None]
    scaled_lse = jax.nn.logsumexp(logits / scale, axis=-1)
    width = best.shape[1]

    probabilities = _renormalised(best / scale, scaled_lse, top_k)
    kept = _kept(probabilities, top_k, top_p)
    noisy = jnp.where(kept, best / scale + _gumbel(keys, width), -jnp.inf)
    from_candidates = jnp.take_along_axis(ids, noisy.argmax(-1)[:, None], axis=1)[:, 0]

    small_k = (top_k > 0) & (top_k <= width)
    unlimited = (top_k == 0) & (top_p >= 1)
    held = small_k | ((top_k == 0) & (probabilities.sum(-1) >= top_p) & ~unlimited)
    beyond = ~greedy & ~held

    def full() -> jax.Array:
        scaled = logits / scale
        floor = _thresholds(scaled, scaled_lse, top_k, top_p, beyond & ~unlimited)
        noisy = jnp.where(
            scaled >= floor[:, None], scaled + _gumbel(keys, logits.shape[1]), -jnp.inf
        )
        return noisy.argmax(-1).astype(jnp.int32)

    token = lax.cond(beyond.any(), full, lambda: jnp.zeros_like(from_candidates))
    return jnp.where(greedy, ids[:, 0], jnp.where(held, from_candidates, token))


def _ordered(x: jax.Array) -> jax.Array:
    """f32 as int32 in the same order (a negative float's bits descend, so they are mirrored)."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _from_ordered(bits: jax.Array) -> jax.Array:
    """The f32 of an ordered int32."""
    return lax.bitcast_convert_type(jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits), jnp.float32)


def _smallest(
    holds: Callable[[jax.Array], jax.Array], scaled: jax.Array, steps: jax.Array
) -> jax.Array:
    """Per row the smallest f32 t for which `holds(t)`, true from there on up to the row's maximum.

    Bisection over the ordered bits: exact in 32 steps, with no sort of the vocabulary.
    """

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # the mean, without overflow
        yes = holds(_from_ordered(middle))
        return jnp.where(yes, low, middle), jnp.where(yes, middle, high)

    low = jnp.full(scaled.shape[0], _ordered(jnp.float32(-jnp.inf)))
    high = _ordered(scaled.max(-1))
    _, high = lax.fori_loop(0, steps, halve, (low, high))
    return _from_ordered(high)


def _thresholds(
    scaled: jax.Array, lse: jax.Array, top_k: jax.Array, top_p: jax.Array, limited: jax.Array
) -> jax.Array:
    """Smallest scaled logit f32 [B] that top-k, then top-p, keep; -inf for rows not limited."""
    has_k = limited & (top_k > 0)
    has_p = limited & (top_p < 1)
    probabilities = jnp.exp(scaled - lse[:, None])

    def mass(kept: jax.Array) -> jax.Array:
        return jnp.where(kept, probabilities, 0).sum(-1)

    by_k = _smallest(
        lambda t: (scaled > t[:, None]).sum(-1) < top_k, scaled, jnp.where(has_k.any(), 32, 0)
    )
    by_k = jnp.where(has_k, by_k, -jnp.inf)
    total = mass(scaled >= by_k[:, None])
    by_p = _smallest(
        lambda t: mass(scaled > t[:, None]) < top_p * total,
        scaled,
        jnp.where(has_p.any(), 32, 0),
    )
    return jnp.maximum(by_k, jnp.where(has_p, by_p, -jnp.inf))
