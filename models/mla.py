"""Multi-head latent attention over the paged cache of latents: declaration, and the ops.

Per token the cache holds one row [R + C]: the normed latent, from which every head's key and value
are linear maps, and the rotated key that all heads share (DeepSeek-V2 report, section 2.1).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from models.interface import HFSource, Mode, StepBatch
from models.layers import RMSNorm, declare, parameter, rms_norm
from models.rope import rotate
from models.sharding import ShardingRules
from pallas_kernels.mla_decode import mla_decode
from pallas_kernels.mla_prefill import mla_prefill

Parameters = Callable[[str], jax.Array]  # those of one layer, by their names in its module

CACHE_AXES = ("batch",)
# Of the norms of the two latents: a constant of the published model, not the config's rms_norm_eps.
LATENT_EPS = 1e-6


@dataclass(frozen=True)
class LatentShape:
    """Sizes of one attention; `query_rank` None where queries come straight from the hidden state.

    Raises ValueError for an odd `rope_dim`.
    """

    heads: int  # N
    query_rank: int | None
    latent: int  # R
    nope_dim: int  # Hn, of each head's query and key, without position
    rope_dim: int  # C, of each head's query and the shared key, rotated
    value_dim: int  # Hv

    def __post_init__(self) -> None:
        if self.rope_dim % 2:
            raise ValueError(
                f"qk_rope_head_dim: {self.rope_dim} is odd; rotary positions need pairs"
            )


class LatentAttention(nnx.Module):
    """Projections of one layer.

    The two parts of kv_b_proj [N * (Hn + Hv), R] are parameters of their own, each as it lies on
    disk: `w_uk` [N, Hn, R] makes keys of latents and takes queries into the latent space, `w_uv`
    [N, Hv, R] makes values of latents, before the attention or after it.
    """

    def __init__(self, prefix: str, hidden: int, shape: LatentShape, dtype: str) -> None:
        s = shape
        query = (s.heads, s.nope_dim + s.rope_dim)
        if s.query_rank is None:
            self.q = declare(
                f"{prefix}.q_proj.weight",
                (hidden, *query),
                ("embed", "heads", "head_dim"),
                dtype,
                inputs=1,
            )
        else:
            self.q_a = declare(
                f"{prefix}.q_a_proj.weight",
                (hidden, s.query_rank),
                ("embed", "latent"),
                dtype,
                inputs=1,
            )
            self.q_norm = RMSNorm(f"{prefix}.q_a_layernorm.weight", s.query_rank, "latent", dtype)
            self.q_b = declare(
                f"{prefix}.q_b_proj.weight",
                (s.query_rank, *query),
                ("latent", "heads", "head_dim"),
                dtype,
                inputs=1,
            )
        self.kv_a = declare(
            f"{prefix}.kv_a_proj_with_mqa.weight",
            (hidden, s.latent + s.rope_dim),
            ("embed", "latent"),
            dtype,
            inputs=1,
        )
        self.kv_norm = RMSNorm(f"{prefix}.kv_a_layernorm.weight", s.latent, "latent", dtype)
        kv_b, both = f"{prefix}.kv_b_proj.weight", s.nope_dim + s.value_dim
        on_disk, view = (s.heads * both, s.latent), (s.heads, both, s.latent)
        self.w_uk = parameter(
            (s.heads, s.nope_dim, s.latent),
            ("heads", "head_dim", "latent"),
            dtype,
            HFSource(kv_b, on_disk, view, (0, 1, 2), (1, 0, s.nope_dim)),
        )
        self.w_uv = parameter(
            (s.heads, s.value_dim, s.latent),
            ("heads", "head_dim", "latent"),
            dtype,
            HFSource(kv_b, on_disk, view, (0, 1, 2), (1, s.nope_dim, both)),
        )
        self.o = declare(
            f"{prefix}.o_proj.weight",
            (s.heads, s.value_dim, hidden),
            ("heads", "head_dim", "embed"),
            dtype,
            inputs=2,
        )


def latent_attention(
    x: jax.Array,
    p: Parameters,
    shape: LatentShape,
    cache: jax.Array,
    batch: StepBatch,
    rope: tuple[jax.Array, jax.Array],
    *,
    interleaved: bool,
    mesh: Mesh,
    rules: ShardingRules,
    mode: Mode,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """x [dp*T, D] through the attention, all but the output projection.

    `p` gives the parameters of `LatentAttention`. Returns ([dp*T, N, Hv], the layer's new cache).
    """
    rotated = functools.partial(rotate, tables=rope, interleaved=interleaved)
    if shape.query_rank is None:
        q = jnp.einsum("td,dnh->tnh", x, p("q"))
    else:
        low = rms_norm(jnp.dot(x, p("q_a")), p("q_norm.scale"), LATENT_EPS)
        q = jnp.einsum("tr,rnh->tnh", low, p("q_b"))
    q_nope, q_rope = jnp.split(q, [shape.nope_dim], axis=-1)
    latent, key = jnp.split(jnp.dot(x, p("kv_a")), [shape.latent], axis=-1)
    key = rotated(key[:, None])[:, 0]
    row = jnp.concatenate([rms_norm(latent, p("kv_norm.scale"), LATENT_EPS), key], axis=-1)
    return write_and_attend(
        q_nope,
        rotated(q_rope),
        row,
        cache,
        batch,
        p("w_uk"),
        p("w_uv"),
        mesh=mesh,
        rules=rules,
        mode=mode,
        scale=scale,
    )


def absorb(q: jax.Array, w_uk: jax.Array) -> jax.Array:
    """Queries q [B, N, Hn] in the latent space: [B, N, R], with w_uk [N, Hn, R].

    On a CPU head by head: its product of batched matrices either takes ten times as long for this
    order of the axes, or, in bf16, converts the whole of w_uk.
    """

    def by_head(q: jax.Array, w_uk: jax.Array) -> jax.Array:
        heads = jax.lax.map(lambda one: jnp.dot(*one), (q.transpose(1, 0, 2), w_uk))
        return heads.transpose(1, 0, 2)

    def at_once(q: jax.Array, w_uk: jax.Array) -> jax.Array:
        return jnp.einsum("bnh,nhr->bnr", q, w_uk)

    return jax.lax.platform_dependent(q, w_uk, cpu=by_head, default=at_once)


def write_and_attend(
    q_nope: jax.Array,
    q_rope: jax.Array,
    row: jax.Array,
    cache: jax.Array,
    batch: StepBatch,
    w_uk: jax.Array,
    w_uv: jax.Array,
    *,
    mesh: Mesh,
    rules: ShardingRules,
    mode: Mode,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Put the step's rows into their slots, then attend: ([dp*T, N, Hv], the layer's new cache).

    q_nope [dp*T, N, Hn], q_rope [dp*T, N, C] rotated, row [dp*T, R + C] = normed latent and rotated
    key, cache [dp*P, Z, R + C], w_uk [N, Hn, R], w_uv [N, Hv, R]. Every tensor rank writes the same
    rows, so their copies of the cache stay equal, and attends with its own heads. A decode step
    takes the queries into the latent space and reads nothing but the cache; a prefill step, which
    shares a row's keys among many queries, takes keys and values out of the latents.
    """
    tokens, pages = rules.spec("batch"), rules.spec(*CACHE_AXES)
    heads = rules.spec("batch", "heads")
    weights = rules.spec("heads")

    def local(
        q_nope: jax.Array,
        q_rope: jax.Array,
        row: jax.Array,
        cache: jax.Array,
        batch: StepBatch,
        w_uk: jax.Array,
        w_uv: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        page_size, latent = cache.shape[1], w_uk.shape[2]
        page, offset = batch.slots // page_size, batch.slots % page_size
        cache = cache.at[page, offset].set(row, mode="drop")
        if mode == "decode":
            q = jnp.concatenate([absorb(q_nope, w_uk), q_rope], axis=-1)
            attended = mla_decode(
                q, cache, batch.page_table, batch.lengths, scale=scale, latent=latent
            )
            return jnp.einsum("bnr,nvr->bnv", attended, w_uv), cache
        q = jnp.concatenate([q_nope, q_rope], axis=-1)
        where = (batch.rows, batch.positions, batch.page_table)
        return mla_prefill(q, cache, *where, w_uk, w_uv, scale=scale), cache

    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(heads, heads, tokens, pages, tokens, weights, weights),
        out_specs=(heads, pages),
        check_vma=False,
    )
    return run(q_nope, q_rope, row, cache, batch, w_uk, w_uv)
