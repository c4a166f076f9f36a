"""Which pages a node lent out, so that a test can read them afterwards."""

from typing import Any, NamedTuple

import numpy as np


class Lent(NamedTuple):
    """Pages (uint32 [n]) of a dp rank."""

    rank: int
    pages: np.ndarray


def lent(node: Any) -> list[Lent]:
    """Every lease that the node's pools give from now on, in order."""
    record: list[Lent] = []
    for rank, pool in enumerate(node.pools):
        original = type(pool).lease.__get__(pool)

        def lease(n: int, rank: int = rank, original: Any = original) -> Any:
            taken = original(n)
            if taken is not None:
                record.append(Lent(rank, taken.pages.copy()))
            return taken

        pool.lease = lease
    return record
