"""What a block of threads of the latent decode kernel has: sizes, registers, shared memory."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels import mosaic, mosaic_turned
from pallas_kernels.mosaic import Ref

STEP = mosaic.TILE_ROWS  # tokens taken at once
BLOCKS = 2  # of latents in shared memory
RAW_BUFFERS = 3  # of an fp8 step's parts, before conversion
LOADER, SCORER = 3, 2  # indices of warpgroups; 0 and 1 sum
WARPGROUPS = 4
REDUCTION_BYTES = 1024  # for the maximum over tokens, across warps: 64 heads' at once
EVEN_REGISTERS = 128  # what each thread of four warpgroups starts with
# With more heads than this, shared memory has room for one buffer of weights only.
FEW_HEADS = 32


@dataclass(frozen=True)
class Shape:
    """What is known when a kernel is compiled.

    heads: of one block, a multiple of 8 up to 64; page_size Z; latent R, a multiple of 128; width
    R+C, a multiple of 64; scale of the scores; dtype of the results; quantized: the cache holds
    e4m3 bytes.
    """

    heads: int
    page_size: int
    latent: int
    width: int
    scale: float
    dtype: Any
    quantized: bool
    interpret: bool

    @property
    def buffers(self) -> int:
        """Of weights between scorer and summers."""
        return 2 if self.heads <= FEW_HEADS else 1

    @property
    def piece(self) -> int:
        """Tokens that one copy brings: those of a step that certainly lie in one page."""
        return math.gcd(self.page_size, STEP)

    @property
    def half(self) -> int:
        """Latent columns of one summer."""
        return self.latent // 2

    @property
    def chunk(self) -> int:
        """Latent columns of one accumulator, and of one store of results."""
        return math.gcd(self.half, 128)

    @property
    def raw_columns(self) -> int:
        """Columns of an fp8 step that are loaded, converted and freed together.

        They are read 64 at a time, so none that make a shared tile of bytes 128 wide.
        """
        return 192 if self.width % 192 == 0 else 64

    @property
    def matmul_dtype(self) -> Any:
        """Of q, latents and weights in shared memory: one that holds every cached value.

        f16 for e4m3, since Hopper converts pairs of bytes to f16 in one instruction and has none to
        bf16; it keeps three more bits of the scaled q and of the weights.
        """
        return jnp.float16 if self.quantized else jnp.bfloat16

    @property
    def registers(self) -> "Registers":
        """Of each thread: with these nothing spills, by the assembler's word, for any `heads`."""
        if self.quantized:
            return Registers(loader=96, scorer=160, summer=128)
        return Registers(loader=32, scorer=160, summer=160)


class Registers(NamedTuple):
    """How many each thread of a warpgroup has; a loader's, a scorer's, two summers' make 512."""

    loader: int
    scorer: int
    summer: int


class Scratch(NamedTuple):
    """Shared memory and barriers of a block, in the order of `scratch`."""

    q_or_out: Ref  # q [heads, R+C]; at the end results [2 summers, heads, chunk]
    latents: Ref  # [BLOCKS, STEP, R+C]
    weights: Ref  # [buffers, heads, STEP]
    shrink: Ref  # f32 [buffers, heads]; at the end what the sums are multiplied with
    q_there: Ref
    filled: Ref  # [BLOCKS]: latents are there
    emptied: Ref  # [BLOCKS]: both summers are through
    weighed: Ref  # [buffers]: weights and shrink are there
    summed: Ref  # [buffers]: both summers are through
    raw: Ref = None  # fp8: e4m3 [RAW_BUFFERS, STEP, raw_columns]
    raw_filled: Ref = None


def scratch(shape: Shape) -> list[Any]:
    """What `mosaic.launch` has to give the body."""
    out = mosaic.shared_tile((2, shape.heads, shape.chunk), shape.dtype)
    q = mosaic.shared_tile((shape.heads, shape.width), shape.matmul_dtype)
    plain = [
        mosaic_turned.overlay(q, out),
        mosaic.shared_tile((BLOCKS, STEP, shape.width), shape.matmul_dtype),
        mosaic.shared_tile((shape.buffers, shape.heads, STEP), shape.matmul_dtype),
        mosaic.shared((shape.buffers, shape.heads), jnp.float32),
        mosaic.barriers(1),
        mosaic.barriers(BLOCKS, 1 if shape.quantized else STEP // shape.piece),
        mosaic.barriers(BLOCKS, 2),
        mosaic.barriers(shape.buffers),
        mosaic.barriers(shape.buffers, 2),
    ]
    if not shape.quantized:
        return plain
    raw = (RAW_BUFFERS, STEP, shape.raw_columns)
    return [
        *plain,
        mosaic.shared_tile(raw, jnp.uint8),
        mosaic.barriers(RAW_BUFFERS, STEP // shape.piece),
    ]
