"""The operations of `pallas_kernels` as a server calls them: operands, ways to run them, cost."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdisagg.bench import page_loop
from pallas_kernels import gqa_decode, grouped_matmul, mla_decode, mla_prefill, paged_prefill
from pallas_kernels.cost import Cost
from pallas_kernels.gqa_decode.cost import cost as gqa_decode_cost
from pallas_kernels.grouped_matmul.cost import cost as grouped_matmul_cost
from pallas_kernels.mla_decode.cost import cost as mla_decode_cost
from pallas_kernels.mla_prefill.cost import cost as mla_prefill_cost
from pallas_kernels.paged_prefill.cost import cost as paged_prefill_cost

LATENT, ROTATED, NOPE, VALUE = 512, 64, 128, 128  # DeepSeek-V3's
E4M3 = "e4m3"  # a cache of bytes and a scale; queries are bf16

Way = tuple[Callable[..., jax.Array], tuple[Any, ...]]  # a function and its operands


@dataclass(frozen=True)
class Case:
    """One operation on one shape: `ways(backends)` runs it by each of them, and by comparisons."""

    op: str
    shape: str
    dtype: str
    cost: Cost
    ways: Callable[[tuple[str, ...]], dict[str, Way]]


class _Random:
    """Operands of a case, the same ones every time."""

    def __init__(self, dtype: str) -> None:
        self.rng = np.random.default_rng(0)
        self.dtype = dtype
        self.wide = "bfloat16" if dtype == E4M3 else dtype  # of all but the cache

    def normal(self, *shape: int, scale: float = 1.0) -> jax.Array:
        key = jax.random.key(int(self.rng.integers(2**31)))
        return jax.random.normal(key, shape, self.wide) * jnp.asarray(scale, self.wide)

    def cache(self, *shape: int) -> jax.Array:
        values = self.normal(*shape)
        if self.dtype != E4M3:
            return values
        return jax.lax.bitcast_convert_type(values.astype(jnp.float8_e4m3fn), jnp.uint8)

    def pages(self, rows: int, width: int) -> jax.Array:
        return jnp.asarray(self.rng.permutation(rows * width).reshape(rows, width), jnp.int32)


def _each(
    backends: tuple[str, ...], call: Callable[..., jax.Array], operands: tuple[Any, ...]
) -> dict[str, Way]:
    return {name: (functools.partial(call, backend=name), operands) for name in backends}


def decode_gqa(
    rows: int, heads: int, kv: int, dim: int, page: int, context: int, dtype: str
) -> Case:
    """One token of each row behind `context` cached ones."""
    width = -(-context // page)

    def ways(backends: tuple[str, ...]) -> dict[str, Way]:
        make = _Random(dtype)
        q, cache = make.normal(rows, heads, dim), make.cache(rows * width, kv, 2, page, dim)
        where = (make.pages(rows, width), jnp.full(rows, context, jnp.int32))
        fixed: dict[str, Any] = {"scale": dim**-0.5}
        loop = functools.partial(page_loop.gqa_decode, **fixed)
        apart = {} if dtype == E4M3 else {"page loop": (loop, (q, *_halves(cache), *where))}
        if dtype == E4M3:
            fixed["cache_scale"] = jnp.ones((kv, 2), jnp.float32)
        call = functools.partial(gqa_decode.gqa_decode, **fixed)
        return _each(backends, call, (q, cache, *where)) | apart

    size = 1 if dtype == E4M3 else jnp.dtype(dtype).itemsize
    cost = gqa_decode_cost(
        [context] * rows,
        num_heads=heads, kv_heads=kv, head_dim=dim, page_size=page, cache_itemsize=size,
    )  # fmt: skip
    shape = f"B={rows} N={heads} K={kv} H={dim} Z={page} context={context}"
    return Case("gqa_decode", shape, dtype, cost, ways)


def _halves(cache: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.array(cache[:, :, 0]), jnp.array(cache[:, :, 1])


def decode_mla(rows: int, heads: int, page: int, context: int, dtype: str) -> Case:
    """One token of each row behind `context` cached latents."""
    width = -(-context // page)

    def ways(backends: tuple[str, ...]) -> dict[str, Way]:
        make = _Random(dtype)
        q = make.normal(rows, heads, LATENT + ROTATED)
        cache = make.cache(rows * width, page, LATENT + ROTATED)
        where = (make.pages(rows, width), jnp.full(rows, context, jnp.int32))
        fixed: dict[str, Any] = {"scale": (NOPE + ROTATED) ** -0.5, "latent": LATENT}
        loop = functools.partial(page_loop.mla_decode, **fixed)
        apart = {} if dtype == E4M3 else {"page loop": (loop, (q, cache, *where))}
        if dtype == E4M3:
            fixed["cache_scale"] = jnp.ones(2, jnp.float32)
        call = functools.partial(mla_decode.mla_decode, **fixed)
        return _each(backends, call, (q, cache, *where)) | apart

    size = 1 if dtype == E4M3 else jnp.dtype(dtype).itemsize
    cost = mla_decode_cost(
        [context] * rows,
        num_heads=heads, latent=LATENT, rotated=ROTATED, page_size=page, cache_itemsize=size,
    )  # fmt: skip
    shape = f"B={rows} N={heads} Z={page} context={context}"
    return Case("mla_decode", shape, dtype, cost, ways)


def _chunks(make: _Random, rows: int, tokens: int, context: int, page: int) -> tuple[Any, ...]:
    """rows, positions and page table of `rows` chunks of `tokens` behind `context` each."""
    width = -(-(context + tokens) // page)
    row = jnp.repeat(jnp.arange(rows, dtype=jnp.int32), tokens)
    position = jnp.tile(context + jnp.arange(tokens, dtype=jnp.int32), rows)
    return row, position, make.pages(rows, width)


def prefill_gqa(
    rows: int, tokens: int, heads: int, kv: int, dim: int, page: int, context: int, dtype: str
) -> Case:
    """Chunks of `tokens`, one a row, behind `context` cached ones."""

    def ways(backends: tuple[str, ...]) -> dict[str, Way]:
        make = _Random(dtype)
        where = _chunks(make, rows, tokens, context, page)
        q = make.normal(rows * tokens, heads, dim)
        cache = make.cache(where[2].size, kv, 2, page, dim)
        call = functools.partial(paged_prefill.paged_prefill, scale=dim**-0.5)
        return _each(backends, call, (q, cache, *where))

    cost = paged_prefill_cost(
        [(context, tokens)] * rows, num_heads=heads, kv_heads=kv, head_dim=dim
    )
    shape = f"rows={rows} T={tokens} N={heads} K={kv} H={dim} Z={page} context={context}"
    return Case("paged_prefill", shape, dtype, cost, ways)


def prefill_mla(rows: int, tokens: int, heads: int, page: int, context: int, dtype: str) -> Case:
    """Chunks of `tokens`, one a row, behind `context` cached latents."""

    def ways(backends: tuple[str, ...]) -> dict[str, Way]:
        make = _Random(dtype)
        where = _chunks(make, rows, tokens, context, page)
        q = make.normal(rows * tokens, heads, NOPE + ROTATED)
        cache = make.cache(where[2].size, page, LATENT + ROTATED)
        weights = [make.normal(heads, d, LATENT, scale=LATENT**-0.5) for d in (NOPE, VALUE)]
        call = functools.partial(mla_prefill.mla_prefill, scale=(NOPE + ROTATED) ** -0.5)
        return _each(backends, call, (q, cache, *where, *weights))

    cost = mla_prefill_cost(
        [(context, tokens)] * rows,
        heads=heads, nope=NOPE, rotated=ROTATED, latent=LATENT, v_dim=VALUE,
    )  # fmt: skip
    shape = f"rows={rows} T={tokens} N={heads} Z={page} context={context}"
    return Case("mla_prefill", shape, dtype, cost, ways)


def matmul(
    rows: int, groups: int, depth: int, width: int, dtype: str, *, gated: bool = False
) -> Case:
    """`rows` rows in equal shares of `groups` groups; `gated` by a second matrix each."""
    matrices = 1 + gated

    def ways(backends: tuple[str, ...]) -> dict[str, Way]:
        make = _Random(dtype)
        weights = [make.normal(groups, depth, width, scale=depth**-0.5) for _ in range(matrices)]
        sizes = jnp.full(groups, rows // groups, jnp.int32)
        operands = (make.normal(rows, depth), weights, sizes.at[0].add(rows % groups))
        return _each(backends, grouped_matmul.grouped_matmul, operands)

    held = min(groups, rows)
    cost = grouped_matmul_cost(rows, depth, width, groups=held, matrices=matrices)
    shape = f"M={rows} E={groups} K={depth} N={width}{' gated' if gated else ''}"
    return Case("grouped_matmul", shape, dtype, cost, ways)


def cases(platform: str, small: bool) -> Iterator[Case]:
    """What is measured: on a "gpu" a device's part of large models, elsewhere what a CPU bears."""
    if small:
        yield decode_gqa(2, 4, 2, 64, 16, 40, "bfloat16")
        yield decode_mla(2, 2, 16, 40, "bfloat16")
        yield prefill_gqa(2, 24, 4, 2, 64, 16, 40, "bfloat16")
        yield prefill_mla(2, 24, 2, 16, 40, "bfloat16")
        yield matmul(24, 4, 64, 64, "bfloat16")
    elif platform == "gpu":  # Qwen3-235B and DeepSeek-R1, tp 8
        for context in 1024, 8192:
            for dtype in "bfloat16", E4M3:
                yield decode_gqa(64, 8, 1, 128, 64, context, dtype)
                yield decode_mla(64, 16, 64, context, dtype)
        yield decode_gqa(8, 32, 8, 128, 16, 1024, "bfloat16")
        yield prefill_gqa(1, 4096, 8, 1, 128, 64, 4096, "bfloat16")
        yield prefill_mla(1, 4096, 16, 64, 4096, "bfloat16")
        for rows in 512, 16384:
            yield matmul(rows, 256, 7168, 256, "bfloat16", gated=True)
            yield matmul(rows, 256, 256, 7168, "bfloat16")
    else:
        for dtype in "float32", "bfloat16":
            yield decode_gqa(8, 32, 8, 128, 16, 1024, dtype)
            yield decode_gqa(1, 32, 8, 128, 16, 1024, dtype)
            yield decode_gqa(8, 32, 8, 128, 16, 100, dtype)
            yield decode_gqa(8, 9, 3, 64, 16, 1024, dtype)
            yield decode_gqa(8, 64, 4, 128, 64, 1024, dtype)
            yield decode_mla(8, 16, 64, 1024, dtype)
        yield decode_gqa(8, 32, 8, 128, 16, 1024, E4M3)
        yield decode_mla(8, 16, 64, 1024, E4M3)
        yield prefill_gqa(1, 256, 32, 8, 128, 16, 512, "bfloat16")
        yield prefill_mla(1, 256, 16, 64, 512, "bfloat16")
        yield matmul(64, 64, 512, 256, "bfloat16")
