"""Mixture of experts: declaration, routers, and the dispatch of tokens to sharded experts."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from models.expert_sums import GatedWeights, sum_experts
from models.layers import declare, gated_mlp
from models.sharding import ShardingRules


class Experts(nnx.Module):
    """Gated MLPs side by side: gate and up [E, D, F], down [E, F, D].

    Expert e is read from `{prefix}.{e}.gate_proj.weight` and so on; `prefix` ends in `.experts`.
    """

    def __init__(
        self, prefix: str, hidden: int, expert_ffn: int, num_experts: int, dtype: str
    ) -> None:
        wide = ((hidden, expert_ffn), ("experts", "embed", "expert_ffn"), dtype)
        narrow = ((expert_ffn, hidden), ("experts", "expert_ffn", "embed"), dtype)
        names = f"{prefix}.{{}}"
        self.gate = declare(f"{names}.gate_proj.weight", *wide, inputs=1, stack=num_experts)
        self.up = declare(f"{names}.up_proj.weight", *wide, inputs=1, stack=num_experts)
        self.down = declare(f"{names}.down_proj.weight", *narrow, inputs=1, stack=num_experts)


def route_softmax(
    x: jax.Array, router: jax.Array, k: int, *, normalise: bool
) -> tuple[jax.Array, jax.Array]:
    """The k most probable experts of each token: ids i32 [T, k] and weights f32 [T, k].

    x [T, D], router [D, E]. Weights are the softmax over all experts, in f32, and with `normalise`
    divided by their sum over the chosen ones.
    """
    weights, ids = lax.top_k(jax.nn.softmax(_router_logits(x, router), axis=-1), k)
    if normalise:
        weights = weights / weights.sum(-1, keepdims=True)
    return ids.astype(jnp.int32), weights


def route_sigmoid_grouped(
    x: jax.Array,
    router: jax.Array,
    bias: jax.Array,
    k: int,
    *,
    groups: int,
    top_groups: int,
    normalise: bool,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """The router of DeepSeek-V3: ids i32 [T, k] and weights f32 [T, k].

    x [T, D], router [D, E], bias f32 [E]. Scores are sigmoids. The choice goes by score + bias:
    first the `top_groups` of `groups` equal runs of experts, a group's rank being the sum of its
    best two, then the best k experts in those. The weights are the scores without the bias, with
    `normalise` over (their sum + 1e-20), times `scale`. Source: DeepSeek-V3 technical report
    (arXiv 2412.19437), sections 2.1.2 and 4.2, and the released modelling code for the epsilon.
    """
    scores = jax.nn.sigmoid(_router_logits(x, router))
    choice = (scores + bias).reshape(x.shape[0], groups, -1)
    best_two, _ = lax.top_k(choice, min(2, choice.shape[-1]))
    _, kept = lax.top_k(best_two.sum(-1), top_groups)
    allowed = (kept[..., None] == jnp.arange(groups)).any(1)  # [T, groups]
    choice = jnp.where(allowed[..., None], choice, -jnp.inf).reshape(scores.shape)
    _, ids = lax.top_k(choice, k)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if normalise:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return ids.astype(jnp.int32), weights * scale


def route_on_shards(
    route: Callable[..., tuple[jax.Array, jax.Array]],
    x: jax.Array,
    *parameters: jax.Array,
    mesh: Mesh,
    rules: ShardingRules,
) -> tuple[jax.Array, jax.Array]:
    """`route(x, *parameters)`, each dp rank on its own tokens: ids and weights, sharded on 'dp'.

    Left to itself the compiler gathers the tokens of all dp ranks for a `top_k`.
    """
    tokens = rules.spec("batch")
    run = jax.shard_map(
        route,
        mesh=mesh,
        in_specs=(tokens, *[PartitionSpec()] * len(parameters)),
        out_specs=(tokens, tokens),
        check_vma=False,
    )
    return run(x, *parameters)


def _router_logits(x: jax.Array, router: jax.Array) -> jax.Array:
    """f32 [T, E]: products of bf16 are exact in f32, so no operand is converted as a whole."""
    return jnp.dot(x, router, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def moe(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    live: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    mesh: Mesh,
    rules: ShardingRules,
    shared: GatedWeights | None = None,
) -> jax.Array:
    """Each token through its experts: the weighted sum [dp*T, D] in x's dtype, sharded on 'dp'.

    x [dp*T, D], ids i32 and weights f32 [dp*T, k] (a token's ids are distinct), live bool [dp*T].
    Rows that are not live reach no expert and come out as zeros. gate and up [E, D, F] and down
    [E, F, D] shard by the rules of 'experts' and 'expert_ffn'; `shared` [D, F], [D, F], [F, D], an
    MLP that every token passes, by the rule of 'ffn'. No token is ever dropped.

    One collective sums over the tensor ranks; where experts shard over 'dp' the tokens are gathered
    before and the sums scattered after.

    Raises ValueError when the rules put both axes of the experts on one mesh axis, or a shared
    MLP on 'dp'.
    """
    tokens = rules.spec("batch")
    wide = rules.spec("experts", None, "expert_ffn")
    narrow = rules.spec("experts", "expert_ffn", None)
    expert_axes, num_experts = rules.mesh_axes("experts"), gate.shape[0]
    routed_over = {*expert_axes, *rules.mesh_axes("expert_ffn")}
    shared_over = set(rules.mesh_axes("ffn")) if shared else set()
    if "dp" in shared_over:
        raise ValueError("sharding rules: ffn: shared experts cannot shard over 'dp'")
    wide_axes = {axis for axis, size in mesh.shape.items() if size > 1}
    gather = "dp" in routed_over & wide_axes
    summed = tuple(a for a in ("kv", "rep") if a in (routed_over | shared_over) & wide_axes)

    def once(part: jax.Array, over: set[str]) -> jax.Array:
        """The part as a summand: of the ranks that hold equal copies only the first gives it."""
        copies = tuple(a for a in summed if a not in over)
        return jnp.where(lax.axis_index(copies) == 0, part, 0) if copies else part

    def local(
        x: jax.Array,
        ids: jax.Array,
        weights: jax.Array,
        live: jax.Array,
        experts: GatedWeights,
        shared: GatedWeights | None,
    ) -> jax.Array:
        x = jnp.where(live[:, None], x, 0)
        count = experts[0].shape[0]
        first = lax.axis_index(expert_axes) * count if expert_axes else 0
        chosen, routed = jnp.where(live[:, None], ids, -1), x
        if gather:
            routed, chosen, weights = _gather_tokens(x, chosen, weights)
        average = math.ceil(chosen.size / num_experts)
        out = sum_experts(routed, chosen - first, weights, experts, average)
        if gather:
            out = lax.psum_scatter(out, "dp", tiled=True)
        out = once(out, routed_over)
        if shared is not None:
            out = out + once(gated_mlp(x, *shared), shared_over)
        return lax.psum(out, summed) if summed else out

    shared_specs = (rules.spec(None, "ffn"), rules.spec(None, "ffn"), rules.spec("ffn", None))
    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(*[tokens] * 4, (wide, wide, narrow), shared_specs if shared else None),
        out_specs=tokens,
        check_vma=False,
    )
    return run(x, ids, weights, live, (gate, up, down), shared)


def _gather_tokens(
    x: jax.Array, ids: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The tokens of all dp ranks, in two collectives: ids and weights travel as one array."""
    pairs = jnp.concatenate([ids, lax.bitcast_convert_type(weights, jnp.int32)], axis=1)
    x, pairs = (lax.all_gather(a, "dp", tiled=True) for a in (x, pairs))
    ids, bits = jnp.split(pairs, 2, axis=1)
    return x, ids, lax.bitcast_convert_type(bits, jnp.float32)
