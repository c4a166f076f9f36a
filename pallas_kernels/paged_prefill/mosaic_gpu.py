"""Prefill attention for Hopper: tiles of 128 query rows against a stream of key blocks.

A tile is some tokens of one row with all query heads of one KV head, so that a group shares the
stream and short chunks waste little. One warpgroup loads pages; two compute 64 rows each, taking
turns: while one multiplies, the other takes its softmax (Shah et al., FlashAttention-3, 2024).
Blocks that every token of the tile sees in full go without a mask. Not run on hardware.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic, online_softmax
from pallas_kernels.mosaic import TILE_ROWS, Ref
from pallas_kernels.paged_prefill import tiles
from pallas_kernels.paged_prefill.tiles import Tiles
from pallas_kernels.paging import MASKED

QUERY_ROWS = 2 * TILE_ROWS  # a query row is one token with one query head
KEY_ROWS = mosaic.LARGEST_PAGE
# Three blocks of K and V of head dim 128, with 128 query rows, take 224 of the 227 KiB.
STAGES = 3
LOADER = 2  # the warpgroups before it compute


def supports(q: jax.Array, cache: jax.Array, scale: float) -> str | None:
    """Why the kernel does not take these operands of `api.paged_prefill`; None if it does."""
    _, kv_heads, _, page_size, head_dim = cache.shape
    if q.dtype != jnp.bfloat16 or cache.dtype != jnp.bfloat16:
        return f"q {q.dtype} and cache {cache.dtype} are not bfloat16"
    if q.shape[1] > kv_heads * QUERY_ROWS:
        return f"{q.shape[1] // kv_heads} query heads per KV head are more than {QUERY_ROWS}"
    return mosaic.refuse_heads(head_dim, scale) or mosaic.refuse_page(page_size)


@functools.partial(jax.jit, static_argnames=("scale", "interpret"))
def paged_prefill(
    q: jax.Array,
    cache: jax.Array,
    rows: jax.Array,
    positions: jax.Array,
    page_table: jax.Array,
    *,
    scale: float,
    interpret: bool = False,
) -> jax.Array:
    """As `api.paged_prefill`, of operands that `supports` takes.

    Besides what `cost` counts, q and the result are copied once each, sorted into tiles.
    """
    tokens, num_heads, head_dim = q.shape
    kv_heads = cache.shape[1]
    group = num_heads // kv_heads
    per_tile = QUERY_ROWS // group
    order = tiles.sort(rows, positions, page_table.shape[0], per_tile)
    sorted_q = q.at[order.token].get(mode="fill", fill_value=0)
    sorted_q = sorted_q.reshape(-1, per_tile, kv_heads, group, head_dim).transpose(2, 0, 1, 3, 4)
    sorted_q = sorted_q.reshape(kv_heads, -1, per_tile * group, head_dim)
    unused = QUERY_ROWS - per_tile * group
    sorted_q = jnp.pad(sorted_q, ((0, 0), (0, 0), (0, unused), (0, 0)))
    limits = jnp.pad(jnp.repeat(order.limits, group, axis=1), ((0, 0), (0, unused)))
    out = _tiles(sorted_q, cache, page_table, order, limits, scale=scale, interpret=interpret)
    out = out[:, :, : per_tile * group].reshape(kv_heads, -1, group, head_dim)
    out = out.at[:, order.place].get(mode="fill", fill_value=0)  # [K, T, G, H]
    return out.transpose(1, 0, 2, 3).reshape(tokens, num_heads, head_dim)


def _tiles(
    q: jax.Array,
    cache: jax.Array,
    page_table: jax.Array,
    order: Tiles,
    limits: jax.Array,
    *,
    scale: float,
    interpret: bool,
) -> jax.Array:
    """Attention of each tile, q [K, S, 128, H] and limits [S, 128]; unused tiles stay unwritten."""
    kv_heads, count, _, head_dim = q.shape
    page_size = cache.shape[3]
    pages = KEY_ROWS // page_size  # of a block
    keys = pages * page_size  # of a block; the tile's rows past them are never loaded

    def body(
        q_ref: Ref, cache_ref: Ref, table_ref: Ref, limit_ref: Ref, row_ref: Ref, longest_ref: Ref,
        shortest_ref: Ref, out_ref: Ref, q_tile: Ref, k_ring: Ref, v_ring: Ref, q_here: Ref,
        k_here: Ref, v_here: Ref, k_free: Ref, v_free: Ref, turn: Ref,
    ) -> None:  # fmt: skip
        head, part = lax.axis_index("head"), lax.axis_index(mosaic.WARPGROUP)
        tile = count - 1 - lax.axis_index("tile")  # of a row's tiles the last have the most to do
        longest = longest_ref[tile]
        blocks = lax.div(longest + (keys - 1), jnp.int32(keys))

        def slot_of(block: jax.Array) -> jax.Array:
            return lax.rem(block, jnp.int32(STAGES))

        @mosaic.when((part == LOADER) & (blocks > 0))
        def load() -> None:
            mosaic.move_registers(40, "decrease")
            row = row_ref[tile]
            last_page = lax.div(longest - 1, jnp.int32(page_size))

            def page_ids(block: jax.Array) -> tuple[jax.Array, ...]:
                """The block's pages; past the tile's last page that page, which is in L2."""
                at = block * pages
                return tuple(table_ref[row, jnp.minimum(at + j, last_page)] for j in range(pages))

            def load_block(block: jax.Array, ids: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                slot = slot_of(block)
                following = page_ids(block + 1)  # read early: the latency passes during the waits
                for kv, ring, here, free in (
                    (0, k_ring, k_here, k_free),
                    (1, v_ring, v_here, v_free),
                ):
                    mosaic.when(block >= STAGES)(functools.partial(mosaic.wait, free.at[slot]))
                    for j, page in enumerate(ids):
                        slab = cache_ref.at[2 * (page * kv_heads + head) + kv]
                        rows = mosaic.span(j * page_size, page_size)
                        mosaic.load(slab, ring.at[slot, rows], here.at[slot])
                return following

            lax.fori_loop(0, blocks, load_block, page_ids(jnp.int32(0)))

            def drain(block: jax.Array, _: None) -> None:
                mosaic.wait(k_free.at[slot_of(block)])
                mosaic.wait(v_free.at[slot_of(block)])

            lax.fori_loop(jnp.maximum(blocks - STAGES, 0), blocks, drain, None)

        @mosaic.when((part < LOADER) & (blocks > 0))
        def compute() -> None:
            mosaic.move_registers(232, "increase")
            mine = mosaic.span(part * TILE_ROWS, TILE_ROWS)
            mosaic.load(q_ref.at[head, tile, mine], q_tile.at[part], q_here.at[part])
            limit = mosaic.read_per_row(limit_ref.at[tile, mine])

            def pass_turn() -> None:
                mosaic.arrive(turn)
                mosaic.wait(turn)

            def step(block: jax.Array, carry: tuple, masked: bool) -> tuple:
                acc, seen = carry
                slot = slot_of(block)
                k, v = k_ring.at[slot], v_ring.at[slot]
                live = jnp.minimum(longest - block * keys, keys)  # rows that some token sees
                in_part = live < KEY_ROWS

                def clear() -> None:
                    """Each warpgroup zeroes its half of what no token sees: it may be NaN."""
                    mosaic.wait(v_here.at[slot])
                    mosaic.clear_rows(v_ring.at[slot, mine], live - part * TILE_ROWS)

                if masked:
                    # Before the turn passes on, so that both halves are done when v is needed.
                    mosaic.when(in_part)(clear)
                products = mosaic.scores(q_tile.at[part], k, meanwhile=pass_turn)
                mosaic.arrive(k_free.at[slot])
                if masked:
                    at = mosaic.ids(*products.shape, axis=1)
                    visible = at < mosaic.across(limit - block * keys, products)
                    if keys < KEY_ROWS:
                        visible &= at < keys
                    products = jnp.where(visible, products, MASKED)
                seen, weights, decay = online_softmax.step(seen, products, scale)
                acc = acc * mosaic.across(decay, acc)
                # All of it is done before the other warpgroup's softmax has its turn.
                acc, seen, weights = lax.optimization_barrier((acc, seen, weights.astype(q.dtype)))
                mosaic.arrive(turn)
                if masked:
                    mosaic.when(~in_part)(functools.partial(mosaic.wait, v_here.at[slot]))
                else:
                    mosaic.wait(v_here.at[slot])
                mosaic.wait(turn)
                following = block + 1
                key_here = k_here.at[slot_of(following)]
                await_keys = functools.partial(mosaic.wait, key_here)
                acc = mosaic.accumulate(
                    acc, weights, v, interpret=interpret,
                    meanwhile=lambda: mosaic.when(following < blocks)(await_keys),
                )  # fmt: skip
                mosaic.arrive(v_free.at[slot])
                return acc, seen

            mosaic.wait(q_here.at[part])
            mosaic.wait(k_here.at[jnp.int32(0)])
            mosaic.when(part == 1)(pass_turn)
            carry = mosaic.zeros(TILE_ROWS, head_dim), online_softmax.start(TILE_ROWS)
            full = jnp.int32(0)
            if keys == KEY_ROWS:
                full = lax.div(shortest_ref[tile], jnp.int32(keys))
                carry = lax.fori_loop(0, full, functools.partial(step, masked=False), carry)
            acc, seen = lax.fori_loop(full, blocks, functools.partial(step, masked=True), carry)
            mosaic.when(part == 0)(pass_turn)
            q_tile[part] = online_softmax.divide(seen, acc).astype(q.dtype)
            mosaic.commit()
            mosaic.store(q_tile.at[part], out_ref.at[head, tile, mine])
            mosaic.drain_stores()

    ring = mosaic.shared_tile((STAGES, KEY_ROWS, head_dim), q.dtype)
    scratch = [
        mosaic.shared_tile((2, TILE_ROWS, head_dim), q.dtype),
        ring,
        ring,
        mosaic.barriers(2),
        mosaic.barriers(STAGES, arrivals=pages),
        mosaic.barriers(STAGES, arrivals=pages),
        mosaic.barriers(STAGES, arrivals=2),
        mosaic.barriers(STAGES, arrivals=2),
        mosaic.barriers(1, arrivals=2),
    ]
    (out,) = mosaic.launch(
        body,
        [jax.ShapeDtypeStruct(q.shape, q.dtype)],
        grid={"tile": count, "head": kv_heads},
        scratch=scratch,
        warpgroups=3,
        reduction_bytes=0,
        name="paged_prefill",
        interpret=interpret,
    )(
        q, cache.reshape(-1, page_size, head_dim), page_table, limits, order.row, order.longest,
        order.shortest,
    )  # fmt: skip
    return out
