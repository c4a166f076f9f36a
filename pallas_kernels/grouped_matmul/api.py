"""The grouped matmul: shapes, checks, choice of back end."""

import functools
from collections.abc import Callable, Sequence

import jax

from pallas_kernels.dispatch import AUTO, INDICES, dispatch, operand
from pallas_kernels.grouped_matmul import mosaic_gpu, reference, xla


def grouped_matmul(
    x: jax.Array, weights: Sequence[jax.Array], sizes: jax.Array, *, backend: str = AUTO
) -> jax.Array:
    """Each row of x times the matrix of its group, or two of them as a gated unit.

    x [M, K], the rows of group 0 first, then those of group 1, ...; sizes [E] i32, the rows of each
    group, M at most in sum; weights one array [E, K, N], or two: then a row is silu(x @ first) *
    (x @ second). Returns [M, N] in x's dtype, products summed in f32; rows past the last group hold
    anything. Works on local shards inside a shard_map.

    Back ends: "reference", "xla" (`lax.ragged_dot`), "mosaic_gpu" (Hopper; bf16, K and N multiples
    of 64), "mosaic_interpret" (that kernel on a CPU). "auto" is "mosaic_gpu" in programs for CUDA
    if it takes the operands, else "xla".

    Raises ValueError for shapes that do not fit or are empty, dtypes but bf16, f16 and f32 (numpy
    arrays are taken as JAX's), an unknown back end, and one that does not take the operands.
    """
    if not 1 <= len(weights) <= 2:
        raise ValueError(f"weights: {len(weights)} arrays, expected one or two")
    x, sizes = operand("x", x), operand("sizes", sizes, INDICES)
    weights = [operand(f"weights[{i}]", w) for i, w in enumerate(weights)]
    if x.ndim != 2 or sizes.ndim != 1 or any(w.ndim != 3 for w in weights):
        shapes = [w.shape for w in weights]
        raise ValueError(
            f"expected x [M, K], weights [E, K, N], sizes [E]; got {x.shape}, {shapes}, "
            f"{sizes.shape}"
        )
    expected = (sizes.shape[0], x.shape[1], weights[0].shape[2])
    for w in weights:
        if w.shape != expected:
            raise ValueError(f"weights: {w.shape} [E, K, N] must be {expected} by x, sizes")

    def backend_of(call: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda x, sizes, *weights: call(x, weights, sizes)

    kernel = mosaic_gpu.grouped_matmul
    calls = {
        "reference": reference.grouped_matmul,
        "xla": xla.grouped_matmul,
        "mosaic_gpu": kernel,
        "mosaic_interpret": functools.partial(kernel, interpret=True),
    }
    backends = {name: backend_of(call) for name, call in calls.items()}
    unsupported = mosaic_gpu.supports(x, weights)
    return dispatch(backend, backends, (x, sizes, *weights), unsupported)
