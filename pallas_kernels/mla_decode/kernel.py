"""The Mosaic GPU kernel of the latent decode: what each of a block's four warpgroups does.

A block takes one row, up to 64 heads and a run of the row's tokens, 64 at a time (here: a step).
All its matmuls have tokens or latent columns as wgmma's 64 rows and the heads as columns:

    scores [64 tokens, heads]        = latents [64, R+C] . q [heads, R+C]^T
    sums   [R/2 latent columns, heads] += latents [64, R/2]^T . weights [64, heads]

so that 16 heads cost 16 columns, not 64 padded rows, and the f32 sums of 64 heads just fit the
registers of two warpgroups. Per step

    loader   fills one of two blocks of shared memory (TMA), or, of an fp8 cache, converts to f16;
    scorer   scores, online softmax; weights to shared memory, and by how much the sums shrink;
    summers  two, each with half of the latent columns: shrink, add.

The scores are taken once, and the scorer is a step ahead of the summers where its weights have two
buffers (up to 32 heads; with 64, shared memory has room for one). docs/adr/0016 says why.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic, mosaic_turned
from pallas_kernels.mla_decode.block import (
    BLOCKS,
    EVEN_REGISTERS,
    LOADER,
    RAW_BUFFERS,
    SCORER,
    STEP,
    Scratch,
    Shape,
)
from pallas_kernels.mosaic import Ref, span
from pallas_kernels.online_softmax import FLOOR
from pallas_kernels.paging import MASKED


class Run(NamedTuple):
    """Which tokens a block takes: of a row of `length`, `steps` steps from token `first` on."""

    row: jax.Array
    length: jax.Array
    first: jax.Array
    steps: jax.Array


def body(
    shape: Shape,
    q: Ref,
    cache: Ref,
    table: Ref,
    lengths: Ref,
    pieces: Ref,
    gains: Ref,
    out: Ref,
    lse: Ref,
    *allocated: Ref,
) -> None:
    """What `mosaic.launch` runs, over a grid of "tile" and "piece".

    q [B, tiles*heads, R+C] in matmul_dtype; cache [P, Z, R+C]; table [B, W]; lengths [B]; pieces
    [S, 3] as `splitting.cut` gives them, blocks being steps; gains f32 [B, tiles*heads], by which
    products with bytes are multiplied (unread of a bf16 cache). Writes out [S, tiles*heads, R],
    each piece's weighted mean (0 without tokens), and lse f32 [S, tiles*heads], the base-2
    logarithm of its weights' sum (MASKED without tokens).
    """
    mine = Scratch(*allocated)
    piece, tile = lax.axis_index("piece"), lax.axis_index("tile")
    row = jnp.minimum(pieces[piece, 0], lengths.shape[0] - 1)  # an unused piece names no row
    run = Run(row, lengths[row], pieces[piece, 1] * STEP, pieces[piece, 2] - pieces[piece, 1])
    heads = span(tile * shape.heads, shape.heads)
    warpgroup = lax.axis_index(mosaic.WARPGROUP)

    @mosaic.when(warpgroup == LOADER)
    def _() -> None:
        _deal(shape.registers.loader)

        @mosaic.when(run.steps > 0)
        def _() -> None:
            mosaic.load(q.at[row, heads], mine.q_or_out[0], mine.q_there.at[0])

        _load(shape, mine, run, cache, table)

    @mosaic.when(warpgroup == SCORER)
    def _() -> None:
        _deal(shape.registers.scorer)
        _score(shape, mine, run, gains.at[row, heads], lse.at[piece, heads])

    @mosaic.when(warpgroup < SCORER)
    def _() -> None:
        _deal(shape.registers.summer)
        _sum(shape, mine, run, warpgroup, out.at[piece, heads])


def _deal(registers: int) -> None:
    """Give this warpgroup's threads `registers` instead of the even share."""
    if registers != EVEN_REGISTERS:
        action = "increase" if registers > EVEN_REGISTERS else "decrease"
        mosaic.move_registers(registers, action)


def _load(shape: Shape, mine: Scratch, run: Run, cache: Ref, table: Ref) -> None:
    """The loader: latents of every step, into the block that the summers emptied."""

    def pages_of(step: jax.Array) -> list[jax.Array]:
        """Page ids of a step's pieces: to be read before a wait, which hides how long that takes.

        Past the end the last page is read again, from L2: some page has to fill the tile.
        """
        tokens = [run.first + step * STEP + i * shape.piece for i in range(STEP // shape.piece)]
        return [table[run.row, jnp.minimum(t, run.length - 1) // shape.page_size] for t in tokens]

    def fetch(
        step: jax.Array, pages: list[jax.Array], columns: Any, tile: Ref, barrier: Ref
    ) -> None:
        for i, page in enumerate(pages):
            token = run.first + step * STEP + i * shape.piece
            offset = lax.rem(token, jnp.int32(shape.page_size))
            rows = span(offset, shape.piece) if shape.piece < shape.page_size else slice(None)
            here = tile.at[span(i * shape.piece, shape.piece)]
            mosaic.load(cache.at[page, rows, columns], here, barrier)

    def wait_for_block(step: jax.Array) -> jax.Array:
        block = lax.rem(step, jnp.int32(BLOCKS))

        @mosaic.when(step >= BLOCKS)
        def _() -> None:
            mosaic.wait(mine.emptied.at[block])

        return block

    def load_step(step: jax.Array, _: None) -> None:
        pages = pages_of(step)
        block = wait_for_block(step)
        fetch(step, pages, slice(None), mine.latents.at[block], mine.filled.at[block])

    if shape.quantized:
        _convert(shape, mine, run, pages_of, fetch, wait_for_block)
    else:
        lax.fori_loop(0, run.steps, load_step, None)

    def drain(step: jax.Array, _: None) -> None:
        mosaic.wait(mine.emptied.at[lax.rem(step, jnp.int32(BLOCKS))])

    # The interpreter wants every completion of a barrier that one waits for to be waited for.
    lax.fori_loop(jnp.maximum(run.steps - BLOCKS, 0), run.steps, drain, None)


def _convert(
    shape: Shape,
    mine: Scratch,
    run: Run,
    pages_of: Callable[[jax.Array], list[jax.Array]],
    fetch: Callable[..., None],
    wait_for_block: Callable[[jax.Array], jax.Array],
) -> None:
    """The loader of an fp8 cache: e4m3 values into a ring, from there as f16 into the blocks.

    Every e4m3 value is an f16 value too, so the matmuls see exactly what was cached. A step goes
    through the ring in parts of some columns.
    """
    parts = shape.width // shape.raw_columns
    count = run.steps * parts

    def fetch_part(part: jax.Array, pages: list[jax.Array]) -> None:
        buffer = lax.rem(part, jnp.int32(RAW_BUFFERS))
        columns = span(lax.rem(part, jnp.int32(parts)) * shape.raw_columns, shape.raw_columns)
        fetch(part // parts, pages, columns, mine.raw.at[buffer], mine.raw_filled.at[buffer])

    for part in range(RAW_BUFFERS):

        @mosaic.when(part < count)
        def _(part: int = part) -> None:
            fetch_part(jnp.int32(part), pages_of(jnp.int32(part // parts)))

    def convert_step(step: jax.Array, _: None) -> None:
        later = [(i + RAW_BUFFERS) // parts for i in range(parts)]  # steps until a part's refill
        pages = {n: pages_of(step + n) for n in sorted(set(later))}
        block = wait_for_block(step)
        for i in range(parts):
            part = step * parts + i
            buffer = lax.rem(part, jnp.int32(RAW_BUFFERS))
            mosaic.wait(mine.raw_filled.at[buffer])
            for at in range(0, shape.raw_columns, 64):
                values = mosaic.read_e4m3(mine.raw.at[buffer, :, span(at, 64)])
                here = mine.latents.at[block, :, span(i * shape.raw_columns + at, 64)]
                mosaic_turned.write(here, values)
            mosaic.commit()  # of what was written for the matmuls, and read before the next copy

            @mosaic.when(part + RAW_BUFFERS < count)
            def _(part: jax.Array = part, later: int = later[i]) -> None:
                fetch_part(part + RAW_BUFFERS, pages[later])

        mosaic.arrive(mine.filled.at[block])

    lax.fori_loop(0, run.steps, convert_step, None)


def _score(shape: Shape, mine: Scratch, run: Run, gains: Ref, lse: Ref) -> None:
    """The scorer: scores of every step, weights for the summers, the softmax's sum at the end."""
    q = mine.q_or_out[0]
    factor = shape.scale * mosaic.LOG2_E
    factors = mosaic_turned.read_per_column(gains) * factor if shape.quantized else None

    @mosaic.when(run.steps > 0)
    def _() -> None:
        mosaic.wait(mine.q_there.at[0])

    def buffer_of(step: jax.Array) -> jax.Array:
        return lax.rem(step, jnp.int32(shape.buffers))

    def wait_for_buffer(step: jax.Array) -> jax.Array:
        @mosaic.when(step >= shape.buffers)
        def _() -> None:
            mosaic.wait(mine.summed.at[buffer_of(step)])

        return buffer_of(step)

    def score_step(step: jax.Array, seen: tuple[jax.Array, jax.Array]) -> Any:
        # top f32 [heads]: the largest scaled score; totals f32 [64, heads]: sums of weights, still
        # apart for each of the 64 tokens, since adding them up crosses warps.
        top, totals = seen
        block = lax.rem(step, jnp.int32(BLOCKS))
        mosaic.wait(mine.filled.at[block])
        products = mosaic.scores(mine.latents.at[block], q)
        left = run.length - (run.first + step * STEP)  # live tokens of this step, and later ones
        live = mosaic.ids(STEP, shape.heads, 0) < left
        by = factor if factors is None else mosaic_turned.down(factors, products)
        scaled = jnp.where(live, products * by, MASKED)
        new_top = jnp.maximum(top, scaled.max(axis=0))
        weights = jnp.exp2(scaled - mosaic_turned.down(new_top, scaled))
        shrink = jnp.exp2(top - new_top)
        totals = totals * mosaic_turned.down(shrink, totals) + weights

        @mosaic.when(left < STEP)
        def _() -> None:
            # A weight of 0 would not hide a NaN from the summers; the scorer, between its own
            # matmul and theirs, clears what is past the row's end, in the last step alone.
            mosaic.clear_rows(mine.latents.at[block, :, span(0, shape.latent)], left)

        buffer = wait_for_buffer(step)
        mosaic_turned.write_turned(mine.weights.at[buffer], weights.astype(shape.matmul_dtype))
        mine.shrink[buffer] = shrink
        mosaic.commit()
        mosaic.arrive(mine.weighed.at[buffer])
        return new_top, totals

    start = (mosaic_turned.per_column(FLOOR, shape.heads), mosaic.zeros(STEP, shape.heads))
    top, totals = lax.fori_loop(0, run.steps, score_step, start)
    total = totals.sum(axis=0)
    safe = jnp.maximum(total, 1e-30)
    buffer = wait_for_buffer(run.steps)
    mine.shrink[buffer] = 1.0 / safe
    mosaic.arrive(mine.weighed.at[buffer])
    mosaic_turned.write_per_column(
        lse, jnp.where(total > 0, top + jnp.log(safe) * mosaic.LOG2_E, MASKED)
    )

    def drain(step: jax.Array, _: None) -> None:
        mosaic.wait(mine.summed.at[buffer_of(step)])

    lax.fori_loop(jnp.maximum(run.steps + 1 - shape.buffers, 0), run.steps, drain, None)


def _sum(shape: Shape, mine: Scratch, run: Run, half: jax.Array, out: Ref) -> None:
    """A summer: the weighted mean of its half of the latent columns, to `out` [heads, R]."""
    starts = [half * shape.half + at for at in range(0, shape.half, shape.chunk)]

    def sum_step(step: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        block = lax.rem(step, jnp.int32(BLOCKS))
        buffer = lax.rem(step, jnp.int32(shape.buffers))
        mosaic.wait(mine.weighed.at[buffer])
        shrink = mosaic_turned.read_per_column(mine.shrink.at[buffer])
        sums = [total * mosaic_turned.down(shrink, total) for total in sums]
        values = [mine.latents.at[block, :, span(start, shape.chunk)] for start in starts]
        weights = mine.weights.at[buffer]
        sums = mosaic_turned.accumulate_turned(sums, values, weights, interpret=shape.interpret)
        mosaic.arrive(mine.summed.at[buffer])
        mosaic.arrive(mine.emptied.at[block])
        return sums

    zeros = [mosaic.zeros(shape.chunk, shape.heads) for _ in starts]
    sums = lax.fori_loop(0, run.steps, sum_step, zeros)
    buffer = lax.rem(run.steps, jnp.int32(shape.buffers))
    mosaic.wait(mine.weighed.at[buffer])
    divide = mosaic_turned.read_per_column(mine.shrink.at[buffer])
    # q is no longer needed, by the scorer either: this arrival came after its last matmul.
    staged = mine.q_or_out[1].at[half]
    for total, start in zip(sums, starts, strict=True):
        values = (total * mosaic_turned.down(divide, total)).astype(shape.dtype)
        mosaic_turned.write_turned(staged, values)
        mosaic.commit()
        mosaic.store(staged, out.at[:, span(start, shape.chunk)])
        mosaic.drain_stores()  # the next one writes the same memory
