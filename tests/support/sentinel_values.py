"""What every byte of a cache must be, by a formula: the oracle of the sentinel model's pages.

NumPy alone, and nothing of the product: which heads a rank holds is derived here anew. A value is a
mixed-radix number of everything that says where it belongs, below 2**24, so float32 holds it
exactly and no two places of a request share one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

VOCABULARY = 48  # which divides by 2, 3, 4, 6 and 8 ranks
POSITIONS = 256
LAYERS = 3
HIDDEN = 16
HEAD_DIM = 8
LATENT, ROPE = 16, 8  # of a latent cache's rows, 24 values in all


@dataclass(frozen=True)
class Sentinels:
    """The caches of one sentinel model: `kv_heads` KV heads, or 0 for a latent (MLA) cache."""

    kv_heads: int

    @property
    def row(self) -> tuple[int, int, int]:
        """(heads, planes, values) of one token: K and V are two planes, a latent has one."""
        return (self.kv_heads, 2, HEAD_DIM) if self.kv_heads else (1, 1, LATENT + ROPE)

    def heads_of(self, rank: int, tp: int) -> range:
        """The heads on a tp rank: K heads cut into tp equal parts, a part of one head being whole.

        With tp above K several neighbours hold the same head; the latent is on every rank.
        """
        heads = self.row[0]
        return range(rank * heads // tp, -(-(rank + 1) * heads // tp))

    def page_values(self, tokens: Sequence[int], rank: int, tp: int) -> np.ndarray:
        """f32 [layers, heads of the rank, planes, tokens, values] of tokens from position 0 on."""
        heads, planes, values = self.row
        token = np.asarray(tokens, np.int64)
        code = token * POSITIONS + np.arange(len(token))
        held = np.array(self.heads_of(rank, tp))
        code = code * LAYERS + np.arange(LAYERS)[:, None]  # [layers, tokens]
        code = code[:, None] * heads + held[:, None]  # [layers, heads, tokens]
        code = code[:, :, None] * planes + np.arange(planes)[:, None]
        code = code[..., None] * values + np.arange(values)
        return exact(code)

    def context_values(self, tokens: Sequence[int]) -> np.ndarray:
        """f32 [hidden size] of the context of a request whose prefilled tokens are these."""
        return exact(
            (tokens[-1] * POSITIONS + len(tokens) - 1) * HIDDEN + np.arange(HIDDEN, dtype=np.int64)
        )


def exact(code: np.ndarray) -> np.ndarray:
    """The codes plus one, as float32; none of them is rounded."""
    assert code.max() < 1 << 24
    return (code + 1).astype(np.float32)


def prompt(length: int, number: int) -> list[int]:
    """Request `number`'s tokens: at no position do two of 48 requests have the same one."""
    return [(number + 7 * i + i // 9) % VOCABULARY for i in range(length)]


def next_token(token: int) -> int:
    """What the sentinel model answers to a token, wherever it stands."""
    return (5 * token + 1) % VOCABULARY


def answer(tokens: Sequence[int], count: int) -> list[int]:
    """The `count` tokens that the sentinel model answers to a prompt."""
    found = [tokens[-1]]
    for _ in range(count):
        found.append(next_token(found[-1]))
    return found[1:]
