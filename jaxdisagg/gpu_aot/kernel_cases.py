"""The kernels that are compiled one by one, at the shapes that the large models give them.

Heads are those of one device: of DeepSeek-R1's 128, tp 8 leaves 16 and data parallelism all.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.cost import Cost
from pallas_kernels.gqa_decode import gqa_decode
from pallas_kernels.gqa_decode.cost import cost as gqa_decode_cost
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.cost import cost as grouped_matmul_cost
from pallas_kernels.mla_decode import mla_decode
from pallas_kernels.mla_decode.cost import cost as mla_decode_cost
from pallas_kernels.mla_prefill import mla_prefill
from pallas_kernels.mla_prefill.cost import cost as mla_prefill_cost
from pallas_kernels.paged_prefill import paged_prefill
from pallas_kernels.paged_prefill.cost import cost as paged_prefill_cost

PAGES = 8192
WIDTH = 512  # pages of a row in the table
ROWS, CONTEXT = 64, 4096  # of a decode step: requests, and tokens that each has in the cache
PREFILL_ROWS = 8
BACKEND = "mosaic_gpu"
NOPE, ROTATED, LATENT, V_DIM = 128, 64, 512, 128  # DeepSeek-V3's latent attention
SCALE = 0.1  # of scores; any does

Operand = tuple[tuple[int, ...], str]  # shape, dtype
TABLE: Operand = ((ROWS, WIDTH), "int32")
LENGTHS: Operand = ((ROWS,), "int32")
PREFILL_TABLE: Operand = ((PREFILL_ROWS, WIDTH), "int32")


@dataclass(frozen=True)
class KernelCase:
    """One operation at one shape: a function of arrays, and what their shapes and dtypes are.

    `cost` is of the lengths that `shape` names; the program takes any. `run` is a function of a
    module or a partial of one: it travels to the process that compiles it.
    """

    op: str
    shape: str
    run: Callable[..., jax.Array]
    operands: tuple[Operand, ...]
    cost: Cost

    @property
    def name(self) -> str:
        """How a failure and the table name it."""
        return f"{self.op} [{self.shape}]"


def operands_of(case: KernelCase, sharding: jax.sharding.Sharding) -> list[jax.ShapeDtypeStruct]:
    """The operands to lower with."""
    return [
        jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)
        for shape, dtype in case.operands
    ]


def kernel_cases() -> list[KernelCase]:
    """All of them; every dtype and every kind of page size and head count of each operation."""
    return [
        _gqa_decode(12, 1, 128, 64),  # Qwen3-Coder-480B, tp 8
        _gqa_decode(12, 1, 128, 16),
        _gqa_decode(16, 2, 128, 128),
        _gqa_decode(9, 3, 64, 16),  # SmolLM2-135M
        _gqa_decode(64, 1, 128, 64),
        _gqa_decode(12, 1, 128, 64, "uint8"),
        _mla_decode(16, 64),
        _mla_decode(16, 16),
        _mla_decode(1, 64),
        _mla_decode(128, 64),
        _mla_decode(16, 64, "uint8"),
        _mla_decode(128, 64, "uint8"),
        _paged_prefill(12, 1, 128, 64, (0, 1024)),
        _paged_prefill(12, 1, 128, 16, (4096, 1024)),
        _paged_prefill(9, 3, 64, 16, (0, 1024)),
        _mla_prefill(16, 64, (0, 1024)),
        _mla_prefill(16, 16, (4096, 1024)),
        _mla_prefill(128, 64, (0, 1024)),
        _grouped_matmul(160, 8, 64, 6144, 320),  # Qwen3-Coder-480B, tp 8, 64 tokens
        _grouped_matmul(160, 8, 1024, 6144, 320),
        _grouped_matmul(256, 8, 1024, 7168, 256),  # DeepSeek-R1, tp 8
    ]


def _run_decode(
    q: jax.Array,
    cache: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    cache_scale: jax.Array | None = None,
    *,
    op: Callable[..., jax.Array],
    **static: int,
) -> jax.Array:
    where = {"cache_scale": cache_scale, "backend": BACKEND}
    return op(q, cache, table, lengths, scale=SCALE, **where, **static)


def _gqa_decode(
    heads: int, kv_heads: int, head_dim: int, page_size: int, cache: str = "bfloat16"
) -> KernelCase:
    scale: tuple[Operand, ...] = (((kv_heads, 2), "float32"),) if cache == "uint8" else ()
    return KernelCase(
        "gqa_decode",
        f"{heads}/{kv_heads} heads of {head_dim}, {_decoding(page_size, cache)}",
        functools.partial(_run_decode, op=gqa_decode),
        (
            ((ROWS, heads, head_dim), "bfloat16"),
            ((PAGES, kv_heads, 2, page_size, head_dim), cache),
            TABLE,
            LENGTHS,
            *scale,
        ),
        gqa_decode_cost(
            [CONTEXT] * ROWS,
            num_heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            cache_itemsize=jnp.dtype(cache).itemsize,
        ),
    )


def _mla_decode(heads: int, page_size: int, cache: str = "bfloat16") -> KernelCase:
    scale: tuple[Operand, ...] = (((2,), "float32"),) if cache == "uint8" else ()
    return KernelCase(
        "mla_decode",
        f"{heads} heads, {_decoding(page_size, cache)}",
        functools.partial(_run_decode, op=mla_decode, latent=LATENT),
        (
            ((ROWS, heads, LATENT + ROTATED), "bfloat16"),
            ((PAGES, page_size, LATENT + ROTATED), cache),
            TABLE,
            LENGTHS,
            *scale,
        ),
        mla_decode_cost(
            [CONTEXT] * ROWS,
            num_heads=heads,
            latent=LATENT,
            rotated=ROTATED,
            page_size=page_size,
            cache_itemsize=jnp.dtype(cache).itemsize,
        ),
    )


def _decoding(page_size: int, cache: str) -> str:
    kind = "fp8 pages" if cache == "uint8" else "pages"
    return f"{kind} of {page_size}, {ROWS} rows of {CONTEXT}"


def _paged_prefill(
    heads: int, kv_heads: int, head_dim: int, page_size: int, chunk: tuple[int, int]
) -> KernelCase:
    tokens = ((chunk[1],), "int32")
    return KernelCase(
        "paged_prefill",
        f"{heads}/{kv_heads} heads of {head_dim}, {_prefilling(page_size, chunk)}",
        functools.partial(paged_prefill, scale=SCALE, backend=BACKEND),
        (
            ((chunk[1], heads, head_dim), "bfloat16"),
            ((PAGES, kv_heads, 2, page_size, head_dim), "bfloat16"),
            tokens,
            tokens,
            PREFILL_TABLE,
        ),
        paged_prefill_cost([chunk], num_heads=heads, kv_heads=kv_heads, head_dim=head_dim),
    )


def _mla_prefill(heads: int, page_size: int, chunk: tuple[int, int]) -> KernelCase:
    tokens = ((chunk[1],), "int32")
    return KernelCase(
        "mla_prefill",
        f"{heads} heads, {_prefilling(page_size, chunk)}",
        functools.partial(mla_prefill, scale=SCALE, backend=BACKEND),
        (
            ((chunk[1], heads, NOPE + ROTATED), "bfloat16"),
            ((PAGES, page_size, LATENT + ROTATED), "bfloat16"),
            tokens,
            tokens,
            PREFILL_TABLE,
            ((heads, NOPE, LATENT), "bfloat16"),
            ((heads, V_DIM, LATENT), "bfloat16"),
        ),
        mla_prefill_cost(
            [chunk], heads=heads, nope=NOPE, rotated=ROTATED, latent=LATENT, v_dim=V_DIM
        ),
    )


def _prefilling(page_size: int, chunk: tuple[int, int]) -> str:
    before, tokens = chunk
    return f"pages of {page_size}, {tokens} tokens after {before}"


def _run_gated(x: jax.Array, sizes: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
    return grouped_matmul(x, (gate, up), sizes, backend=BACKEND)


def _grouped_matmul(experts: int, choices: int, tokens: int, depth: int, width: int) -> KernelCase:
    rows = tokens * choices
    matrix = ((experts, depth, width), "bfloat16")
    return KernelCase(
        "grouped_matmul",
        f"{experts} gated experts of {depth} x {width}, {tokens} tokens to {choices} each",
        _run_gated,
        (((rows, depth), "bfloat16"), ((experts,), "int32"), matrix, matrix),
        # each token to experts of its own as far as there are any
        grouped_matmul_cost(rows, depth, width, groups=min(rows, experts), matrices=2),
    )
