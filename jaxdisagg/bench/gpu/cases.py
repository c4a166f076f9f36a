"""Inputs of the attention operations as a server has them, and the answers by plain numpy.

Pages are scattered, lengths odd, and all that a row must not read is poison: NaN in unused pages
and behind a row's length, page numbers out of range behind its last page. Nothing of the kernels'
own code computes the answers.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
OUTSIDE = (1 << 30, -7)  # page numbers that no cache has


def lengths_for(page_size: int, longest: int) -> np.ndarray:
    """Row lengths i32 [8] around the borders of pages, 0 and `longest` among them."""
    z = page_size
    return np.array([0, 1, z - 1, z, z + 1, 3 * z + 5, longest - z - 3, longest], np.int32)


@dataclass(frozen=True)
class Paged:
    """Scattered pages: `table` i32 [B, W], poisoned behind each row's pages, `live` bool [P, Z]."""

    lengths: np.ndarray
    table: np.ndarray
    live: np.ndarray


def scatter(lengths: np.ndarray, page_size: int, rng: np.random.Generator) -> Paged:
    """Give every row pages of its own, in no order, one page being left unused."""
    held = -(-lengths // page_size)
    ids = rng.permutation(int(held.sum()) + 1)[: int(held.sum())]
    table = rng.choice(np.array(OUTSIDE, np.int32), (len(lengths), max(int(held.max()), 1)))
    live = np.zeros((len(ids) + 1, page_size), bool)
    at = 0
    for row, (length, count) in enumerate(zip(lengths, held, strict=True)):
        table[row, :count] = ids[at : at + count]
        positions = np.arange(length)
        live[table[row, positions // page_size], positions % page_size] = True
        at += int(count)
    return Paged(lengths, table, live)


def store(values: np.ndarray, fp8_scale: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """(what the cache holds, what it means): bf16, or e4m3 bytes of which `fp8_scale` is one unit.

    `fp8_scale` must broadcast against `values`.
    """
    if fp8_scale is None:
        held = values.astype(BF16)
        return held, held.astype(np.float32)
    coded = (values / fp8_scale).astype(E4M3)
    return coded.view(np.uint8), coded.astype(np.float32) * fp8_scale


def poison(held: np.ndarray, live: np.ndarray) -> np.ndarray:
    """The cache with NaN wherever `live` (broadcast to it) is false."""
    nan = np.uint8(0x7F) if held.dtype == np.uint8 else held.dtype.type(np.nan)
    return np.where(live, held, nan)


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, upto: np.ndarray | None = None
) -> np.ndarray:
    """softmax(scale * q k^T) v in float32: q [t, h], k [s, h], v [s, d] -> [t, d].

    Query i reads the first `upto[i]` keys, at least one; None is all of them. No key gives zeros.
    """
    if not len(k):
        return np.zeros((*q.shape[:-1], v.shape[-1]))
    scores = np.float32(scale) * (q.astype(np.float32) @ k.T)
    if upto is not None:
        scores = np.where(np.arange(len(k)) < upto[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights @ v / weights.sum(axis=-1, keepdims=True)


def rows_of(values: np.ndarray, paged: Paged, row: int, length: int) -> np.ndarray:
    """A row's first `length` tokens of values [P, Z, ...]."""
    page_size = values.shape[1]
    at = np.arange(length)
    return values[paged.table[row, at // page_size], at % page_size]


def uniform(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """f32 in (-1, 1): averages of them keep the scale, so that an absolute error says enough."""
    return rng.uniform(-1, 1, shape).astype(np.float32)
