"""Which back end runs an operation: named, or chosen by the platform of the lowered program.

Every op has one signature. Its `api.py` checks the operands (`operand` their dtypes, the others
their shapes and numbers) and hands its back ends to `dispatch`:
"reference" (the truth for tests), "xla" (every platform), "mosaic_gpu" (Hopper's kernel) and
"mosaic_interpret" (that kernel on a CPU, with race detection).
"""

import math
import numbers
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

# "auto" takes the platform's own kernel where there is one, and "xla" everywhere else.
AUTO = "auto"
MOSAIC = ("mosaic_gpu", "mosaic_interpret")
Kernel = Callable[..., jax.Array]

# What operands may hold: numbers; cached numbers, in uint8 as e4m3; indices and lengths.
NUMBERS = ("bfloat16", "float16", "float32")
CACHED = (*NUMBERS, "uint8")
INDICES = ("int32",)


def dispatch(
    backend: str,
    backends: Mapping[str, Kernel],
    operands: tuple[jax.Array, ...],
    unsupported: str | None = None,
) -> jax.Array:
    """Run `backends[backend]` on the operands.

    "auto" is "mosaic_gpu" in programs for CUDA where the op has it and it takes the operands, and
    "xla" elsewhere. `unsupported` says why the Mosaic kernel does not take them, None if it does.
    Raises ValueError for a back end that the op does not have or that does not take the operands.
    """
    if backend == AUTO:
        if "mosaic_gpu" not in backends or unsupported is not None:
            return backends["xla"](*operands)
        return lax.platform_dependent(
            *operands, default=backends["xla"], cuda=backends["mosaic_gpu"]
        )
    if backend not in backends:
        known = ", ".join((AUTO, *sorted(backends)))
        raise ValueError(f"backend: {backend!r} is not one of {known}")
    if backend in MOSAIC and unsupported is not None:
        raise ValueError(f"backend: {backend!r} does not take these operands: {unsupported}")
    return backends[backend](*operands)


def operand(name: str, value: ArrayLike, allowed: tuple[str, ...] = NUMBERS) -> jax.Array:
    """`value` as an array of JAX (numpy arrays are taken too), of any shape.

    Raises ValueError naming it if its dtype is not allowed, or if it has no elements: no op has a
    result or a use for such an operand.
    """
    array = jnp.asarray(value)
    if array.dtype.name not in allowed:
        raise ValueError(f"{name}: {array.dtype} is not {' or '.join(allowed)}")
    if not array.size:
        raise ValueError(f"{name}: {array.shape} has an axis of length 0; each must be 1 or more")
    return array


def check_factor(name: str, value: float) -> None:
    """Raise ValueError unless `value` is a finite number, known while the program is traced."""
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"{name}: {value!r} is not a finite number of Python or numpy")


def check_paged(q: jax.Array, cache: jax.Array, page_table: jax.Array) -> None:
    """Raise ValueError unless q [., N, H], cache [P, K, 2, Z, H] and page_table [., W] fit."""
    if q.ndim != 3 or cache.ndim != 5 or page_table.ndim != 2:
        raise ValueError(
            f"expected q [., N, H], cache [P, K, 2, Z, H], page_table [., W]; got "
            f"{q.shape}, {cache.shape}, {page_table.shape}"
        )
    if cache.shape[2] != 2 or cache.shape[4] != q.shape[2] or q.shape[1] % cache.shape[1]:
        raise ValueError(
            f"q {q.shape} does not fit cache {cache.shape}: head dims must be equal, query heads a "
            f"multiple of KV heads, and the cache's third axis must be K and V"
        )


def check_scale(
    cache: jax.Array, cache_scale: ArrayLike | None, shape: tuple[int, ...]
) -> tuple[jax.Array, ...]:
    """The operands that follow the others: the scale of a uint8 cache, none for another cache.

    Raises ValueError unless a uint8 cache, and no other, has an f32 cache_scale of this shape.
    """
    if (cache.dtype == jnp.uint8) != (cache_scale is not None):
        has = "no cache_scale" if cache_scale is None else "a cache_scale"
        raise ValueError(
            f"cache_scale: a cache of {cache.dtype} with {has}; uint8, which holds e4m3 numbers, "
            f"needs one, and no other cache has one"
        )
    if cache_scale is None:
        return ()
    cache_scale = jnp.asarray(cache_scale)
    if cache_scale.shape != shape or cache_scale.dtype != jnp.float32:
        raise ValueError(
            f"cache_scale: {cache_scale.dtype} {cache_scale.shape} is not float32 {shape}"
        )
    return (cache_scale,)


def check_latent(q: jax.Array, cache: jax.Array, page_table: jax.Array) -> None:
    """Raise ValueError unless q [., N, .], cache [P, Z, R+C] and page_table [., W] have these axes.

    Which widths fit is for each operation to check.
    """
    if q.ndim != 3 or cache.ndim != 3 or page_table.ndim != 2:
        raise ValueError(
            f"expected q [., N, .], cache [P, Z, R+C], page_table [., W]; got "
            f"{q.shape}, {cache.shape}, {page_table.shape}"
        )
