"""Where a layer calls the step's hook, which sees the cache that the layer has just written."""

import jax
from jax.sharding import Mesh, PartitionSpec

from models import gqa
from models.interface import Hook
from models.sharding import ShardingRules


def call_hook(
    hook: Hook | None,
    operands: tuple[jax.Array, ...],
    x: jax.Array,
    cache: jax.Array,
    layer: int,
    *,
    mesh: Mesh,
    rules: ShardingRules,
    cache_axes: tuple[str, ...] = gqa.CACHE_AXES,
) -> jax.Array:
    """x [dp*T, D] through `hook(*operands, x, cache, layer)` on local shards; x without a hook.

    `cache_axes` are the logical axes of the layer's cache, `mla.CACHE_AXES` for a latent one.
    """
    if hook is None:
        return x
    tokens, pages = rules.spec("batch"), rules.spec(*cache_axes)
    run = jax.shard_map(
        lambda *args: hook(*args, layer),
        mesh=mesh,
        in_specs=(*(PartitionSpec() for _ in operands), tokens, pages),
        out_specs=tokens,
        check_vma=False,
    )
    return run(*operands, x, cache)
