"""The kernels that are compiled one by one, at the shapes that the large models give them."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.cost import Cost
from pallas_kernels.gqa_decode import gqa_decode
from pallas_kernels.gqa_decode.cost import cost as gqa_decode_cost
from pallas_kernels.mla_prefill import mla_prefill
from pallas_kernels.mla_prefill.cost import cost as mla_prefill_cost

PAGES = 8192
WIDTH = 512  # pages of a row in the table
ROWS, CONTEXT = 64, 4096  # of a decode step: requests, and tokens that each has in the cache
BACKEND = "mosaic_gpu"


@dataclass(frozen=True)
class KernelCase:
    """One operation at one shape: a function of arrays, and what their shapes and dtypes are.

    `cost` is of the lengths that `shape` names; the program takes any.
    """

    op: str
    shape: str
    run: Callable[..., jax.Array]
    operands: tuple[tuple[tuple[int, ...], str], ...]
    cost: Cost

    @property
    def name(self) -> str:
        """How a failure and the table name it."""
        return f"{self.op} [{self.shape}]"


# Functions of a module: they travel to the process that compiles them.
def _run_gqa_decode(
    q: jax.Array,
    cache: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    cache_scale: jax.Array | None = None,
    *,
    scale: float,
) -> jax.Array:
    return gqa_decode(
        q, cache, table, lengths, scale=scale, cache_scale=cache_scale, backend=BACKEND
    )


def _gqa_decode(
    heads: int, kv_heads: int, head_dim: int, page_size: int, *, cache: str = "bfloat16"
) -> KernelCase:
    pages = ((PAGES, kv_heads, 2, page_size, head_dim), cache)
    fp8 = cache == "uint8"
    scale = (((kv_heads, 2), "float32"),) if fp8 else ()
    return KernelCase(
        "gqa_decode",
        f"{heads}/{kv_heads} heads of {head_dim}, {'fp8 ' if fp8 else ''}pages of {page_size}, "
        f"{ROWS} rows of {CONTEXT}",
        functools.partial(_run_gqa_decode, scale=head_dim**-0.5),
        (
            ((ROWS, heads, head_dim), "bfloat16"),
            pages,
            ((ROWS, WIDTH), "int32"),
            ((ROWS,), "int32"),
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


def _latent_prefill(heads: int, page_size: int, chunk: tuple[int, int]) -> KernelCase:
    before, tokens = chunk
    sizes = {"nope": 128, "rotated": 64, "latent": 512, "v_dim": 128}
    width = sizes["latent"] + sizes["rotated"]
    return KernelCase(
        "mla_prefill",
        f"{heads} heads, pages of {page_size}, {tokens} tokens after {before}",
        functools.partial(mla_prefill, scale=0.1, backend=BACKEND),
        (
            ((tokens, heads, sizes["nope"] + sizes["rotated"]), "bfloat16"),
            ((PAGES, page_size, width), "bfloat16"),
            ((tokens,), "int32"),
            ((tokens,), "int32"),
            ((8, WIDTH), "int32"),
            ((heads, sizes["nope"], sizes["latent"]), "bfloat16"),
            ((heads, sizes["v_dim"], sizes["latent"]), "bfloat16"),
        ),
        mla_prefill_cost([chunk], heads=heads, **sizes),
    )


def kernel_cases() -> list[KernelCase]:
    """All of them. Heads are those of one device: tp 8 of DeepSeek-R1 has 16, dp 8 all 128."""
    return [
        _gqa_decode(12, 1, 128, 64),  # Qwen3-Coder-480B, tp 8
        _gqa_decode(12, 1, 128, 16),
        _gqa_decode(16, 2, 128, 128),
        _gqa_decode(9, 3, 64, 16),  # SmolLM2-135M
        _gqa_decode(64, 1, 128, 64),
        _gqa_decode(12, 1, 128, 64, cache="uint8"),
        _latent_prefill(16, 64, (0, 1024)),
        _latent_prefill(16, 16, (4096, 1024)),
        _latent_prefill(128, 64, (0, 1024)),
    ]


def operands_of(case: KernelCase, sharding: jax.sharding.Sharding) -> list[jax.ShapeDtypeStruct]:
    """The operands to lower with."""
    return [
        jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)
        for shape, dtype in case.operands
    ]
