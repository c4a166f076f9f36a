"""The kernel under latent prefill on Hopper: a flat batch against one window of plain keys.

A block of 128 queries of one head has three warpgroups: one loads keys and values into a ring of
shared memory, two compute 64 queries each with an online softmax in registers. Blocks of one head
run side by side, so that its keys stay in the second-level cache, those of the last tokens first:
they see most, so the short ones fill the end. Few queries would leave processors idle: then blocks
share a window's keys. Not run on hardware.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic, online_softmax
from pallas_kernels.mosaic import Ref
from pallas_kernels.paging import MASKED

QUERY_BLOCK = 2 * mosaic.TILE_ROWS
KEY_BLOCK = 128
STAGES = 2  # of the ring
NEVER = -(2**30)  # a limit below every key


def shared_bytes(nope: int, rotated: int, v_dim: int, itemsize: int = 2) -> int:
    """Shared memory of the tiles, barriers aside."""
    per_key = (nope + rotated + v_dim) * itemsize
    return QUERY_BLOCK * (nope + rotated) * itemsize + STAGES * KEY_BLOCK * per_key


def attend(
    q: jax.Array,
    plain: jax.Array,
    rotated: jax.Array,
    limits: jax.Array,
    starts: jax.Array,
    rows: jax.Array,
    positions: jax.Array,
    *,
    heads: int,
    v_dim: int,
    splits: int,
    scale: float,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """What each token sees in each part of this window: f32 [S, T, N*Hv], log-sum-exps [S, N, T].

    bf16 q [T, N*(Hn+C)], plain [W, N*(Hn+Hv)], each head's key and value, rotated [W, C], the rest
    of all heads' keys, all finite; T and W are multiples of 128, widths of 64. Row r's position 0
    is key starts[r] of the window, a multiple of 128 that may lie before or behind it; limits
    [T/128, R] i32, how many positions of row r any token of a query block sees, 0 for none. Token
    t, of row rows[t], sees its positions 0..positions[t]. The window is cut into S = `splits`
    parts. A log-sum-exp, f32, is of base 2, and far below any other where nothing is seen.
    """
    tokens, num_rows = len(rows), len(starts)
    window, width = rotated.shape
    nope = q.shape[1] // heads - width
    blocks = tokens // QUERY_BLOCK
    per_split = -(-window // KEY_BLOCK // splits) * KEY_BLOCK
    tile = functools.partial(mosaic.shared_tile, dtype=q.dtype)
    scratch = [
        tile((2, mosaic.TILE_ROWS, nope)),
        tile((2, mosaic.TILE_ROWS, width)),
        tile((STAGES, KEY_BLOCK, nope)),
        tile((STAGES, KEY_BLOCK, width)),
        tile((STAGES, KEY_BLOCK, v_dim)),
        mosaic.shared((2, mosaic.TILE_ROWS), jnp.float32),
        mosaic.barriers(2, arrivals=2),
        mosaic.barriers(STAGES, arrivals=2),
        mosaic.barriers(STAGES),
        mosaic.barriers(STAGES, arrivals=2),
        mosaic.barriers(STAGES, arrivals=2),
    ]

    def body(
        q_ref: Ref, plain_ref: Ref, rotated_ref: Ref, limit_ref: Ref, start_ref: Ref,
        row_ref: Ref, position_ref: Ref, out_ref: Ref, lse_ref: Ref,
        q_tile: Ref, q_rotated: Ref, key_tile: Ref, key_rotated: Ref, value_tile: Ref,
        lse_tile: Ref, q_here: Ref, key_here: Ref, value_here: Ref, key_free: Ref, value_free: Ref,
    ) -> None:  # fmt: skip
        head, part = lax.axis_index("head"), lax.axis_index(mosaic.WARPGROUP)
        block, split = blocks - 1 - lax.axis_index("block"), lax.axis_index("split")

        def key_blocks(r: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Blocks of this part in which some token here sees keys of row r: from, to."""
            last = jnp.minimum((split + 1) * per_split, window)
            end = jnp.minimum(start_ref[r] + limit_ref[block, r], last)
            first = jnp.maximum(start_ref[r], split * per_split)
            return first // KEY_BLOCK, jnp.maximum(end + (KEY_BLOCK - 1), 0) // KEY_BLOCK

        @mosaic.when(part == 2)
        def load() -> None:
            mosaic.move_registers(40, "decrease")
            of_head = head * (nope + width)
            for half in range(2):
                at = mosaic.span(block * QUERY_BLOCK + half * mosaic.TILE_ROWS, mosaic.TILE_ROWS)
                without = q_ref.at[at, mosaic.span(of_head, nope)]
                mosaic.load(without, q_tile.at[half], q_here.at[half])
                turned = q_ref.at[at, mosaic.span(of_head + nope, width)]
                mosaic.load(turned, q_rotated.at[half], q_here.at[half])

            def load_block(i: jax.Array, n: jax.Array) -> jax.Array:
                slot, at = lax.rem(n, jnp.int32(STAGES)), mosaic.span(i * KEY_BLOCK, KEY_BLOCK)
                mosaic.when(n >= STAGES)(lambda: mosaic.wait(key_free.at[slot]))
                of_head = head * (nope + v_dim)
                keys = plain_ref.at[at, mosaic.span(of_head, nope)]
                mosaic.load(keys, key_tile.at[slot], key_here.at[slot])
                mosaic.load(rotated_ref.at[at], key_rotated.at[slot], key_here.at[slot])
                mosaic.when(n >= STAGES)(lambda: mosaic.wait(value_free.at[slot]))
                values = plain_ref.at[at, mosaic.span(of_head + nope, v_dim)]
                mosaic.load(values, value_tile.at[slot], value_here.at[slot])
                return n + 1

            def row(r: jax.Array, n: jax.Array) -> jax.Array:
                return lax.fori_loop(*key_blocks(r), load_block, n)

            loaded = lax.fori_loop(0, num_rows, row, jnp.int32(0))
            for last in range(1, STAGES + 1):  # jax 0.11.2: no completion may be left unawaited

                @mosaic.when(loaded >= last)
                def drain(last: int = last) -> None:
                    slot = lax.rem(loaded - last, jnp.int32(STAGES))
                    mosaic.wait(key_free.at[slot])
                    mosaic.wait(value_free.at[slot])

        @mosaic.when(part < 2)
        def compute() -> None:
            mosaic.move_registers(232, "increase")
            first = block * QUERY_BLOCK + part * mosaic.TILE_ROWS
            mine = mosaic.span(first, mosaic.TILE_ROWS)
            row_of = mosaic.read_per_row(row_ref.at[mine])
            position = mosaic.read_per_row(position_ref.at[mine])
            mosaic.wait(q_here.at[part])

            def row(r: jax.Array, carry: tuple) -> tuple:
                limit = jnp.where(row_of == r, position + (start_ref[r] + 1), jnp.int32(NEVER))

                def key_block(i: jax.Array, carry: tuple) -> tuple:
                    n, seen, acc = carry
                    slot = lax.rem(n, jnp.int32(STAGES))
                    mosaic.wait(key_here.at[slot])
                    products = mosaic.scores(
                        q_tile.at[part],
                        key_tile.at[slot],
                        (q_rotated.at[part], key_rotated.at[slot]),
                    )
                    mosaic.arrive(key_free.at[slot])
                    at = mosaic.ids(*products.shape, axis=1) + i * KEY_BLOCK
                    sees = at < mosaic.across(limit, products)
                    products = jnp.where(sees, products, MASKED)
                    seen, weights, decay = online_softmax.step(seen, products, scale)
                    acc *= mosaic.across(decay, acc)
                    mosaic.wait(value_here.at[slot])
                    acc = mosaic.accumulate(
                        acc, weights.astype(q.dtype), value_tile.at[slot], interpret=interpret
                    )
                    mosaic.arrive(value_free.at[slot])
                    return n + 1, seen, acc

                return lax.fori_loop(*key_blocks(r), key_block, carry)

            seen = online_softmax.start(mosaic.TILE_ROWS)
            acc = mosaic.zeros(mosaic.TILE_ROWS, v_dim)
            _, seen, acc = lax.fori_loop(0, num_rows, row, (jnp.int32(0), seen, acc))
            of_head = mosaic.span(head * v_dim, v_dim)
            out_ref[split, mine, of_head] = online_softmax.divide(seen, acc)
            lse_tile[part] = online_softmax.lse(seen)
            mosaic.commit()
            mosaic.store(lse_tile.at[part], lse_ref.at[split, head, mine])
            mosaic.drain_stores()

    out, lse = mosaic.launch(
        body,
        [
            jax.ShapeDtypeStruct((splits, tokens, heads * v_dim), jnp.float32),
            jax.ShapeDtypeStruct((splits, heads, tokens), jnp.float32),
        ],
        grid={"block": blocks, "head": heads, "split": splits},
        scratch=scratch,
        warpgroups=3,
        name="mla_prefill",
        interpret=interpret,
    )(q, plain, rotated, limits, starts, rows, positions)
    return out, lse
