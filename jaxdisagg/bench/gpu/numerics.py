"""Every attention operation against numpy, on this machine's device.

`python -m jaxdisagg.bench.gpu.numerics [--small] [--backend NAME]`. A row names the operation, its
shape and the largest error; it has passed below `LIMIT`.
"""

import argparse
import time
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
from jaxdisagg.bench.gpu.rows import take_stdout
from pallas_kernels.gqa_decode.api import gqa_decode
from pallas_kernels.mla_decode.api import mla_decode
from pallas_kernels.mla_prefill.api import mla_prefill
from pallas_kernels.paged_prefill.api import paged_prefill

LIMIT = 3e-3
MLA = {"latent": 512, "rotated": 64}


@dataclass(frozen=True)
class Case:
    """One call: `run(backend)` gives what the operation answers, `expected` what numpy does."""

    op: str
    shape: str
    run: Callable[[str], jax.Array]
    expected: np.ndarray


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
    tokens = meant.transpose(0, 3, 1, 2, 4)  # [P, Z, K, 2, H]
    expected = np.zeros(q.shape)
    for row, length in enumerate(paged.lengths):
        kv_row = rows_of(tokens, paged, row, int(length))
        for head in range(heads):
            k, v = kv_row[:, head * kv // heads, 0], kv_row[:, head * kv // heads, 1]
            expected[row, head] = attend(q[row, [head]], k, v, scale)[0]

    def run(backend: str) -> jax.Array:
        more: dict[str, Any] = {} if scales is None else {"cache_scale": scales}
        call = lambda *a, **m: gqa_decode(*a, scale=scale, backend=backend, **m)  # noqa: E731
        return jax.jit(call)(q, cache, paged.table, paged.lengths, **more)

    return Case("gqa_decode", _words(heads, kv, dim, page, fp8=fp8), run, expected)


def mla_case(heads: int, page: int, longest: int, *, fp8: bool) -> Case:
    """Decode over a latent cache."""
    rng = np.random.default_rng(2)
    paged = scatter(lengths_for(page, longest), page, rng)
    latent, rotated = MLA["latent"], MLA["rotated"]
    parts = rng.uniform(0.01, 0.03, 2).astype(np.float32) if fp8 else None
    wide = None if parts is None else np.repeat(parts, [latent, rotated])
    held, meant = store(uniform(rng, len(paged.live), page, latent + rotated), wide)
    cache = poison(held, paged.live[:, :, None])
    q = uniform(rng, len(paged.lengths), heads, latent + rotated).astype(BF16)
    scale = (128 + rotated) ** -0.5
    expected = np.zeros((*q.shape[:2], latent))
    for row, length in enumerate(paged.lengths):
        keys = rows_of(meant, paged, row, int(length))
        expected[row] = attend(q[row], keys, keys[:, :latent], scale)

    def run(backend: str) -> jax.Array:
        more: dict[str, Any] = {} if parts is None else {"cache_scale": parts}
        call = lambda *a, **m: mla_decode(  # noqa: E731
            *a, scale=scale, latent=latent, backend=backend, **m
        )
        return jax.jit(call)(q, cache, paged.table, paged.lengths, **more)

    return Case("mla_decode", _words(heads, 1, latent + rotated, page, fp8=fp8), run, expected)


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
    by_token = meant.transpose(0, 3, 1, 2, 4)
    expected = np.zeros(q.shape)
    for row in range(len(paged.lengths)):
        ours = rows == row
        kv_row = rows_of(by_token, paged, row, int(paged.lengths[row]))
        for head in range(heads):
            k, v = kv_row[:, head * kv // heads, 0], kv_row[:, head * kv // heads, 1]
            expected[ours, head] = attend(q[ours, head], k, v, scale, positions[ours] + 1)

    def run(backend: str) -> jax.Array:
        call = lambda *a: paged_prefill(*a, scale=scale, backend=backend)  # noqa: E731
        return jax.jit(call)(q, cache, rows, positions, paged.table)

    shape = f"{_words(heads, kv, dim, page, fp8=False)}, {tokens} tokens"
    return Case("paged_prefill", shape, run, expected)


def mla_prefill_case(heads: int, page: int, tokens: int, longest: int) -> Case:
    """A ragged batch of chunks over a latent cache."""
    rng = np.random.default_rng(4)
    paged = scatter(lengths_for(page, longest), page, rng)
    latent, rotated, nope, value = MLA["latent"], MLA["rotated"], 128, 128
    held, meant = store(uniform(rng, len(paged.live), page, latent + rotated), None)
    cache = poison(held, paged.live[:, :, None])
    rows, positions = _chunks(paged, tokens, rng)
    q = uniform(rng, tokens, heads, nope + rotated).astype(BF16)
    # So scaled, decompressed keys and values lie in (-1, 1) mostly, as the other operations' do.
    w_uk, w_uv = (
        (uniform(rng, heads, n, latent) / latent**0.5).astype(BF16) for n in (nope, value)
    )
    scale = (nope + rotated) ** -0.5
    expected = np.zeros((tokens, heads, value))
    for row in range(len(paged.lengths)):
        ours = rows == row
        keys = rows_of(meant, paged, row, int(paged.lengths[row]))
        for head in range(heads):
            k = np.concatenate(
                [keys[:, :latent] @ w_uk[head].astype(np.float32).T, keys[:, latent:]], axis=1
            )
            v = keys[:, :latent] @ w_uv[head].astype(np.float32).T
            expected[ours, head] = attend(q[ours, head], k, v, scale, positions[ours] + 1)

    def run(backend: str) -> jax.Array:
        call = lambda *a: mla_prefill(*a, scale=scale, backend=backend)  # noqa: E731
        return jax.jit(call)(q, cache, rows, positions, paged.table, w_uk, w_uv)

    shape = f"{_words(heads, 1, latent + rotated, page, fp8=False)}, {tokens} tokens"
    return Case("mla_prefill", shape, run, expected)


def _words(heads: int, kv: int, dim: int, page: int, *, fp8: bool) -> str:
    return f"{heads} x {kv} heads of {dim}, page {page}, {'fp8' if fp8 else 'bf16'}"


def cases(*, small: bool) -> list[Callable[[], Case]]:
    """All cases, each made when it is called; `small` are for a CPU."""
    if small:
        return [
            lambda: gqa_case(4, 2, 64, 8, 61, fp8=False),
            lambda: gqa_case(4, 2, 64, 8, 61, fp8=True),
            lambda: mla_case(4, 8, 61, fp8=False),
            lambda: mla_case(4, 8, 61, fp8=True),
            lambda: prefill_case(4, 2, 64, 8, 64, 61),
            lambda: mla_prefill_case(2, 8, 64, 61),
        ]
    return [
        lambda: gqa_case(32, 8, 128, 16, 1500, fp8=False),
        lambda: gqa_case(32, 8, 128, 16, 1500, fp8=True),
        lambda: mla_case(16, 64, 1500, fp8=False),
        lambda: mla_case(128, 64, 1500, fp8=True),
        lambda: prefill_case(32, 8, 128, 16, 512, 700),
        lambda: mla_prefill_case(16, 64, 512, 700),
        lambda: gqa_case(64, 4, 128, 64, 1500, fp8=False),
        lambda: gqa_case(8, 8, 64, 8, 500, fp8=False),
        lambda: gqa_case(64, 4, 128, 64, 1500, fp8=True),
        lambda: mla_case(128, 64, 1500, fp8=False),
        lambda: mla_case(1, 16, 500, fp8=False),
        lambda: prefill_case(8, 8, 64, 64, 512, 700),
        lambda: mla_prefill_case(128, 16, 256, 300),
    ]


def measure(make: Callable[[], Case], backend: str) -> dict[str, Any]:
    """One case's row; a back end that refuses or fails is told in it."""
    case = make()
    begin = time.perf_counter()
    row: dict[str, Any] = {"op": case.op, "shape": case.shape, "backend": backend}
    try:
        found = np.asarray(case.run(backend), np.float64)
    except Exception as error:
        # Whatever a kernel's compiler or the device says belongs into the row of this one alone.
        return row | {"passed": False, "error": f"{type(error).__name__}: {error}"[:2000]}
    error = float(np.abs(found - case.expected).max())  # NaN where there is one
    seconds = time.perf_counter() - begin
    return row | {"max_error": error, "passed": error < LIMIT, "compile_s": seconds}


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--backend", default="mosaic_gpu")
    wanted = parser.parse_args()
    tell = take_stdout()
    for make in cases(small=wanted.small):
        tell(measure(make, wanted.backend))


if __name__ == "__main__":
    main()
