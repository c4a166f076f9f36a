"""Merging what the pieces of each row gave: one block of threads per row and tile of query heads.

As plain XLA operations this would be eight kernels, each for longer than it has work.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic, online_softmax
from pallas_kernels.mosaic import TILE_ROWS, Ref
from pallas_kernels.online_softmax import Softmax

STAGES = 2  # three blocks of threads of head dim 128 fit on a processor


def merge(
    halves: jax.Array,
    lse: jax.Array,
    bounds: jax.Array,
    v_scale: jax.Array,
    dtype: jax.typing.DTypeLike,
    *,
    interpret: bool,
) -> jax.Array:
    """The rows' results [B, K*tiles, M, H] in dtype.

    halves [S, K*tiles, 2, M, H], which add up to each piece's result; lse f32 [S, K*tiles, 64],
    log2 of the sum of its weights (the first M count); bounds i32 [B+1] as in `splitting.Pieces`;
    v_scale f32 [K*tiles], by which results are multiplied. Rows without a piece give zeros.
    """
    _, q_tiles, _, per_tile, head_dim = halves.shape
    rows = bounds.shape[0] - 1

    def body(
        half_ref: Ref, lse_ref: Ref, bound_ref: Ref, scale_ref: Ref, out_ref: Ref,
        ring: Ref, out_tile: Ref, here: Ref,
    ) -> None:  # fmt: skip
        row, tile = lax.axis_index("row"), lax.axis_index("head")
        first, end = bound_ref[row], bound_ref[row + 1]

        def fetch(piece: jax.Array, slot: jax.Array) -> None:
            for half in range(2):
                target = ring.at[2 * slot + half, mosaic.span(0, per_tile)]
                mosaic.load(half_ref.at[piece, tile, half], target, here.at[slot])

        for stage in range(STAGES):
            piece = first + stage

            @mosaic.when(piece < end)
            def fill(piece: jax.Array = piece, stage: int = stage) -> None:
                fetch(piece, jnp.int32(stage))

        def step(piece: jax.Array, carry: tuple[jax.Array, Softmax]) -> tuple[jax.Array, Softmax]:
            acc, seen = carry
            slot = lax.rem(piece - first, jnp.int32(STAGES))
            of_piece = mosaic.read_per_row(lse_ref.at[piece, tile])
            top = jnp.maximum(seen.top, of_piece)
            decay, weight = jnp.exp2(seen.top - top), jnp.exp2(of_piece - top)
            mosaic.wait(here.at[slot])
            high, low = (mosaic.read(ring.at[2 * slot + half]) for half in range(2))
            values = high.astype(jnp.float32) + low.astype(jnp.float32)
            acc = acc * mosaic.across(decay, acc) + values * mosaic.across(weight, values)
            mosaic.commit()  # the slot has been read

            @mosaic.when(piece + STAGES < end)
            def refill() -> None:
                fetch(piece + STAGES, slot)

            return acc, Softmax(top, seen.total * decay + weight)

        carry = mosaic.zeros(TILE_ROWS, head_dim), online_softmax.start(TILE_ROWS)
        acc, seen = lax.fori_loop(first, end, step, carry)
        out_tile[...] = (online_softmax.divide(seen, acc) * scale_ref[tile]).astype(dtype)
        mosaic.commit()
        mosaic.store(out_tile.at[mosaic.span(0, per_tile)], out_ref.at[row, tile])
        mosaic.drain_stores()

    (out,) = mosaic.launch(
        body,
        [jax.ShapeDtypeStruct((rows, q_tiles, per_tile, head_dim), dtype)],
        grid={"head": q_tiles, "row": rows},
        scratch=[
            mosaic.shared_tile((2 * STAGES, TILE_ROWS, head_dim), halves.dtype),
            mosaic.shared_tile((TILE_ROWS, head_dim), dtype),
            mosaic.barriers(STAGES, arrivals=2),
        ],
        reduction_bytes=0,
        name="gqa_decode_merge",
        interpret=interpret,
    )(halves, lse, bounds, v_scale)
    return out
