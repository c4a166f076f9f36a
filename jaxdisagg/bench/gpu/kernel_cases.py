"""One call of each operation that has kernels, and what plain numpy answers to it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxdisagg.bench.gpu.cases import (
    BF16,
    Paged,
    attend,
    lengths_for,
    poison,
    rows_of,
    scatter,
    store,
    uniform,
)
from pallas_kernels.gqa_decode.api import gqa_decode
from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.mla_decode.api import mla_decode
from pallas_kernels.mla_prefill.api import mla_prefill
from pallas_kernels.paged_prefill.api import paged_prefill

LATENT, ROTATED, NOPE, VALUE = 512, 64, 128, 128  # DeepSeek-V3's

Call = Callable[..., jax.Array]


@dataclass(frozen=True)
class Case:
    """`call(backend)` on `operands`; `expected()` are the first rows of what it must answer."""

    op: str
    shape: str
    call: Callable[[str], Call]
    operands: tuple[np.ndarray, ...]
    expected: Callable[[], np.ndarray]


def _backends(op: Callable[..., jax.Array], **fixed: Any) -> Callable[[str], Call]:
    return lambda backend: functools.partial(op, backend=backend, **fixed)


def _scaled(op: Callable[..., jax.Array], *operands: Any, **fixed: Any) -> jax.Array:
    """A decode operation whose last operand is the cache's scale."""
    return op(*operands[:-1], cache_scale=operands[-1], **fixed)


def gqa_case(heads: int, kv: int, dim: int, page: int, longest: int, *, fp8: bool) -> Case:
    """Decode over a grouped-query cache."""
    rng = np.random.default_rng(1)
    paged = scatter(lengths_for(page, longest), page, rng)
    scales = rng.uniform(0.01, 0.03, (kv, 2)).astype(np.float32) if fp8 else None
    values = uniform(rng, len(paged.live), kv, 2, page, dim)
    held, meant = store(values, None if scales is None else scales[None, :, :, None, None])
    cache = poison(held, paged.live[:, None, None, :, None])
    q = uniform(rng, len(paged.lengths), heads, dim).astype(BF16)
    scale = dim**-0.5

    def expected() -> np.ndarray:
        by_token = meant.transpose(0, 3, 1, 2, 4)  # [P, Z, K, 2, H]
        found = np.zeros(q.shape, np.float32)
        for row, length in enumerate(paged.lengths):
            its = rows_of(by_token, paged, row, int(length))
            for head in range(heads):
                k, v = its[:, head * kv // heads, 0], its[:, head * kv // heads, 1]
                found[row, head] = attend(q[row, [head]], k, v, scale)[0]
        return found

    op = functools.partial(_scaled, gqa_decode) if fp8 else gqa_decode
    operands = (q, cache, paged.table, paged.lengths)
    operands = operands if scales is None else (*operands, scales)
    shape = _words(heads, kv, dim, page, fp8=fp8)
    return Case("gqa_decode", shape, _backends(op, scale=scale), operands, expected)


def mla_case(heads: int, page: int, longest: int, *, fp8: bool) -> Case:
    """Decode over a latent cache."""
    rng = np.random.default_rng(2)
    paged = scatter(lengths_for(page, longest), page, rng)
    parts = rng.uniform(0.01, 0.03, 2).astype(np.float32) if fp8 else None
    wide = None if parts is None else np.repeat(parts, [LATENT, ROTATED])
    held, meant = store(uniform(rng, len(paged.live), page, LATENT + ROTATED), wide)
    cache = poison(held, paged.live[:, :, None])
    q = uniform(rng, len(paged.lengths), heads, LATENT + ROTATED).astype(BF16)
    scale = (NOPE + ROTATED) ** -0.5

    def expected() -> np.ndarray:
        found = np.zeros((*q.shape[:2], LATENT), np.float32)
        for row, length in enumerate(paged.lengths):
            keys = rows_of(meant, paged, row, int(length))
            found[row] = attend(q[row], keys, keys[:, :LATENT], scale)
        return found

    op = functools.partial(_scaled, mla_decode) if fp8 else mla_decode
    operands = (q, cache, paged.table, paged.lengths)
    operands = operands if parts is None else (*operands, parts)
    shape = _words(heads, 1, LATENT + ROTATED, page, fp8=fp8)
    call = _backends(op, scale=scale, latent=LATENT)
    return Case("mla_decode", shape, call, operands, expected)


def _chunks(paged: Paged, tokens: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(rows, positions) i32 [tokens]: the last tokens of each row, and padding."""
    rows, positions = np.full(tokens, -1, np.int32), np.zeros(tokens, np.int32)
    at = 0
    for row in rng.permutation(len(paged.lengths)):
        length = int(paged.lengths[row])
        count = min(length, tokens // len(paged.lengths))
        rows[at : at + count] = row
        positions[at : at + count] = np.arange(length - count, length)
        at += count
    return rows, positions


def prefill_case(heads: int, kv: int, dim: int, page: int, tokens: int, longest: int) -> Case:
    """A ragged batch of chunks over a grouped-query cache."""
    rng = np.random.default_rng(3)
    paged = scatter(lengths_for(page, longest), page, rng)
    held, meant = store(uniform(rng, len(paged.live), kv, 2, page, dim), None)
    cache = poison(held, paged.live[:, None, None, :, None])
    rows, positions = _chunks(paged, tokens, rng)
    q = uniform(rng, tokens, heads, dim).astype(BF16)
    scale = dim**-0.5

    def expected() -> np.ndarray:
        by_token = meant.transpose(0, 3, 1, 2, 4)
        found = np.zeros(q.shape, np.float32)
        for row, length in enumerate(paged.lengths):
            ours = rows == row
            its = rows_of(by_token, paged, row, int(length))
            for head in range(heads):
                k, v = its[:, head * kv // heads, 0], its[:, head * kv // heads, 1]
                found[ours, head] = attend(q[ours, head], k, v, scale, positions[ours] + 1)
        return found

    shape = f"{_words(heads, kv, dim, page, fp8=False)}, {tokens} tokens"
    operands = (q, cache, rows, positions, paged.table)
    return Case("paged_prefill", shape, _backends(paged_prefill, scale=scale), operands, expected)


def mla_prefill_case(heads: int, page: int, tokens: int, longest: int) -> Case:
    """A ragged batch of chunks over a latent cache."""
    rng = np.random.default_rng(4)
    paged = scatter(lengths_for(page, longest), page, rng)
    held, meant = store(uniform(rng, len(paged.live), page, LATENT + ROTATED), None)
    cache = poison(held, paged.live[:, :, None])
    rows, positions = _chunks(paged, tokens, rng)
    q = uniform(rng, tokens, heads, NOPE + ROTATED).astype(BF16)
    # So scaled, decompressed keys and values lie in (-1, 1) mostly, as the other operations' do.
    w_uk, w_uv = (
        (uniform(rng, heads, n, LATENT) / LATENT**0.5).astype(BF16) for n in (NOPE, VALUE)
    )
    scale = (NOPE + ROTATED) ** -0.5

    def expected() -> np.ndarray:
        found = np.zeros((tokens, heads, VALUE), np.float32)
        for row, length in enumerate(paged.lengths):
            ours = rows == row
            keys = rows_of(meant, paged, row, int(length))
            for head in range(heads):
                plain = keys[:, :LATENT] @ w_uk[head].astype(np.float32).T
                k = np.concatenate([plain, keys[:, LATENT:]], axis=1)
                v = keys[:, :LATENT] @ w_uv[head].astype(np.float32).T
                found[ours, head] = attend(q[ours, head], k, v, scale, positions[ours] + 1)
        return found

    shape = f"{_words(heads, 1, LATENT + ROTATED, page, fp8=False)}, {tokens} tokens"
    operands = (q, cache, rows, positions, paged.table, w_uk, w_uv)
    return Case("mla_prefill", shape, _backends(mla_prefill, scale=scale), operands, expected)


def experts_case(rows: int, depth: int, width: int, groups: int) -> Case:
    """A gated grouped matmul: groups of odd sizes, some empty, and poison behind the last."""
    rng = np.random.default_rng(5)
    live = rows - rows // 8
    cuts = np.sort(rng.integers(0, live, groups - 3))
    sizes = np.concatenate([[0], np.diff(cuts, prepend=0, append=live), [0]]).astype(np.int32)
    x = uniform(rng, rows, depth).astype(BF16)
    x[live:] = np.nan
    first, second = (
        (uniform(rng, groups, depth, width) * (3 / depth) ** 0.5).astype(BF16) for _ in range(2)
    )

    def expected() -> np.ndarray:
        found = np.zeros((live, width), np.float32)
        group = np.repeat(np.arange(groups), sizes)
        for g in range(groups):
            mine = x[:live][group == g].astype(np.float32)
            gate, up = (mine @ w[g].astype(np.float32) for w in (first, second))
            found[group == g] = gate / (1 + np.exp(-gate)) * up
        return found

    def call(backend: str) -> Call:
        return lambda x, sizes, *w: grouped_matmul(x, w, sizes, backend=backend)

    shape = f"{rows} rows, {groups} groups of {depth} x {width}, bf16"
    return Case("grouped_matmul", shape, call, (x, sizes, first, second), expected)


def _words(heads: int, kv: int, dim: int, page: int, *, fp8: bool) -> str:
    return f"{heads} x {kv} heads of {dim}, page {page}, {'fp8' if fp8 else 'bf16'}"


type Make = Callable[[], Case]

# Of each operation: the cases for a CPU, and those for a GPU.
OPS: dict[str, tuple[list[Make], list[Make]]] = {
    "gqa_decode": (
        [
            lambda: gqa_case(4, 2, 64, 8, 61, fp8=False),
            lambda: gqa_case(4, 2, 64, 8, 61, fp8=True),
        ],
        [
            lambda: gqa_case(32, 8, 128, 16, 1500, fp8=False),
            lambda: gqa_case(32, 8, 128, 16, 1500, fp8=True),
            lambda: gqa_case(64, 4, 128, 64, 1500, fp8=False),
            lambda: gqa_case(8, 8, 64, 8, 500, fp8=False),
            lambda: gqa_case(64, 4, 128, 64, 1500, fp8=True),
        ],
    ),
    "mla_decode": (
        [lambda: mla_case(4, 8, 61, fp8=False), lambda: mla_case(4, 8, 61, fp8=True)],
        [
            lambda: mla_case(16, 64, 1500, fp8=False),
            lambda: mla_case(128, 64, 1500, fp8=True),
            lambda: mla_case(128, 64, 1500, fp8=False),
            lambda: mla_case(1, 16, 500, fp8=False),
        ],
    ),
    "paged_prefill": (
        [lambda: prefill_case(4, 2, 64, 8, 64, 61)],
        [
            lambda: prefill_case(32, 8, 128, 16, 512, 700),
            lambda: prefill_case(8, 8, 64, 64, 512, 700),
        ],
    ),
    "mla_prefill": (
        [lambda: mla_prefill_case(2, 8, 64, 61)],
        [
            lambda: mla_prefill_case(16, 64, 512, 700),
            lambda: mla_prefill_case(128, 16, 256, 300),
        ],
    ),
    "grouped_matmul": (
        [lambda: experts_case(96, 128, 64, 6)],
        [lambda: experts_case(500, 2048, 768, 32), lambda: experts_case(64, 7168, 2048, 8)],
    ),
}


def cases(op: str, *, small: bool) -> list[Make]:
    """The cases of an operation, each made when it is called; `small` are for a CPU."""
    return OPS[op][0 if small else 1]
