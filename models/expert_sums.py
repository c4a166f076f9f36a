"""What one device's experts add to each token: a loop of blocks on CPU, grouped matmuls on GPU.

Both begin with the (token, choice) pairs sorted by expert, those of other devices' experts last.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

GatedWeights = tuple[jax.Array, jax.Array, jax.Array]  # gate, up [E, D, F], down [E, F, D]

# Rows that one round of the CPU's loop gives to an expert, at least and at most. A round copies the
# expert's weights and computes all its rows: twice an expert's average number of tokens was fastest
# (64 experts of 512 x 256, 8 a token: within 1.2 times a dense MLP of the weights that are read).
_MIN_BLOCK, _MAX_BLOCK = 8, 128


def sum_experts(
    x: jax.Array, ids: jax.Array, weights: jax.Array, experts: GatedWeights, average: int
) -> jax.Array:
    """[T, D], what this device's experts 0..E-1 add to tokens x [T, D]; other ids are foreign.

    `average` is the number of tokens that an expert can be expected to have.
    """
    count = experts[0].shape[0]
    flat = ids.reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < count), flat, count)
    order = jnp.argsort(flat)  # (token, choice) pairs, by expert, the foreign ones last
    sizes = jnp.sum(flat[:, None] == jnp.arange(count), axis=0)  # pairs of each expert
    operands = (x, weights, order, sizes, *experts)
    block = min(max(_MIN_BLOCK, 2 ** math.ceil(math.log2(2 * average))), _MAX_BLOCK)
    loop = functools.partial(blocked, block=block)
    out = lax.platform_dependent(*operands, default=loop, cuda=ragged)
    return out.astype(x.dtype)


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

    There are as many rounds as the sizes ask for: an expert without tokens is not touched.
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
        rows = jnp.where(mine[:, None], x[pairs // k], 0)
        inner = jax.nn.silu(_dot_f32(rows, gate[e])) * _dot_f32(rows, up[e])
        y = _dot_f32(inner.astype(x.dtype), down[e]) * weights[pairs][:, None]
        return out.at[jnp.where(mine, pairs // k, tokens)].add(y, mode="drop")

    return lax.fori_loop(0, block_ends[-1], add_block, jnp.zeros(x.shape, jnp.float32))


def ragged(
    x: jax.Array,
    weights: jax.Array,
    order: jax.Array,
    sizes: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
) -> jax.Array:
    """f32 [T, D]: all pairs at once, by grouped matmuls over T * k rows."""
    tokens, k = weights.shape

    def grouped(rows: jax.Array, w: jax.Array) -> jax.Array:
        return lax.ragged_dot(rows, w, sizes, preferred_element_type=jnp.float32)

    rows = x[order // k]
    inner = jax.nn.silu(grouped(rows, gate)) * grouped(rows, up)
    y = grouped(inner.astype(x.dtype), down)
    mine = jnp.arange(tokens * k) < sizes.sum()
    y = jnp.where(mine[:, None], y * weights.reshape(-1)[order][:, None], 0)
    # Back to the tokens' order: each token's sum has a fixed order, as a scatter's has not.
    return y[jnp.argsort(order)].reshape(tokens, k, -1).sum(1)


def _dot_f32(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)
