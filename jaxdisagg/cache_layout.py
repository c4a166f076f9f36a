"""How a paged cache lies in the memory of a node's devices."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

MAX_DEVICES = 4096
"""No node has more: a peer's HELLO must not make a plan too long to be listed."""


@dataclass(frozen=True)
class CacheLayout:
    """How a node's paged cache lies in its devices' memory, per layer and page.

    gqa: `[pages, kv_heads, 2, page_size, head_dim]` (heads before K/V before tokens) with
    kv_heads sharded: tp = kv * rep, kv = min(tp, kv_heads); rank r holds shard r // rep, so with
    tp > kv_heads neighbours hold copies. mla: `[pages, page_size, head_dim]`, head_dim being
    latent + rope dims, kv_heads 1, a copy on every rank. Sizes in elements; itemsize in bytes.

    Raises ValueError naming the field for a layout that cannot exist.
    """

    kind: Literal["gqa", "mla"]
    layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    itemsize: int
    tp: int
    dp: int = 1

    def __post_init__(self) -> None:
        if self.kind not in ("gqa", "mla"):
            raise ValueError(f"kind: {self.kind!r}, must be 'gqa' or 'mla'")
        for name in ("layers", "kv_heads", "head_dim", "page_size", "itemsize", "tp", "dp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)}, must be at least 1")
        if self.devices > MAX_DEVICES:
            raise ValueError(
                f"tp: {self.tp} with dp {self.dp}, must be at most {MAX_DEVICES} devices"
            )
        if self.kind == "mla" and self.kv_heads != 1:
            raise ValueError(f"kv_heads: {self.kv_heads}, must be 1 for mla (one latent)")
        if self.kind == "gqa" and self.kv_heads % self.tp and self.tp % self.kv_heads:
            raise ValueError(
                f"tp: {self.tp}, must divide the {self.kv_heads} KV heads or be a multiple of them"
            )

    @property
    def shards(self) -> int:
        """The number of different shards of a page (the mesh axis `kv`)."""
        return 1 if self.kind == "mla" else min(self.tp, self.kv_heads)

    @property
    def replicas(self) -> int:
        """How many tp ranks hold a copy of each shard (the mesh axis `rep`)."""
        return self.tp // self.shards

    def heads_of(self, rank: int) -> range:
        """The KV heads that tp rank `rank` holds."""
        if not 0 <= rank < self.tp:
            raise ValueError(f"rank: {rank}, must be in 0..{self.tp - 1}")
        n = self.kv_heads // self.shards
        first = rank // self.replicas * n
        return range(first, first + n)

    def shard_of(self, head: int) -> int:
        """The shard that a KV head is in."""
        if not 0 <= head < self.kv_heads:
            raise ValueError(f"head: {head}, must be in 0..{self.kv_heads - 1}")
        return head // (self.kv_heads // self.shards)

    def ranks_of(self, shard: int) -> range:
        """The tp ranks that hold a copy of a shard."""
        if not 0 <= shard < self.shards:
            raise ValueError(f"shard: {shard}, must be in 0..{self.shards - 1}")
        return range(shard * self.replicas, (shard + 1) * self.replicas)

    @property
    def devices(self) -> int:
        """How many devices the node has."""
        return self.dp * self.tp

    @property
    def planes(self) -> int:
        """K and V are two (gqa); the latent is one (mla)."""
        return 2 if self.kind == "gqa" else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one token of one layer in one plane of one head."""
        return self.head_dim * self.itemsize

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one page of one layer, all planes."""
        return self.planes * self.page_size * self.row_bytes

    @property
    def shard_bytes(self) -> int:
        """Bytes of one page of one layer on one rank: contiguous, since heads come first."""
        return self.kv_heads // self.shards * self.head_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes on one rank, all layers."""
        return self.layers * self.shard_bytes // self.page_size

    def ordinal(self, dp_rank: int, rank: int) -> int:
        """The device's number in the node: devices are dp-major."""
        return dp_rank * self.tp + rank

    def byte_ids(self, rank: int, tokens: int) -> np.ndarray:
        """int64[pages, shard_bytes]: which byte of `tokens` tokens of one layer lies where.

        Bytes are numbered by head, plane, token and place in the row, whatever the page size, which
        must divide `tokens`.
        """
        shape = (self.kv_heads, self.planes, -1, self.page_size, self.row_bytes)
        count = self.kv_heads * self.planes * tokens * self.row_bytes
        ids = np.arange(count, dtype=np.int64).reshape(shape)
        held = self.heads_of(rank)
        return np.moveaxis(ids[held.start : held.stop], 2, 0).reshape(-1, self.shard_bytes)
