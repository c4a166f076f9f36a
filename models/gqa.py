"""Grouped-query attention over the paged cache: declaration, and the one op that touches pages."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from models.interface import Mode, StepBatch
from models.layers import declare
from models.sharding import ShardingRules
from pallas_kernels.gqa_decode import gqa_decode
from pallas_kernels.paged_prefill import paged_prefill

CACHE_AXES = ("batch", "kv_heads")


class GQAttention(nnx.Module):
    """Projections of one layer; `qk_norm` adds a norm over each head of q and k."""

    def __init__(
        self,
        prefix: str,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: str,
        *,
        qk_norm: bool,
    ) -> None:
        kv = ((hidden, kv_heads, head_dim), ("embed", "kv_heads", "head_dim"))
        self.q = declare(
            f"{prefix}.q_proj.weight",
            (hidden, heads, head_dim),
            ("embed", "heads", "head_dim"),
            dtype,
            inputs=1,
        )
        self.k = declare(f"{prefix}.k_proj.weight", *kv, dtype, inputs=1)
        self.v = declare(f"{prefix}.v_proj.weight", *kv, dtype, inputs=1)
        self.o = declare(
            f"{prefix}.o_proj.weight",
            (heads, head_dim, hidden),
            ("heads", "head_dim", "embed"),
            dtype,
            inputs=2,
        )
        if qk_norm:
            norm = ((head_dim,), ("head_dim",), dtype)
            self.q_norm = declare(f"{prefix}.q_norm.weight", *norm)
            self.k_norm = declare(f"{prefix}.k_norm.weight", *norm)


def write_and_attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: jax.Array,
    batch: StepBatch,
    *,
    mesh: Mesh,
    rules: ShardingRules,
    mode: Mode,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Put the step's K/V into their slots, then attend: ([dp*T, N, H], the layer's new cache).

    q [dp*T, N, H], k and v [dp*T, K, H] after norm and rotation, cache [dp*P, K, 2, Z, H]. Each
    device writes the KV heads that it holds, so replicas over 'rep' stay equal. The write is a
    scatter into the (donated) array; nothing else of the cache moves.
    """
    tokens = rules.spec("batch")
    heads = rules.spec("batch", "heads")
    kv_heads = rules.spec("batch", "kv_heads")
    pages = rules.spec(*CACHE_AXES)

    def local(
        q: jax.Array, k: jax.Array, v: jax.Array, cache: jax.Array, batch: StepBatch
    ) -> tuple[jax.Array, jax.Array]:
        page_size = cache.shape[3]
        page, offset = batch.slots // page_size, batch.slots % page_size
        cache = cache.at[page, :, :, offset].set(jnp.stack([k, v], axis=2), mode="drop")
        if mode == "decode":
            out = gqa_decode(q, cache, batch.page_table, batch.lengths, scale=scale)
        else:
            out = paged_prefill(
                q, cache, batch.rows, batch.positions, batch.page_table, scale=scale
            )
        return out, cache

    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(heads, kv_heads, kv_heads, pages, tokens),
        out_specs=(heads, pages),
        check_vma=False,
    )
    return run(q, k, v, cache, batch)
