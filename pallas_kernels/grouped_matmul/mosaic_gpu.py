"""The grouped matmul on Hopper: one block of threads per tile of one group's rows and columns.

XLA operations list the tiles: rows are cut at multiples of a tile's rows, where loads may begin,
and between groups, so a tile has one matrix; the rows of its block that are of other groups are
multiplied too and not stored. There are as many blocks of threads as tiles at most; what is not
needed ends at once, so no host waits for the sizes. One warpgroup loads rows and matrices into a
ring of shared memory, one or two multiply 64 rows each. Not run on hardware.
"""

import functools
from collections.abc import Sequence
from itertools import product

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.mosaic import Ref

DEPTH = 64  # of the products that one stage of the ring holds
MAX_STAGES = 4

Shaped = jax.Array | jax.ShapeDtypeStruct


def supports(x: Shaped, weights: Sequence[Shaped]) -> str | None:
    """Why the kernel does not take these shapes and dtypes; None if it does."""
    for name, array in (("x", x), *(("weights", w) for w in weights)):
        if array.dtype != jnp.bfloat16:
            return f"{name} is {array.dtype}, not bfloat16"
    for name, size in (("K", x.shape[1]), ("N", weights[0].shape[2])):
        if size % 64 or not size:
            return f"{name} = {size} is not a multiple of 64"
    return None


def _tiles(sizes: jax.Array, rows: int, most: int) -> jax.Array:
    """i32 [most, 4]: each tile's group, block of `rows` rows, and its own rows: from, count.

    What is not needed has 0 rows.
    """
    ends = jnp.cumsum(sizes)
    first_block = (ends - sizes) // rows
    tiles = jnp.where(sizes > 0, (ends - 1) // rows - first_block + 1, 0)
    tile_ends = jnp.cumsum(tiles)
    index = jnp.arange(most)
    group = jnp.minimum(jnp.sum(tile_ends <= index[:, None], axis=1), len(sizes) - 1)
    block = first_block[group] + index - (tile_ends - tiles)[group]
    first = jnp.maximum((ends - sizes)[group], block * rows)
    count = jnp.minimum(ends[group], (block + 1) * rows) - first
    live = index < tile_ends[-1]
    return jnp.stack([jnp.where(live, a, 0) for a in (group, block, first, count)], axis=1)


# One trace and one function in the program for all layers of a model.
@functools.partial(jax.jit, static_argnames=("interpret",))
def grouped_matmul(
    x: jax.Array, weights: Sequence[jax.Array], sizes: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """As `api.grouped_matmul`, for what `supports` takes."""
    rows, depth = x.shape
    groups, _, width = weights[0].shape
    # With few rows a group the time is that of reading the matrices, whatever is multiplied.
    parts = 2 if rows >= mosaic.TILE_ROWS * groups else 1
    tile_rows = parts * mosaic.TILE_ROWS
    most = rows // tile_rows + min(groups, rows)
    columns = 128 if width % 128 == 0 else 64
    # A tile is as wide as one warpgroup has registers for: both matrices, or two pieces of one.
    pieces = 2 if len(weights) == 1 and width % (2 * columns) == 0 else 1
    products = len(weights) * pieces
    out_bytes = tile_rows * columns * pieces * 2
    stage_bytes = (tile_rows + columns * products) * DEPTH * 2
    stages = min(MAX_STAGES, (mosaic.SHARED_LIMIT - 4096 - out_bytes) // stage_bytes)
    steps = depth // DEPTH

    def body(x_ref: Ref, *refs: Ref) -> None:
        matrices, (tile_ref, out_ref, x_tile), refs = (
            refs[: len(weights)],
            refs[len(weights) : len(weights) + 3],
            refs[len(weights) + 3 :],
        )
        tiles, out_tiles, (here, free) = refs[:products], refs[products:-2], refs[-2:]
        tile, part = lax.axis_index("tile"), lax.axis_index(mosaic.WARPGROUP)
        group, block, first, count = (tile_ref[tile, i] for i in range(4))
        column = lax.axis_index("column") * pieces
        mine = [mosaic.span((column + i) * columns, columns) for i in range(pieces)]

        @mosaic.when((part == parts) & (count > 0))
        def load() -> None:
            if parts == 2:
                mosaic.move_registers(40, "decrease")

            def step(i: jax.Array, _: None) -> None:
                slot, at = lax.rem(i, jnp.int32(stages)), mosaic.span(i * DEPTH, DEPTH)
                mosaic.when(i >= stages)(lambda: mosaic.wait(free.at[slot]))
                for half in range(parts):
                    row = block * tile_rows + half * mosaic.TILE_ROWS
                    its = mosaic.span(row, mosaic.TILE_ROWS)
                    mosaic.load(x_ref.at[its, at], x_tile.at[slot, half], here.at[slot])
                for (matrix, its), to in zip(product(matrices, mine), tiles, strict=True):
                    mosaic.load(matrix.at[group, at, its], to.at[slot], here.at[slot])

            lax.fori_loop(0, steps, step, None)
            for i in range(max(0, steps - stages), steps):  # no completion may be left unawaited
                mosaic.wait(free.at[i % stages])

        @mosaic.when((part < parts) & (count > 0))
        def compute() -> None:
            if parts == 2:
                mosaic.move_registers(232, "increase")

            def multiply(*sums: Ref) -> None:
                def step(i: jax.Array, _: None) -> None:
                    slot = lax.rem(i, jnp.int32(stages))
                    mosaic.wait(here.at[slot])
                    for acc, matrix in zip(sums, tiles, strict=True):
                        mosaic.add_product(acc, x_tile.at[slot, part], matrix.at[slot])
                    # The products of the step before are done: its stage may be loaded anew.
                    mosaic.wait_products(len(sums))
                    before = lax.rem(i + (stages - 1), jnp.int32(stages))
                    mosaic.when(i > 0)(lambda: mosaic.arrive(free.at[before]))

                lax.fori_loop(0, steps, step, None)
                mosaic.wait_products(0)
                mosaic.arrive(free.at[(steps - 1) % stages])

            def finish(first: jax.Array, second: jax.Array | None = None) -> list[jax.Array]:
                if len(weights) == 2 and second is not None:
                    gate = 1.0 / (1.0 + jnp.exp2(first * -mosaic.LOG2_E))
                    return [(first * gate * second).astype(x.dtype)]
                return [part.astype(x.dtype) for part in (first, second) if part is not None]

            shape = (mosaic.TILE_ROWS, columns)
            done = mosaic.summed(multiply, *[shape] * products, finish=finish)
            for result, to in zip(done, out_tiles, strict=True):
                to[part] = result
            mosaic.commit()
            start = block * tile_rows + part * mosaic.TILE_ROWS
            begin, end = (
                jnp.clip(at - start, 0, mosaic.TILE_ROWS) for at in (first, first + count)
            )
            for result, its in zip(out_tiles, mine, strict=True):
                out = out_ref.at[mosaic.span(start, mosaic.TILE_ROWS), its]
                _store_rows(result.at[part], out, begin, end - begin)
            mosaic.drain_stores()

    tile = functools.partial(mosaic.shared_tile, dtype=x.dtype)
    (out,) = mosaic.launch(
        body,
        [jax.ShapeDtypeStruct((rows + -rows % tile_rows, width), x.dtype)],
        grid={"column": width // (columns * pieces), "tile": most},
        scratch=[
            tile((stages, parts, mosaic.TILE_ROWS, DEPTH)),
            *(tile((stages, DEPTH, columns)) for _ in range(products)),
            *(mosaic.shared((parts, mosaic.TILE_ROWS, columns), x.dtype) for _ in range(pieces)),
            mosaic.barriers(stages, arrivals=parts + products),
            mosaic.barriers(stages, arrivals=parts),
        ],
        warpgroups=parts + 1,
        name="grouped_matmul",
        interpret=interpret,
    )(jnp.pad(x, ((0, -rows % tile_rows), (0, 0))), *weights, _tiles(sizes, tile_rows, most))
    return out[:rows]


def _store_rows(src: Ref, out: Ref, first: jax.Array, count: jax.Array) -> None:
    """Start to store `count` rows from `first` on of src [64, .] into the same rows of out [64, .].

    A copy has a size known beforehand: one of each power of two that the count consists of.
    """
    for bit in reversed(range(mosaic.TILE_ROWS.bit_length())):
        size = 1 << bit

        @mosaic.when(count & size != 0)
        def store(first: jax.Array = first, size: int = size) -> None:
            mosaic.store(src.at[mosaic.span(first, size)], out.at[mosaic.span(first, size)])

        first += count & size
