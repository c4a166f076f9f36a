"""What one device's experts add to each token: grouped matmuls on GPUs, a loop of blocks elsewhere.

All begin with the (token, choice) pairs sorted by expert, those of other devices' experts last.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul import grouped_matmul, supports

GatedWeights = tuple[jax.Array, jax.Array, jax.Array]  # gate, up [E, D, F], down [E, F, D]

# Rows that one round of the CPU's loop gives to an expert, at least and at most. A round copies the
# expert's weights and computes all its rows: twice an expert's average number of tokens was fastest
# (scripts/bench_experts.py).
_MIN_BLOCK, _MAX_BLOCK = 8, 128
# Elements of [pairs, experts, D] up to which a GPU takes `lax.ragged_dot` for what the kernel does
# not take: XLA of jax 0.12 makes of it one dense product over all local experts with such an
# operand (docs/adr/0014). Small ones spare the loop's launches.
_MAX_EXPANDED = 2**27


def sum_experts(
    x: jax.Array, ids: jax.Array, weights: jax.Array, experts: GatedWeights, average: int
) -> jax.Array:
    """[T, D], what this device's experts 0..E-1 add to tokens x [T, D]; other ids are foreign.

    `average` is the number of tokens that an expert can be expected to have.
    """
    operands = (x, weights, *sort_pairs(ids, experts[0].shape[0]), *experts)
    block = min(max(_MIN_BLOCK, 2 ** math.ceil(math.log2(2 * average))), _MAX_BLOCK)
    loop = functools.partial(blocked, block=block)
    few = ids.size * experts[0].shape[0] * x.shape[1] <= _MAX_EXPANDED
    on_gpu = grouped if takes_kernel(x, experts) else ragged if few else loop
    out = lax.platform_dependent(*operands, default=loop, cuda=on_gpu)
    return out.astype(x.dtype)


def takes_kernel(x: jax.Array, experts: GatedWeights) -> bool:
    """Whether both products fit the kernel: bf16, widths that are multiples of 64."""
    gate, up, down = experts
    inner = jax.ShapeDtypeStruct((1, down.shape[1]), x.dtype)
    refused = supports(x, (gate, up)) or supports(inner, (down,))
    return refused is None


def sort_pairs(ids: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Of ids [T, k]: i32 [T * k], the pairs by expert 0..count-1 and then all others; i32 [count].

    A pair's number is token * k + choice; the second array is the number of pairs of each expert.
    """
    flat = ids.reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < count), flat, count)
    return jnp.argsort(flat), jnp.sum(flat[:, None] == jnp.arange(count), axis=0)


def blocked(
    x: jax.Array,
    weights: jax.Array,
    order: jax.Array,
    sizes: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    block: int,
) -> jax.Array:
    """f32 [T, D]: a loop over blocks of `block` pairs, each block of one expert.

    `order` and `sizes` as `sort_pairs` gives them. There are as many rounds as the sizes ask for:
    an expert without tokens is not touched.
    """
    tokens, k = weights.shape
    blocks = -(-sizes // block)
    ends, block_ends = jnp.cumsum(sizes), jnp.cumsum(blocks)
    order = jnp.pad(order, (0, block))  # the last block may reach beyond the last pair
    weights = weights.reshape(-1)

    def add_block(i: jax.Array, out: jax.Array) -> jax.Array:
        e = jnp.sum(block_ends <= i)
        start = ends[e] - sizes[e] + (i - (block_ends[e] - blocks[e])) * block
        mine = start + jnp.arange(block) < ends[e]
        pairs = lax.dynamic_slice_in_dim(order, start, block)
        rows = x[pairs // k]
        inner = jax.nn.silu(_dot_f32(rows, gate[e])) * _dot_f32(rows, up[e])
        y = _dot_f32(inner.astype(x.dtype), down[e]) * weights[pairs][:, None]
        return out.at[jnp.where(mine, pairs // k, tokens)].add(y, mode="drop")

    return lax.fori_loop(0, block_ends[-1], add_block, jnp.zeros(x.shape, jnp.float32))


def grouped(
    x: jax.Array,
    weights: jax.Array,
    order: jax.Array,
    sizes: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    backend: str = "mosaic_gpu",
) -> jax.Array:
    """f32 [T, D] as `blocked`: two grouped matmuls over T * k rows, whatever the sizes are.

    What an expert makes of a token is rounded to x's dtype before it is weighted.
    """
    tokens, k = weights.shape
    inner = grouped_matmul(x[order // k], (gate, up), sizes, backend=backend)
    y = grouped_matmul(inner, (down,), sizes, backend=backend)
    at = jnp.zeros_like(order).at[order].set(jnp.arange(tokens * k), unique_indices=True)
    mine = (at < sizes.sum()).reshape(tokens, k)
    # Pairs of other devices all read row 0, which costs no memory traffic.
    y = y[jnp.where(mine, at.reshape(tokens, k), 0)].astype(jnp.float32)
    return jnp.sum(jnp.where(mine[..., None], y * weights[..., None], 0), axis=1)


def ragged(
    x: jax.Array,
    weights: jax.Array,
    order: jax.Array,
    sizes: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
) -> jax.Array:
    """f32 [T, D] as `blocked`: all pairs at once, by grouped matmuls over T * k rows."""
    tokens, k = weights.shape

    def product(rows: jax.Array, w: jax.Array) -> jax.Array:
        return lax.ragged_dot(rows, w, sizes, preferred_element_type=jnp.float32)

    rows = x[order // k]
    inner = jax.nn.silu(product(rows, gate)) * product(rows, up)
    y = product(inner.astype(x.dtype), down)
    mine = jnp.arange(tokens * k) < sizes.sum()
    y = jnp.where(mine[:, None], y * weights.reshape(-1)[order][:, None], 0)
    # Back to the tokens' order: each token's sum has a fixed order, as a scatter's has not.
    return y[jnp.argsort(order)].reshape(tokens, k, -1).sum(1)


def _dot_f32(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)
