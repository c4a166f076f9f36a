"""Merging what the pieces of each row gave: one block of threads per row and head.

As plain XLA operations this would be eight kernels, each for longer than it has work.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic, mosaic_turned
from pallas_kernels.mosaic import Ref
from pallas_kernels.online_softmax import FLOOR
from pallas_kernels.paging import MASKED

# Pieces read at once: one after the other, a row of many would take the memory's latency for each.
TOGETHER = 8


def merge(
    parts: jax.Array,
    lse: jax.Array,
    bounds: jax.Array,
    gain: jax.Array,
    *,
    heads: int,
    interpret: bool,
) -> jax.Array:
    """The rows' results bf16 [B, heads, R].

    parts f32 [S, N, R], each piece's weighted mean, of which the first `heads` count; lse f32
    [S, N], log2 of the sum of its weights; bounds i32 [B+1] as in `splitting.Pieces`; gain f32 [1],
    by which results are multiplied. Rows without a piece give zeros.
    """
    rows, size = bounds.shape[0] - 1, parts.shape[2]

    def body(part_ref: Ref, lse_ref: Ref, bound_ref: Ref, gain_ref: Ref, out_ref: Ref) -> None:
        row, head = lax.axis_index("row"), lax.axis_index("head")
        first, end = bound_ref[row], bound_ref[row + 1]

        def step(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            total, top, weighed = carry
            pieces = [first + i * TOGETHER + j for j in range(TOGETHER)]
            at = [jnp.minimum(piece, end - 1) for piece in pieces]
            values = [mosaic_turned.read_vector(part_ref.at[piece, head]) for piece in at]
            sums = [
                jnp.where(piece < end, lse_ref[here, head], MASKED)
                for piece, here in zip(pieces, at, strict=True)
            ]
            new_top = top
            for of_piece in sums:
                new_top = jnp.maximum(new_top, of_piece)
            shrink = jnp.exp2(top - new_top)
            total, weighed = total * shrink, weighed * shrink
            for value, of_piece in zip(values, sums, strict=True):
                weight = jnp.exp2(of_piece - new_top)
                total, weighed = total + weight, weighed + value * weight
            return total, new_top, weighed

        steps = (end - first + (TOGETHER - 1)) // TOGETHER
        start = jnp.float32(0), jnp.float32(FLOOR), mosaic_turned.vector(0.0, size)
        total, _, weighed = lax.fori_loop(0, steps, step, start)
        mean = weighed * (gain_ref[0] / jnp.maximum(total, 1e-30))
        mosaic_turned.write(out_ref.at[row, head], mean.astype(jnp.bfloat16))

    (out,) = mosaic.launch(
        body,
        [jax.ShapeDtypeStruct((rows, heads, size), jnp.bfloat16)],
        grid={"head": heads, "row": rows},
        scratch=[],
        reduction_bytes=0,
        name="mla_decode_merge",
        interpret=interpret,
    )(parts, lse, bounds, gain)
    return out
