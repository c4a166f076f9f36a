"""Who writes which bytes where: a pure function of two cache layouts that both sides call.

The unit of counting is one (destination rank, layer, span of tokens, part), a span being a page
where both sides' pages are of one size, and one more for each destination rank's context buffer. So
the number that the decoder expects depends on the layouts and the prompt's length alone, never on
how writes are packed or on which replica sends.
A request lives on one dp rank of each side; `rank` here is the tp rank within it, and
`layout.ordinal(dp_rank, rank)` the device's place in the node. No jax: NumPy only for the check.
"""

import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ffi_transport.types import MAX_UNIT_BYTES
from jaxdisagg.cache_layout import CacheLayout
from jaxdisagg.page_spans import PageSpans, page_spans

MAX_SPAN_UNITS = 1 << 12
"""Page sizes that cut each other into more units a period are refused: a plan must stay short."""


@dataclass(frozen=True, slots=True)
class PlanUnit:
    """One part of every occurrence of a span: `length` bytes from one page's shard to another's.

    `span` is the number of the span in `TransferPlan.spans`, which says which page it is on either
    side. Offsets are in bytes from the beginning of the page's shard.
    """

    source_rank: int
    destination_rank: int
    source_offset: int
    destination_offset: int
    length: int
    span: int = 0


@dataclass(frozen=True)
class TransferPlan:
    """The units of one period of one layer; every layer and period of a request repeats them.

    `context_sources[d]` is the source rank that writes destination rank d's context buffer.
    """

    source: CacheLayout
    destination: CacheLayout
    units: tuple[PlanUnit, ...]
    context_sources: tuple[int, ...]

    @property
    def spans(self) -> PageSpans:
        """How the two page sizes cut the tokens."""
        return page_spans(self.source.page_size, self.destination.page_size)

    @functools.cached_property
    def units_by_span(self) -> tuple[tuple[PlanUnit, ...], ...]:
        """The units of each span, in the order of the spans."""
        found: list[list[PlanUnit]] = [[] for _ in self.spans.spans]
        for unit in self.units:
            found[unit.span].append(unit)
        return tuple(map(tuple, found))

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
        found = sum(
            count * sum(unit.destination_rank in ranks for unit in units)
            for count, units in zip(self.counts(prompt_length), self.units_by_span, strict=True)
        )
        return found * self.destination.layers + context * len(ranks)

    def counts(self, prompt_length: int) -> list[int]:
        """How often each span occurs in tokens 0..prompt_length-2, a partly filled one included."""
        if prompt_length < 1:
            raise ValueError(f"prompt_length: {prompt_length}, must be at least 1")
        spans = self.spans
        return [spans.count(span, prompt_length - 1) for span in spans.spans]


@functools.lru_cache(maxsize=128)
def plan(source: CacheLayout, destination: CacheLayout, seed: int = 0) -> TransferPlan:
    """Map the prefill node's page shards, and its context rows, to the decode node's devices.

    Every destination rank gets each head that it holds from one source rank that holds it too. The
    heads that it shares with one source shard are contiguous in the page on both sides: one unit,
    or several if they are longer than MAX_UNIT_BYTES. So a wider decode node splits pages, a
    narrower one has them rebuilt from parts, and replicas, of heads or of a latent, are written one
    by one. With different page sizes only the tokens of a span are contiguous, in one head's keys,
    its values, or the latent: each is a unit.

    `seed` (drawn by the decoder, sent in PREFILL, at least 0) chooses among the source ranks that
    hold the same shard: a permutation of them is dealt to the destination ranks that want it, in
    turn. The number of units does not depend on it.

    Bounds, for one request: each destination rank receives its shard of the pages, no more. The
    source ranks' loads differ by at most one shard of the pages (one head, or the latent), and by
    nothing where every shard has one holder or `destination.tp` is a multiple of `source.tp`; and
    by one context. So a wide destination keeps every source device at work, and narrow ones spread
    over all of them request by request. The NICs of one device share what it sends to, or gets
    from, each device of the other side within one unit (csrc/lanes.h).

    Raises ValueError naming the field and both values for layouts that cannot be mapped.
    """
    for name in ("kind", "layers", "kv_heads", "head_dim", "itemsize"):
        ours, theirs = getattr(source, name), getattr(destination, name)
        if ours != theirs:
            raise ValueError(f"{name}: {ours} on the prefill node, {theirs} on the decode node")
    _check_page_sizes(source, destination)
    units: list[PlanUnit] = []
    dealt = [_dealt(source.ranks_of(shard), seed) for shard in range(source.shards)]
    for rank in range(destination.tp):
        wanted = destination.heads_of(rank)
        for shard in range(source.shard_of(wanted[0]), source.shard_of(wanted[-1]) + 1):
            origin = next(dealt[shard])
            held = source.heads_of(origin)
            heads = range(max(held.start, wanted.start), min(held.stop, wanted.stop))
            units += [
                PlanUnit(
                    origin, rank, from_ + done, to + done, min(MAX_UNIT_BYTES, length - done), k
                )
                for k, from_, to, length in _runs(
                    source, destination, heads, heads.start - held.start, heads.start - wanted.start
                )
                for done in range(0, length, MAX_UNIT_BYTES)
            ]
    contexts = itertools.islice(_dealt(range(source.tp), seed), destination.tp)
    return TransferPlan(source, destination, tuple(units), tuple(contexts))


def _check_page_sizes(source: CacheLayout, destination: CacheLayout) -> None:
    ours, theirs = source.page_size, destination.page_size
    spans = (ours + theirs) // math.gcd(ours, theirs) - 1
    units = spans * source.planes * max(source.kv_heads, destination.tp)
    if ours != theirs and units > MAX_SPAN_UNITS:
        raise ValueError(
            f"page_size: {ours} on the prefill node, {theirs} on the decode node; they cut each "
            f"other into {units} units every {math.lcm(ours, theirs)} tokens, at most "
            f"{MAX_SPAN_UNITS} are allowed"
        )


def _runs(
    source: CacheLayout, destination: CacheLayout, heads: range, from_head: int, to_head: int
) -> Iterator[tuple[int, int, int, int]]:
    """(span, source offset, destination offset, bytes) of what is contiguous on both sides.

    Of `heads`, which are head `from_head` and on of the source page's shard and `to_head` and on of
    the destination's.
    """
    if source.page_size == destination.page_size:
        from_, to = from_head * source.head_bytes, to_head * source.head_bytes
        yield 0, from_, to, len(heads) * source.head_bytes
        return
    for k, span in enumerate(page_spans(source.page_size, destination.page_size).spans):
        from_row, to_row = span.begin % source.page_size, span.begin % destination.page_size
        for plane in range(len(heads) * source.planes):
            yield (
                k,
                from_head * source.head_bytes
                + (plane * source.page_size + from_row) * source.row_bytes,
                to_head * destination.head_bytes
                + (plane * destination.page_size + to_row) * source.row_bytes,
                (span.end - span.begin) * source.row_bytes,
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
    counts = transfer.counts(prompt_length)
    for unit in transfer.units:
        times = counts[unit.span] * transfer.source.layers
        units[unit.source_rank, unit.destination_rank] += times
        sizes[unit.source_rank, unit.destination_rank] += times * unit.length
    if context_bytes is not None:
        for rank, origin in enumerate(transfer.context_sources):
            units[origin, rank] += 1
            sizes[origin, rank] += context_bytes
    return Traffic(units, sizes)


def check(transfer: TransferPlan) -> None:
    """Prove that a period arrives whole: every destination byte once, from the right source byte.

    So a unit reads no token outside its span, which may not be there yet: two tokens that share
    their page on both sides share a span. And that every destination rank gets its context from a
    source rank that exists. Raises ValueError naming the rank, the unit or the byte that is off.
    """
    source, destination, period = transfer.source, transfer.destination, transfer.spans.period
    ids = [source.byte_ids(rank, period) for rank in range(source.tp)]
    wanted = [destination.byte_ids(rank, period) for rank in range(destination.tp)]
    written = [np.zeros(page.shape, np.int64) for page in wanted]
    for unit in transfer.units:
        _check_bounds(transfer, unit)
        span = transfer.spans.spans[unit.span]
        to = slice(unit.destination_offset, unit.destination_offset + unit.length)
        origin = slice(unit.source_offset, unit.source_offset + unit.length)
        wrong = (
            ids[unit.source_rank][span.source_page, origin]
            != wanted[unit.destination_rank][span.destination_page, to]
        )
        if wrong.any():
            byte = unit.destination_offset + int(np.argmax(wrong))
            raise ValueError(
                f"{unit}: byte {byte} of rank {unit.destination_rank} comes from another byte"
            )
        written[unit.destination_rank][span.destination_page, to] += 1
    for rank, times in enumerate(written):
        if (times != 1).any():
            page, byte = np.argwhere(times != 1)[0].tolist()
            raise ValueError(
                f"byte {byte} of page {page} of destination rank {rank} is written "
                f"{int(times[page, byte])} times"
            )
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


def _check_bounds(transfer: TransferPlan, unit: PlanUnit) -> None:
    source, destination = transfer.source, transfer.destination
    if not 0 <= unit.source_rank < source.tp:
        raise ValueError(f"{unit}: no such source rank, tp is {source.tp}")
    if not 0 <= unit.destination_rank < destination.tp:
        raise ValueError(f"{unit}: no such destination rank, tp is {destination.tp}")
    if not 0 <= unit.span < len(transfer.spans.spans):
        raise ValueError(f"{unit}: no such span, a period has {len(transfer.spans.spans)}")
    if not 0 < unit.length <= MAX_UNIT_BYTES:
        raise ValueError(f"{unit}: length must be in 1..{MAX_UNIT_BYTES}")
    if not 0 <= unit.source_offset <= source.shard_bytes - unit.length:
        raise ValueError(f"{unit}: reads outside the source page's {source.shard_bytes} bytes")
    if not 0 <= unit.destination_offset <= destination.shard_bytes - unit.length:
        raise ValueError(f"{unit}: writes outside the page's {destination.shard_bytes} bytes")
