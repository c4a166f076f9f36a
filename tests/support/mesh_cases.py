"""Meshes and models of the mesh matrix, and what a pair of them must do.

That is counted and mapped here from first principles, not by the product's plan.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sentinel_values import Sentinels

PAGE = 16
PAGES = 256


@dataclass(frozen=True)
class Mesh:
    """One node's mesh, the size of its pages in tokens, and how many a dp rank has."""

    tp: int = 1
    dp: int = 1
    page: int = PAGE
    pages: int = PAGES

    def __str__(self) -> str:
        label = f"tp{self.tp}"
        for name, value, usual in (
            ("dp", self.dp, 1),
            ("page", self.page, PAGE),
            ("pages", self.pages, PAGES),
        ):
            if value != usual:
                label += f"-{name}{value}"
        return label


@dataclass(frozen=True)
class Model:
    """What both nodes of a pair serve. `kv_heads` is 0 for a latent cache.

    Without a `folder` it is the sentinel model, which is in float32 whatever `dtype` says.
    """

    name: str
    kv_heads: int
    layers: int
    folder: Path | None = None
    dtype: str = "float32"

    def heads_of(self, rank: int, tp: int) -> range:
        """The KV heads of a tp rank."""
        return Sentinels(self.kv_heads).heads_of(rank, tp)

    def page_writes(self, length: int, prefill: Mesh, decode: Mesh) -> int:
        """How many a prompt takes: its pages, and a context for every decode rank.

        With pages of one size a decode rank gets, of each page of each layer, one part from each
        different shard that holds some of its heads. Otherwise each of its heads comes by itself,
        K and V apart, and cut wherever a page ends on either side.
        """
        if length == 1:
            return 0
        cuts = sum(
            1 for row in range(length - 1) if not row % prefill.page or not row % decode.page
        )
        shards = {self.heads_of(rank, prefill.tp) for rank in range(prefill.tp)}
        parts = 0
        for rank in range(decode.tp):
            held = set(self.heads_of(rank, decode.tp))
            if prefill.page == decode.page:
                parts += sum(bool(held & set(shard)) for shard in shards)
            else:
                parts += len(held) * Sentinels(self.kv_heads).row[1]
        return parts * cuts * self.layers + decode.tp


def every_pair(meshes: Iterable[Mesh]) -> Iterator[tuple[Mesh, Mesh]]:
    """Each mesh as the prefill node's with each as the decode node's."""
    meshes = list(meshes)
    for prefill in meshes:
        for decode in meshes:
            yield prefill, decode
