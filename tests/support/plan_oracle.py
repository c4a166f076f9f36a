"""An oracle for transfer plans: two nodes' memory, byte by byte, by the documented layout.

Nothing here asks the plan where a byte belongs. Every byte of a request has a number of its own, by
layer, head, K/V plane, token and place in the row; the memory of each device is filled, and read
again, by the layout [pages, heads, planes, tokens, row]. What a planner posts is carried out as the
transfer engine would: pages of each layer, `length` bytes from one offset to another.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from ffi_transport.types import PlanWrite
from jaxdisagg.cache import Shard
from jaxdisagg.cache_layout import CacheLayout
from jaxdisagg.messages import pack
from jaxdisagg.process_shares import process_of
from jaxdisagg.step_plans import PlannedRequest, StepPlanner

CONTEXT_BYTES = 5
CONTEXT_ROWS = 4
NOTHING = -1
FOREIGN = -2
"""What no byte of the request is: memory never written, and pages of someone else."""


def heads_of(layout: CacheLayout, rank: int) -> list[int]:
    """The KV heads that mesh axes (kv, rep) put on a tp rank."""
    kv = 1 if layout.kind == "mla" else min(layout.tp, layout.kv_heads)
    axes = np.arange(layout.tp).reshape(kv, layout.tp // kv)
    part = int(np.argwhere(axes == rank)[0, 0])
    return np.split(np.arange(layout.kv_heads), kv)[part].tolist()


def planes_of(layout: CacheLayout) -> int:
    """Keys and values, or the latent."""
    return 1 if layout.kind == "mla" else 2


def page_shape(layout: CacheLayout) -> tuple[int, int, int, int]:
    """[heads of a rank, planes, tokens, bytes of a row] of one page."""
    heads = len(heads_of(layout, 0))
    row = layout.head_dim * layout.itemsize
    return heads, planes_of(layout), layout.page_size, row


def numbers(layout: CacheLayout, layer: int, tokens: np.ndarray) -> np.ndarray:
    """int64[heads, planes, len(tokens), row bytes]: every byte's own number, of whatever layout."""
    row = layout.head_dim * layout.itemsize
    shape = (layout.kv_heads, planes_of(layout), 1 << 20, row)
    grid = np.ix_(*map(np.arange, shape[:2]), tokens, np.arange(row))
    return np.ravel_multi_index(grid, shape) + layer * int(np.prod(shape))


@dataclass
class Side:
    """One node's memory: `memory[dp rank][tp rank][layer]` is int64[pool, page bytes].

    `pages` are the request's, in the order of its tokens, on dp rank `dp_rank`. With `real` each
    byte is a byte of memory, uint8, made from its number.
    """

    layout: CacheLayout
    dp_rank: int
    pool: int
    pages: np.ndarray
    real: bool = False
    memory: list[list[np.ndarray]] = field(default_factory=list)
    times: list[list[np.ndarray]] = field(default_factory=list)

    def __post_init__(self) -> None:
        layers, page = self.layout.layers, int(np.prod(page_shape(self.layout)))
        for dp_rank in range(self.layout.dp):
            fill = NOTHING if dp_rank == self.dp_rank else FOREIGN
            shape = (layers, self.pool, page)
            ranks = range(self.layout.tp)
            self.memory.append([self._bytes(np.full(shape, fill)) for _ in ranks])
            self.times.append([np.zeros(shape, np.int64) for _ in ranks])

    def _bytes(self, numbered: np.ndarray) -> np.ndarray:
        if not self.real:
            return numbered
        return (numbered * 2654435761 >> 16 & 0xFF).astype(np.uint8)

    def prefill(self, begin: int, end: int) -> None:
        """Write tokens [begin, end) of the request into every tp rank that holds a head of them."""
        tokens = np.arange(begin, end)
        pages, rows = self.pages[tokens // self.layout.page_size], tokens % self.layout.page_size
        for rank, memory in enumerate(self.memory[self.dp_rank]):
            held = heads_of(self.layout, rank)
            cache = memory.reshape(self.layout.layers, self.pool, *page_shape(self.layout))
            for layer in range(self.layout.layers):
                values = self._bytes(numbers(self.layout, layer, tokens)[held])
                cache[layer, pages, :, :, rows] = np.moveaxis(values, 2, 0)

    def _places(self, rows: int) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
        """Page and place in it of each of the first tokens; the shape of a tp rank's memory."""
        tokens = np.arange(rows)
        pages, at = self.pages[tokens // self.layout.page_size], tokens % self.layout.page_size
        return pages, at, (self.layout.layers, self.pool, *page_shape(self.layout))

    def misplaced(self, rows: int) -> Iterator[str]:
        """Where the first `rows` tokens, or pages of someone else, are not what they must be."""
        pages, at, shape = self._places(rows)
        others = np.setdiff1d(np.arange(self.pool), self.pages)
        for rank, memory in enumerate(self.memory[self.dp_rank]):
            cache = memory.reshape(shape)
            if (cache[:, others] != self._bytes(np.array(NOTHING))).any():
                yield f"tp rank {rank}: a page of someone else is not as it was"
            for layer in range(self.layout.layers):
                values = numbers(self.layout, layer, np.arange(rows))[heads_of(self.layout, rank)]
                wanted = self._bytes(np.moveaxis(values, 2, 0))
                if (cache[layer, pages, :, :, at] != wanted).any():
                    yield f"tp rank {rank}, layer {layer}: a byte came from another byte"

    def wrong(self, rows: int) -> Iterator[str]:
        """What is not as it must be after `rows` tokens have arrived. Nothing, of a right plan."""
        pages, at, shape = self._places(rows)
        yield from self.misplaced(rows)
        for dp_rank, ranks in enumerate(self.times):
            for rank, times in enumerate(ranks):
                where = f"dp rank {dp_rank}, tp rank {rank}"
                if dp_rank != self.dp_rank:
                    if times.any():
                        yield f"{where}: written, but the request is elsewhere"
                    continue
                counts = times.reshape(shape)
                if (counts[:, pages, :, :, at] != 1).any():
                    yield f"{where}: a byte was not written exactly once"
                if times.max(initial=0) > 1:
                    yield f"{where}: a byte was written twice"
                if times[:, np.setdiff1d(np.arange(self.pool), self.pages)].any():
                    yield f"{where}: a page of someone else was written"


@dataclass(frozen=True)
class FakeCache:
    """What a StepPlanner asks of a cache; device numbers are no ranks."""

    layout: CacheLayout
    context_bytes: int = CONTEXT_BYTES

    @property
    def layers(self) -> tuple[None, ...]:
        return (None,) * self.layout.layers

    def shards(self) -> list[Shard]:
        return [
            Shard(rank, ordinal_of(rank), layer, 0, 0)
            for rank in range(self.layout.devices)
            for layer in range(self.layout.layers + 1)
        ]


def ordinal_of(rank: int) -> int:
    """The number of the device at a place in the mesh: another one, for the devices of a pair."""
    return rank ^ 1


@dataclass(frozen=True)
class Buffers:
    """Stands for a peer's announced context buffers."""

    buffer_bytes: int = CONTEXT_BYTES


@dataclass(frozen=True)
class FakeHello:
    """What a StepPlanner asks of a decode node's HELLO."""

    layout: CacheLayout
    process_count: int = 1


@dataclass(frozen=True)
class FakeRemote:
    """What a StepPlanner asks of a decode node's memory: regions are (dp rank, tp rank, layer)."""

    hello: FakeHello

    def layers(self, dp_rank: int, rank: int) -> tuple[tuple[int, int, int], ...]:
        return tuple((dp_rank, rank, layer) for layer in range(self.hello.layout.layers))

    def context(self, dp_rank: int, rank: int) -> tuple[tuple[int, int, str], Buffers]:
        return (dp_rank, rank, "context"), Buffers()


@dataclass
class Request:
    """A prompt of `length` tokens, cut into chunks at `bounds`, between two nodes' dp ranks."""

    source: Side
    destination: Side
    length: int
    seed: int
    bounds: list[int]
    processes: int = 1

    @property
    def planned(self) -> PlannedRequest:
        """As the prefill messenger makes it."""
        return PlannedRequest(
            rank=self.source.dp_rank,
            dp_rank=self.destination.dp_rank,
            seed=self.seed,
            total=self.length - 1,
            source_pages=pack(self.source.pages),
            destination_pages=pack(self.destination.pages),
            context_row=1,
            context=2,
        )

    @property
    def remote(self) -> Any:
        """The decode node."""
        return FakeRemote(FakeHello(self.destination.layout, self.processes))

    def writes(self) -> Iterator[PlanWrite]:
        """Prefill chunk by chunk, and what a planner releases after each."""
        cache: Any = FakeCache(self.source.layout)
        planner = StepPlanner(self.source.layout, cache)
        transfers = {process: 100 + process for process in range(self.processes)}
        for begin, end in pairwise(self.bounds):
            self.source.prefill(begin, end)
            yield from planner.writes_of(self.planned, begin, end, self.remote, transfers)

    def carry_out(self) -> "Carried":
        """Carry out what is posted after each chunk."""
        carried = Carried(self)
        for write in self.writes():
            carried.post(write)
        return carried


@dataclass
class Carried:
    """What happened: units by destination process, bytes by source rank, contexts by way."""

    request: Request
    units: dict[int, int] = field(default_factory=dict)
    contexts: list[tuple[int, int]] = field(default_factory=list)
    sent: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        source, destination = self.request.source.layout, self.request.destination.layout
        self.sent = np.zeros((2, source.tp, destination.tp), np.int64)

    def post(self, write: PlanWrite) -> None:
        source, destination = self.request.source, self.request.destination
        place = ordinal_of(write.ordinal)
        dp_rank, rank = divmod(place, source.layout.tp)
        assert dp_rank == source.dp_rank, "sent by a device that does not hold the request"
        assert len(write.remotes) == write.layers
        assert len(write.source_pages) == len(write.destination_pages) > 0
        remotes: Any = write.remotes
        to_rank = remotes[0][1]
        units = write.layers * len(write.source_pages)
        self.units[write.transfer] = self.units.get(write.transfer, 0) + units
        self.sent[:, rank, to_rank] += units, units * write.unit.length
        at = destination.layout.ordinal(remotes[0][0], to_rank)
        process = process_of(at, destination.layout.devices, self.request.processes)
        assert write.transfer == 100 + process, "posted to another process's transfer"
        if write.first_layer == source.layout.layers:
            self._context(write, rank)
            return
        unit = write.unit
        assert unit.source_page_bytes == int(np.prod(page_shape(source.layout)))
        assert unit.destination_page_bytes == int(np.prod(page_shape(destination.layout)))
        begin, to = unit.source_offset, unit.destination_offset
        for layer, (to_dp, to_rank, to_layer) in enumerate(remotes, write.first_layer):
            memory = source.memory[dp_rank][rank][layer]
            taken = memory[np.asarray(write.source_pages), begin : begin + unit.length]
            pages = np.asarray(write.destination_pages)
            where = slice(to, to + unit.length)
            destination.memory[to_dp][to_rank][to_layer][pages, where] = taken
            np.add.at(destination.times[to_dp][to_rank][to_layer], (pages, where), 1)

    def _context(self, write: PlanWrite, rank: int) -> None:
        remotes: Any = write.remotes
        ((dp_rank, to_rank, name),) = remotes
        assert (dp_rank, name) == (self.request.destination.dp_rank, "context")
        assert list(write.source_pages) == [1]
        assert list(write.destination_pages) == [2]
        self.contexts.append((rank, to_rank))

    def problems(self) -> list[str]:
        """Every way in which the decode node's memory is not what it must be."""
        return list(self.request.destination.wrong(self.request.length - 1))


def make_request(
    source: CacheLayout,
    destination: CacheLayout,
    length: int,
    *,
    seed: int = 0,
    cuts: Iterable[int] = (),
    processes: int = 1,
    real: bool = False,
) -> Request:
    """A request with shuffled pages on the last dp rank of either side, chunks ending at `cuts`."""
    rng = np.random.default_rng(seed)
    rows = length - 1

    def side(layout: CacheLayout, spare: int) -> Side:
        need = -(-rows // layout.page_size)
        pool = need + spare
        return Side(layout, layout.dp - 1, pool, rng.permutation(pool)[:need], real)

    bounds = sorted({0, rows, *(cut % (rows + 1) for cut in cuts)})
    return Request(side(source, 2), side(destination, 3), length, seed, bounds, processes)
