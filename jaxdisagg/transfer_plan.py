"""Who writes which bytes where: a pure function of two cache layouts that both sides call.

The unit of counting is one (destination rank, layer, page, part), and one more for each
destination rank's context buffer, so the number that the decoder expects depends on the layouts and
the prompt's length alone, never on how writes are packed or on which replica sends.
A request lives on one dp rank of each side; `rank` here is the tp rank within it, and
`layout.ordinal(dp_rank, rank)` the device's place in the node. No jax: NumPy only for the check.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

MAX_UNIT_BYTES = 1 << 20
"""A page shard longer than this is listed as several units: no write is longer."""

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
    def head_bytes(self) -> int:
        """Bytes of one head of one page of one layer, K and V (gqa) or the latent (mla)."""
        parts = 2 if self.kind == "gqa" else 1
        return parts * self.page_size * self.head_dim * self.itemsize

    @property
    def shard_bytes(self) -> int:
        """Bytes of one page of one layer on one rank: contiguous, since heads come first."""
        return self.kv_heads // self.shards * self.head_bytes

    def ordinal(self, dp_rank: int, rank: int) -> int:
        """The device's number in the node: devices are dp-major."""
        return dp_rank * self.tp + rank

    def page_bytes_ids(self, rank: int) -> np.ndarray:
        """int64[shard_bytes]: for each byte of a page on `rank`, which byte of the page it is."""
        first = self.heads_of(rank)[0] * self.head_bytes
        return np.arange(first, first + self.shard_bytes, dtype=np.int64)


@dataclass(frozen=True)
class PlanUnit:
    """One part of every page: `length` bytes from one rank's page shard to another's.

    Offsets are in bytes from the beginning of the page's shard.
    """

    source_rank: int
    destination_rank: int
    source_offset: int
    destination_offset: int
    length: int


@dataclass(frozen=True)
class TransferPlan:
    """The units of one page of one layer; every layer and page of a request repeats them.

    `context_sources[d]` is the source rank that writes destination rank d's context buffer.
    """

    source: CacheLayout
    destination: CacheLayout
    units: tuple[PlanUnit, ...]
    context_sources: tuple[int, ...]

    def expected_units(
        self,
        prompt_length: int,
        *,
        context: bool,
        destination_ranks: Iterable[int] | None = None,
    ) -> int:
        """How many units a receiving process counts for a prompt of `prompt_length` tokens.

        `destination_ranks` are the tp ranks that the process holds (None: all of them); with
        `context` each of them is written a context buffer too, one unit.
        """
        every = range(self.destination.tp)
        ranks = set(every if destination_ranks is None else destination_ranks).intersection(every)
        per_page = sum(u.destination_rank in ranks for u in self.units)
        pages = per_page * self.destination.layers * self.pages_for(prompt_length)
        return pages + context * len(ranks)

    def pages_for(self, prompt_length: int) -> int:
        """Pages that a prompt's prefill fills: `pages_for` with this plan's page size."""
        return pages_for(prompt_length, self.source.page_size)

    def chunk_pages(self, begin: int, end: int, total: int) -> range:
        """Pages that a chunk completes: `chunk_pages` with this plan's page size."""
        return chunk_pages(begin, end, total, self.source.page_size)


def pages_for(prompt_length: int, page_size: int) -> int:
    """Pages that hold tokens 0..prompt_length-2: the last token is the decoder's. 0 for L = 1."""
    if prompt_length < 1:
        raise ValueError(f"prompt_length: {prompt_length}, must be at least 1")
    return -(-(prompt_length - 1) // page_size)


def chunk_pages(begin: int, end: int, total: int, page_size: int) -> range:
    """Which pages (by index in the request) are complete after rows [begin, end) of `total`.

    A page goes with the chunk that writes its last row; a partly filled last page goes with the
    chunk that ends at `total` (= prompt length - 1). Every page belongs to exactly one chunk.
    """
    if not 0 <= begin <= end <= total:
        raise ValueError(f"chunk: rows {begin}..{end} of {total} are no chunk")
    if begin == end:
        return range(0)
    last = -(-end // page_size) if end == total else end // page_size
    return range(begin // page_size, last)


def plan(source: CacheLayout, destination: CacheLayout, seed: int = 0) -> TransferPlan:
    """Map the prefill node's page shards, and its context rows, to the decode node's devices.

    Every destination rank gets each head that it holds from one source rank that holds it too. The
    heads that it shares with one source shard are contiguous in the page on both sides: one unit,
    or several if they are longer than MAX_UNIT_BYTES. So a wider decode node splits pages, a
    narrower one has them rebuilt from parts, and replicas, of heads or of a latent, are written one
    by one. `seed` (drawn by the decoder, sent in PREFILL, at least 0) chooses among the source
    ranks that hold the same shard: a permutation of them is dealt to the destination ranks that
    want it, in turn. So a request's load on the replicas of a shard differs by one destination rank
    at most, a wide destination keeps every source device at work, and narrow ones spread over all
    of them request by request. The number of units does not depend on it.
    Raises ValueError naming the field and both values for layouts that cannot be mapped.
    """
    for name in ("kind", "layers", "kv_heads", "head_dim", "page_size", "itemsize"):
        ours, theirs = getattr(source, name), getattr(destination, name)
        if ours != theirs:
            raise ValueError(f"{name}: {ours} on the prefill node, {theirs} on the decode node")
    units: list[PlanUnit] = []
    dealt = [_dealt(source.ranks_of(shard), seed) for shard in range(source.shards)]
    for rank in range(destination.tp):
        wanted = destination.heads_of(rank)
        for shard in range(source.shard_of(wanted[0]), source.shard_of(wanted[-1]) + 1):
            origin = next(dealt[shard])
            held = source.heads_of(origin)
            first, stop = max(held.start, wanted.start), min(held.stop, wanted.stop)
            units += _units(
                origin,
                rank,
                (first - held.start) * source.head_bytes,
                (first - wanted.start) * destination.head_bytes,
                (stop - first) * source.head_bytes,
            )
    contexts = itertools.islice(_dealt(range(source.tp), seed), destination.tp)
    return TransferPlan(source, destination, tuple(units), tuple(contexts))


def _units(
    source_rank: int,
    destination_rank: int,
    source_offset: int,
    destination_offset: int,
    length: int,
) -> Iterator[PlanUnit]:
    """A contiguous run of bytes as units, none longer than MAX_UNIT_BYTES."""
    for done in range(0, length, MAX_UNIT_BYTES):
        yield PlanUnit(
            source_rank,
            destination_rank,
            source_offset + done,
            destination_offset + done,
            min(MAX_UNIT_BYTES, length - done),
        )


def _dealt(ranks: range, seed: int) -> Iterator[int]:
    """`ranks` in an order drawn from `seed`, over and over.

    By a hash, since both nodes must draw the same: NumPy may change its generators' streams.
    """

    def draw(rank: int) -> bytes:
        return hashlib.blake2b(f"{seed} {rank}".encode(), digest_size=16).digest()

    return itertools.cycle(sorted(ranks, key=draw))


@dataclass(frozen=True)
class Traffic:
    """What one request moves: int64[source tp, destination tp] units, and bytes of them."""

    units: np.ndarray
    bytes: np.ndarray


def traffic(transfer: TransferPlan, prompt_length: int, *, context_bytes: int | None) -> Traffic:
    """What each source rank sends to each destination rank for a prompt of `prompt_length` tokens.

    `context_bytes` is the length of a context buffer, None without one. A column's units are what
    `expected_units` says of that destination rank.
    """
    shape = transfer.source.tp, transfer.destination.tp
    units, sizes = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    pages = transfer.pages_for(prompt_length) * transfer.source.layers
    for unit in transfer.units:
        units[unit.source_rank, unit.destination_rank] += pages
        sizes[unit.source_rank, unit.destination_rank] += pages * unit.length
    if context_bytes is not None:
        for rank, origin in enumerate(transfer.context_sources):
            units[origin, rank] += 1
            sizes[origin, rank] += context_bytes
    return Traffic(units, sizes)


def check(transfer: TransferPlan) -> None:
    """Prove that a page arrives whole: every destination byte once, from the right source byte.

    And that every destination rank gets its context from a source rank that exists. Raises
    ValueError naming the rank, the unit or the byte that is off.
    """
    source, destination = transfer.source, transfer.destination
    ids = [source.page_bytes_ids(r) for r in range(source.tp)]
    for rank in range(destination.tp):
        wanted = destination.page_bytes_ids(rank)
        written = np.zeros(destination.shard_bytes, dtype=np.int64)
        for unit in transfer.units:
            if unit.destination_rank != rank:
                continue
            _check_bounds(unit, source, destination)
            to = slice(unit.destination_offset, unit.destination_offset + unit.length)
            origin = slice(unit.source_offset, unit.source_offset + unit.length)
            wrong = ids[unit.source_rank][origin] != wanted[to]
            if wrong.any():
                byte = unit.destination_offset + int(np.argmax(wrong))
                raise ValueError(f"{unit}: byte {byte} of rank {rank} comes from another byte")
            written[to] += 1
        if (written != 1).any():
            byte = int(np.argmax(written != 1))
            raise ValueError(
                f"byte {byte} of destination rank {rank} is written {int(written[byte])} times"
            )
    for unit in transfer.units:
        if not 0 <= unit.destination_rank < destination.tp:
            raise ValueError(f"{unit}: no such destination rank, tp is {destination.tp}")
    if len(transfer.context_sources) != destination.tp:
        raise ValueError(
            f"context_sources: {len(transfer.context_sources)} ranks are written a context, "
            f"tp is {destination.tp}"
        )
    for rank, origin in enumerate(transfer.context_sources):
        if not 0 <= origin < source.tp:
            raise ValueError(
                f"context_sources: rank {rank} from {origin}, the prefill node's tp is {source.tp}"
            )


def _check_bounds(unit: PlanUnit, source: CacheLayout, destination: CacheLayout) -> None:
    if not 0 <= unit.source_rank < source.tp:
        raise ValueError(f"{unit}: no such source rank, tp is {source.tp}")
    if not 0 < unit.length <= MAX_UNIT_BYTES:
        raise ValueError(f"{unit}: length must be in 1..{MAX_UNIT_BYTES}")
    if not 0 <= unit.source_offset <= source.shard_bytes - unit.length:
        raise ValueError(f"{unit}: reads outside the source page's {source.shard_bytes} bytes")
    if not 0 <= unit.destination_offset <= destination.shard_bytes - unit.length:
        raise ValueError(f"{unit}: writes outside the page's {destination.shard_bytes} bytes")
