"""Decode attention for Hopper: each piece of a row streams its pages through a ring of stages.

One warpgroup a block, two blocks a processor: while one computes, the other's loads are under way,
and with three stages of 64 tokens each some 100 KiB are. The group of query heads is padded to the
64 rows of a wgmma; decoding is bound by the bandwidth of device memory, not by the tensor cores.
Not run on hardware.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic, online_softmax, splitting
from pallas_kernels.f16_queries import to_f16
from pallas_kernels.gqa_decode.merging import merge
from pallas_kernels.mosaic import TILE_ROWS, Ref
from pallas_kernels.paging import MASKED

# What a block may have of shared memory if two are to be on one processor: half of its 228 KiB,
# less the KiB that each block loses.
HALF = 233_472 // 2 - 1024
SMALL = 256  # bytes for barriers


@dataclass(frozen=True)
class Shape:
    """How blocks of tokens lie in pages and in shared memory."""

    page_size: int
    head_dim: int
    itemsize: int  # bytes of a cached number

    @property
    def tile(self) -> int:
        """Rows of K and V in shared memory per block."""
        return 64 if 64 % self.page_size == 0 or self.page_size % 64 == 0 else 128

    @property
    def pages(self) -> int:
        """Pages that one block reads, whole or in part."""
        return max(1, self.tile // self.page_size)

    @property
    def tokens(self) -> int:
        """Tokens per block; the tile's rows past them are never loaded."""
        return min(self.tile, self.pages * self.page_size)

    @property
    def stages(self) -> int:
        """Blocks that are loaded ahead."""
        free = (HALF if self.resident == 2 else mosaic.SHARED_LIMIT) - self._fixed
        return min(6, free // self._stage)

    @property
    def resident(self) -> int:
        """Blocks of threads that fit on a processor together."""
        return 2 if HALF - self._fixed >= 2 * self._stage else 1

    @property
    def _stage(self) -> int:
        return 2 * self.tile * self.head_dim * self.itemsize

    @property
    def _fixed(self) -> int:
        query = TILE_ROWS * self.head_dim * 2
        widened = 0 if self.itemsize == 2 else 2 * self.tile * self.head_dim * 2
        return query + widened + SMALL


def supports(q: jax.Array, cache: jax.Array, scale: float) -> str | None:
    """Why the kernel does not take these operands of `api.gqa_decode`; None if it does."""
    page_size, head_dim = cache.shape[3:]
    if q.dtype != jnp.bfloat16 or cache.dtype not in (jnp.bfloat16, jnp.uint8):
        return f"q {q.dtype} and cache {cache.dtype} are not bfloat16 and bfloat16 or uint8"
    return mosaic.refuse_heads(head_dim, scale) or mosaic.refuse_page(page_size)


@functools.partial(jax.jit, static_argnames=("scale", "interpret"))
def gqa_decode(
    q: jax.Array,
    cache: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    cache_scale: jax.Array | None = None,
    *,
    scale: float,
    interpret: bool = False,
) -> jax.Array:
    """As `api.gqa_decode`, of operands that `supports` takes.

    Besides what `cost` counts it moves two bf16 (f16) halves of an f32 result per piece, query head
    and number, out and in again: some 6% of the bytes of a piece of 256 tokens.
    """
    rows, num_heads, head_dim = q.shape
    _, kv_heads, _, page_size, _ = cache.shape
    shape = Shape(page_size, head_dim, cache.dtype.itemsize)
    group = num_heads // kv_heads
    tiles = -(-group // TILE_ROWS)
    per_tile = -(-group // (tiles * 8)) * 8  # query heads, in whole rows of 8 of a tile
    grouped = q.reshape(rows, kv_heads, group, head_dim)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, tiles * per_tile - group), (0, 0)))
    grouped = grouped.reshape(rows, kv_heads * tiles, per_tile, head_dim)
    if cache_scale is None:
        gain, v_scale = None, jnp.ones(kv_heads * tiles, jnp.float32)
    else:
        k_scale, v_scale = (jnp.repeat(cache_scale[:, i], tiles) for i in range(2))
        grouped, gain = to_f16(grouped)
        gain = jnp.pad(gain * k_scale[:, None], ((0, 0), (0, 0), (0, TILE_ROWS - per_tile)))
    # A piece takes long in interpret mode, and there are no processors to fill.
    heads = kv_heads * tiles
    count = rows + 2 if interpret else splitting.num_pieces(rows, heads, shape.resident)
    pieces = splitting.cut(lengths, shape.tokens, count)
    halves, lse = _pieces(
        grouped, cache, page_table, lengths, pieces.ranges, gain,
        shape=shape, tiles=tiles, scale=scale, interpret=interpret,
    )  # fmt: skip
    out = merge(halves, lse, pieces.bounds, v_scale, q.dtype, interpret=interpret)
    out = out.reshape(rows, kv_heads, tiles * per_tile, head_dim)[:, :, :group]
    return out.reshape(rows, num_heads, head_dim)


def _pieces(
    q: jax.Array,
    cache: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    pieces: jax.Array,
    gain: jax.Array | None,
    *,
    shape: Shape,
    tiles: int,
    scale: float,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """What each piece gives: two halves that add up to its result, and log2 of its weights' sum.

    q [B, K*tiles, M, H]; pieces [S, 3]; gain f32 [B, K*tiles, 64], by which a query head's
    products with bytes are multiplied, None for another cache. Returns ([S, K*tiles, 2, M, H],
    f32 [S, K*tiles, 64]).
    """
    rows, q_tiles, per_tile, head_dim = q.shape
    kv_heads = q_tiles // tiles
    page_size, tile, tokens, stages = shape.page_size, shape.tile, shape.tokens, shape.stages
    quantized = gain is not None
    whole = page_size >= tile  # a block is one page or a part of it: K and V in one load
    parts = page_size // tile  # blocks of a page, if so

    def body(
        q_ref: Ref, cache_ref: Ref, table_ref: Ref, length_ref: Ref, piece_ref: Ref, gain_ref: Ref,
        out_ref: Ref, lse_ref: Ref, q_tile: Ref, ring: Ref, q_here: Ref, here: Ref, *wide: Ref,
    ) -> None:  # fmt: skip
        piece, q_index = lax.axis_index("piece"), lax.axis_index("head")
        head = lax.div(q_index, jnp.int32(tiles))
        row = jnp.minimum(piece_ref[piece, 0], rows - 1)
        first, end = piece_ref[piece, 1], piece_ref[piece, 2]
        length = length_ref[row]
        last_page = lax.div(jnp.maximum(length - 1, 0), jnp.int32(page_size))

        def of(page: jax.Array) -> jax.Array:
            return 2 * (page * kv_heads + head)

        def page_ids(block: jax.Array) -> tuple[jax.Array, ...]:
            """The block's pages; past the row's last page that page, which is in L2 already."""
            at = lax.div(block, jnp.int32(parts)) if whole else block * shape.pages
            return tuple(table_ref[row, jnp.minimum(at + j, last_page)] for j in range(shape.pages))

        def fetch(block: jax.Array, slot: jax.Array, ids: tuple[jax.Array, ...]) -> None:
            if whole:
                at = mosaic.span(lax.rem(block, jnp.int32(parts)) * tile, tile)
                target = ring.at[mosaic.span(2 * slot, 2)]
                mosaic.load(cache_ref.at[mosaic.span(of(ids[0]), 2), at], target, here.at[slot])
                return
            for j, page in enumerate(ids):
                at = mosaic.span(j * page_size, page_size)
                for kv in range(2):
                    target = ring.at[2 * slot + kv, at]
                    mosaic.load(cache_ref.at[of(page) + kv], target, here.at[slot])

        mosaic.load(q_ref.at[row, q_index], q_tile.at[mosaic.span(0, per_tile)], q_here)
        for stage in range(stages):
            block = first + stage

            @mosaic.when(block < end)
            def fill(block: jax.Array = block, stage: int = stage) -> None:
                fetch(block, jnp.int32(stage), page_ids(block))

        gains = mosaic.read_per_row(gain_ref.at[row, q_index]) if quantized else None
        mosaic.wait(q_here)

        def step(block: jax.Array, carry: tuple) -> tuple:
            acc, seen, ids = carry
            slot = lax.rem(block - first, jnp.int32(stages))
            live = jnp.minimum(length - block * tokens, tokens)  # rows of the tile
            refill = functools.partial(fetch, block + stages, slot, ids)
            more = block + stages < end
            mosaic.wait(here.at[slot])
            if quantized:
                k, v = wide
                _widen(ring.at[2 * slot], k, jnp.int32(tile))
                _widen(ring.at[2 * slot + 1], v, live)
                mosaic.commit()
                mosaic.when(more)(refill)
            else:
                k, v = ring.at[2 * slot], ring.at[2 * slot + 1]
            products = mosaic.scores(q_tile, k)
            if gains is not None:
                products *= mosaic.across(gains, products)
            products = jnp.where(mosaic.ids(*products.shape, axis=1) < live, products, MASKED)
            seen, weights, decay = online_softmax.step(seen, products, scale)
            if not quantized:
                mosaic.when(live < tile)(functools.partial(mosaic.clear_rows, v, live))
            acc = mosaic.accumulate(
                acc * mosaic.across(decay, acc), weights.astype(q.dtype), v, interpret=interpret
            )
            if not quantized:
                mosaic.when(more)(refill)
            # Read one step before they are needed: their latency passes during the next block.
            return acc, seen, page_ids(block + stages + 1)

        carry = (
            mosaic.zeros(TILE_ROWS, head_dim),
            online_softmax.start(TILE_ROWS),
            page_ids(first + stages),
        )
        acc, seen, _ = lax.fori_loop(first, end, step, carry)
        acc = online_softmax.divide(seen, acc)
        # All loads have been waited for, so the memory of a stage serves for the result: in two
        # halves of 16 bits, as 64 rows of f32 would not fit into 64 of K.
        high = acc.astype(q.dtype)
        halves = high, (acc - high.astype(jnp.float32)).astype(q.dtype)
        staging = wide if quantized else (ring.at[0], ring.at[1])
        for half, part in zip(halves, staging, strict=True):
            part[:TILE_ROWS] = half
        lse_ref[piece, q_index] = online_softmax.lse(seen)
        mosaic.commit()
        for i, part in enumerate(staging):
            result = part.at[mosaic.span(0, per_tile)]
            mosaic.store(result, out_ref.at[piece, q_index, i])
        mosaic.drain_stores()

    count = pieces.shape[0]
    scratch = [
        mosaic.shared_tile((TILE_ROWS, head_dim), q.dtype),
        mosaic.shared_tile((2 * stages, tile, head_dim), cache.dtype),
        mosaic.barriers(1),
        mosaic.barriers(stages, arrivals=1 if whole else 2 * shape.pages),
    ]
    if quantized:
        scratch += [mosaic.shared_tile((tile, head_dim), q.dtype)] * 2
    # A TMA has five dimensions, of which the layout of a tile takes four.
    slices = cache.reshape(-1, page_size, head_dim)
    if gain is None:  # a kernel has the operands that it has
        gain = jnp.ones((1, 1, TILE_ROWS), jnp.float32)
    halves, lse = mosaic.launch(
        body,
        [
            jax.ShapeDtypeStruct((count, q_tiles, 2, per_tile, head_dim), q.dtype),
            jax.ShapeDtypeStruct((count, q_tiles, TILE_ROWS), jnp.float32),
        ],
        grid={"head": q_tiles, "piece": count},
        scratch=scratch,
        reduction_bytes=0,
        name="gqa_decode",
        interpret=interpret,
    )(q, slices, page_table, lengths, pieces, gain)
    return halves, lse


def _widen(ring: Ref, wide: Ref, live: jax.Array) -> None:
    """The f16 numbers of e4m3 bytes, those of rows from `live` on zero."""
    for at in range(0, ring.shape[0], TILE_ROWS):
        part = mosaic.span(at, TILE_ROWS)
        values = mosaic.read_e4m3(ring.at[part])
        kept = mosaic.ids(*values.shape, axis=0, of_bytes=True) + at < live
        wide[at : at + TILE_ROWS] = jnp.where(kept, values, jnp.zeros((), values.dtype))
