"""All that this project uses of Pallas' Mosaic GPU back end, under names of its own.

The library calls its interface unstable, so no module imports it but this one and `mosaic_turned`,
its supplement for products with turned sides: where two releases differ, the difference is in these
two. Kernels are written for Hopper (sm_90a): loads by the tensor memory accelerator (TMA) into
swizzled shared memory, `wgmma` matmuls of 64 rows, warpgroups that take different parts. "Ref" is a
reference to global or shared memory that a kernel is given; a slice of one is `ref.at[...]`, one
dynamic index or `span` per axis.

Every kernel also runs on a CPU in the library's interpret mode, which reports data races. What that
mode lacks is made up for here; functions that differ there take `interpret`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE_ROWS = 64  # rows of one wgmma
SHARED_LIMIT = 232_448  # bytes of shared memory that one block may have on Hopper
# Softmax is taken in base 2, the exponential that the hardware has: scores times this.
LOG2_E = math.log2(math.e)
WARPGROUP = "warpgroup"  # the axis whose index tells a block's warpgroups apart

HEAD_DIMS = (64, 128)  # of K and V in pages; 256 columns of a result take too many registers
LARGEST_PAGE = 128  # tokens
Ref = Any  # the library's references have no public type
when = pl.when
span = pl.ds


# What paged kernels take --------------------------------------------------------------------------


def refuse_page(page_size: int) -> str | None:
    """Why a kernel cannot load pages of this many tokens; None if it can."""
    if page_size % 8 or not 8 <= page_size <= LARGEST_PAGE:
        return f"page size {page_size} is not a multiple of 8 from 8 to {LARGEST_PAGE}"
    return None


def refuse_heads(head_dim: int, scale: float) -> str | None:
    """Why a kernel cannot attend with heads of this width and scores of this scale; or None."""
    if head_dim not in HEAD_DIMS:
        return f"head dim {head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    if scale <= 0:
        return f"scale {scale} is not positive"
    return None


# Launching, and what a block owns -----------------------------------------------------------------


def shared_tile(shape: Sequence[int], dtype: jax.typing.DTypeLike) -> Any:
    """Scratch in shared memory that wgmma reads and TMA fills: [..., rows, columns].

    Stored as 8-row tiles one swizzle wide, so that neither has bank conflicts. Rows are a multiple
    of 8; a row takes a multiple of 64 bytes.
    """
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = 128 if shape[-1] * itemsize % 128 == 0 else 64
    transforms = (
        plgpu.TilingTransform((8, swizzle // itemsize)),
        plgpu.SwizzleTransform(swizzle),
    )
    return plgpu.SMEM(tuple(shape), dtype, transforms=transforms)


def shared(shape: Sequence[int], dtype: jax.typing.DTypeLike) -> Any:
    """Scratch in shared memory, row-major, for values that no wgmma reads."""
    return plgpu.SMEM(tuple(shape), dtype)


def barriers(count: int, arrivals: int = 1) -> Any:
    """Scratch of `count` barriers, each complete after `arrivals` loads or `arrive` calls."""
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)


def launch(
    body: Callable[..., None],
    out: Sequence[jax.ShapeDtypeStruct],
    *,
    grid: Mapping[str, int],
    scratch: Sequence[Any],
    warpgroups: int = 1,
    reduction_bytes: int = 2048,
    name: str,
    interpret: bool = False,
) -> Callable[..., Sequence[jax.Array]]:
    """The kernel `body` as a function of arrays that returns arrays like `out`.

    body(*inputs, *outputs, *scratch) is run by every warpgroup (128 threads) of every block of the
    grid; `lax.axis_index` of a name in `grid`, or of WARPGROUP, tells which one. The first axis of
    the grid varies fastest: its blocks start side by side. The others have up to 65535 blocks each.
    reduction_bytes of shared memory serve reductions along the rows of a wgmma result, which cross
    warps. interpret: run on the CPU, with race detection.
    """
    names = tuple(grid)[::-1]  # the library's last axis is CUDA's x, which varies fastest
    return plgpu.kernel(
        body,
        out_type=list(out),
        grid=tuple(grid[name] for name in names),
        grid_names=names,
        scratch_types=list(scratch),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=reduction_bytes
        ),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
        kernel_name=name,
        num_threads=warpgroups if warpgroups > 1 else None,
        thread_name=WARPGROUP if warpgroups > 1 else None,
    )


def move_registers(count: int, action: Literal["increase", "decrease"]) -> None:
    """Let each thread of this warpgroup have `count` registers, a multiple of 8.

    A block has 512 for one thread of each of its warpgroups together; those that load give some up
    so that those that compute may have more.
    """
    plgpu.set_max_registers(count, action=action)


# Moving data --------------------------------------------------------------------------------------


def load(src: Ref, dst: Ref, barrier: Ref) -> None:
    """Start a copy of global memory into shared memory; `barrier` counts it when it is there."""
    plgpu.copy_gmem_to_smem(src, dst, barrier)


def store(src: Ref, dst: Ref) -> None:
    """Start a copy of shared memory to global memory; `commit` what was written before."""
    plgpu.copy_smem_to_gmem(src, dst)


def drain_stores() -> None:
    """Wait until every copy that this warpgroup started with `store` is done."""
    plgpu.wait_smem_to_gmem(0)


def wait(barrier: Ref) -> None:
    """Wait for the barrier's next completion.

    A warpgroup that waits on a barrier has to wait for each of its completions, the last ones too:
    interpret mode of jax 0.11.2 refuses a kernel that ends before (so the warpgroup that loads
    waits at its end until every slot was given back).
    """
    plgpu.barrier_wait(barrier)


def arrive(barrier: Ref) -> None:
    """Count one arrival of this warpgroup."""
    plgpu.barrier_arrive(barrier)


def commit() -> None:
    """Make this warpgroup's own accesses of shared memory visible to later copies and matmuls."""
    plgpu.commit_smem()


# Values in registers ------------------------------------------------------------------------------


def zeros(rows: int, columns: int) -> jax.Array:
    """f32 [rows, columns], spread over a warpgroup as wgmma spreads its results."""
    return plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), plgpu.Layout.WGMMA)


def per_row(value: float, rows: int) -> jax.Array:
    """f32 [rows] of one value, spread as the rows of a wgmma result."""
    full = jnp.full((rows,), value, jnp.float32)
    return plgpu.layout_cast(full, plgpu.Layout.WGMMA.reduce(1))


def ids(rows: int, columns: int, axis: int, *, of_bytes: bool = False) -> jax.Array:
    """i32 [rows, columns] of each element's index along the axis.

    Spread as wgmma spreads its results, or, if `of_bytes`, as `read_e4m3` spreads what it reads.
    """
    layout = plgpu.Layout.WGMMA_UPCAST_2X if of_bytes else plgpu.Layout.WGMMA
    return plgpu.broadcasted_iota(jnp.int32, (rows, columns), axis, layout=layout)


def across(values: jax.Array, like: jax.Array) -> jax.Array:
    """[rows] repeated along the columns of `like` [rows, columns]."""
    return lax.broadcast_in_dim(values, like.shape, [0])


def read(ref: Ref) -> jax.Array:
    """The contents [rows, columns] of a shared tile, spread as a wgmma result."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA)


def read_e4m3(ref: Ref) -> jax.Array:
    """The contents [rows, columns] of a shared tile of e4m3 bytes (uint8), in f16: all exact.

    f16 and not bf16, since Hopper converts a pair of bytes to f16 in one instruction.
    """
    read_bytes = plgpu.load(ref, layout=plgpu.Layout.WGMMA_UPCAST_2X)
    return lax.bitcast_convert_type(read_bytes, jnp.float8_e4m3fn).astype(jnp.float16)


def clear_rows(tile: Ref, live: jax.Array) -> None:
    """Zero a shared tile [rows, columns] from row `live` on, and `commit` it.

    For values whose weights are 0, which would keep a NaN. Both sizes are multiples of 64.
    """
    rows, columns = tile.shape
    for row, column in product(range(0, rows, 64), range(0, columns, 64)):
        part = tile.at[span(row, 64), span(column, 64)]
        values = read(part)
        kept = ids(64, 64, axis=0) + row < live
        part[...] = jnp.where(kept, values, jnp.zeros((), values.dtype))
    commit()


def read_per_row(ref: Ref) -> jax.Array:
    """The contents [rows] of shared or global memory, spread as the rows of a wgmma result."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


# Matmuls ------------------------------------------------------------------------------------------


def scores(
    q: Ref, k: Ref, *more: tuple[Ref, Ref], meanwhile: Callable[[], None] = lambda: None
) -> jax.Array:
    """f32 [M, N], q @ k.T of shared tiles q [M, D] and k [N, D]; M a multiple of 64.

    The products of `more` such pairs, of the same M and N, are added. `meanwhile` runs while the
    matmuls do.
    """

    def multiply(acc: Ref) -> jax.Array:
        for left, right in ((q, k), *more):
            plgpu.wgmma(acc, left, right.transpose((1, 0)))
        meanwhile()
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((q.shape[0], k.shape[0]), jnp.float32))


def accumulate(
    acc: jax.Array,
    weights: jax.Array,
    v: Ref,
    *,
    interpret: bool,
    meanwhile: Callable[[], None] = lambda: None,
) -> jax.Array:
    """Acc + weights @ v, f32 [M, D], of weights [M, N] in registers and a shared tile v [N, D].

    `meanwhile` runs while the matmul does.
    """
    if interpret:
        # Interpret mode (0.11.2, 0.12) knows neither accumulators with a start value nor operands
        # in registers. A plain read of v needs an ordering that the matmul does not: `commit`.
        read_v = v[...]
        commit()
        meanwhile()
        return acc + jnp.dot(weights, read_v, preferred_element_type=jnp.float32)

    def multiply(ref: Ref) -> None:
        plgpu.wgmma(ref, weights, v)
        meanwhile()

    multiplied: Any = pl.run_state(multiply)(plgpu.ACC.init(acc))
    return multiplied


def summed(
    multiply: Callable[..., None], *shapes: tuple[int, int], finish: Callable[..., Any]
) -> Any:
    """finish(*sums) of f32 accumulators of these shapes that `multiply(*accumulators)` adds to."""

    def scoped(*accumulators: Ref) -> Any:
        multiply(*accumulators)
        return finish(*(acc[...] for acc in accumulators))

    return pl.run_scoped(scoped, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def add_product(acc: Ref, a: Ref, b: Ref) -> None:
    """Start to add a @ b, shared tiles [M, D] and [D, N], to an accumulator of `summed`."""
    plgpu.wgmma(acc, a, b)


def wait_products(but: int) -> None:
    """Wait for this warpgroup's products, all but the last `but` of them."""
    plgpu.wgmma_wait(but)
