"""Reads what a node's registered memory holds, straight from its addresses, as a peer writes it.

A `PageTap` copies a request's pages and context at the one moment at which they are settled: on a
decode node when the request became READY, before any step of its own touched them; on a prefill
node when its last write was acknowledged, before the pages are free. Attention has no part in it.
"""

import ctypes
import threading
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdisagg.cache import PagedCache
from jaxdisagg.decode_node import DecodeNode
from jaxdisagg.page_pool import Lease, PagePool

POISON = -77.0  # no sentinel is negative


@dataclass(frozen=True)
class Taken:
    """One request's memory on the devices of its dp rank.

    `pages` are all that it leases, `fresh` (bool) those that no request held before since `poison`;
    `rows` [tp, layers, heads, planes, tokens, values] what they hold, in the order of the tokens;
    `contexts` [tp, hidden size].
    """

    request: str
    attempt: str
    dp_rank: int
    pages: np.ndarray
    fresh: np.ndarray
    length: int
    rows: np.ndarray
    contexts: np.ndarray

    def checksums(self) -> list[list[list[int]]]:
        """[tp][layer][head]: CRC-32 of the prefilled rows, whatever the size of the pages."""
        known = np.ascontiguousarray(self.rows[..., : self.length - 1, :])
        return [[[zlib.crc32(h.tobytes()) for h in layer] for layer in rank] for rank in known]

    def context_checksums(self) -> list[int]:
        """Of each tp rank's context row."""
        return [zlib.crc32(row.tobytes()) for row in self.contexts]


def memory_of(cache: PagedCache) -> dict[tuple[int, int], np.ndarray]:
    """(rank, layer) -> what this process's devices hold, writable, a page or context row a row.

    [pages, heads, planes, page size, values], and after the last layer [rows, hidden size].
    """
    spec, found = cache.spec, {}
    planes = 2 if spec.kind == "gqa" else 1
    for shard in cache.shards():
        raw = (ctypes.c_char * shard.nbytes).from_address(shard.address)
        flat = np.frombuffer(raw, jnp.dtype(spec.dtype))
        shape = (cache.pages, -1, planes, cache.page_size, spec.head_dim)
        if shard.layer == len(cache.layers):
            shape = (cache.context_rows, -1)
        found[shard.rank, shard.layer] = flat.reshape(shape)
    return found


def rows_of(view: np.ndarray, pages: np.ndarray) -> np.ndarray:
    """[heads, planes, tokens, values] of some pages of a layer."""
    found = np.moveaxis(view[pages], 0, 2)
    return found.reshape(*found.shape[:2], -1, found.shape[-1])


class PageTap:
    """Attach it to a node that runs; `node.runner`, `node.pools` and its loop are used."""

    def __init__(self, node: Any) -> None:
        self._node = node
        self._cache: PagedCache = node.runner.cache
        self._tp = self._cache.mesh.size // node.runner.dp
        self._views = memory_of(self._cache)
        self._changed = threading.Condition()
        self._taken: dict[str, Taken] = {}
        self._held: dict[str, Taken] = {}  # of a decode node: by request, until its pages go back
        self._hurt: list[str] = []
        self._lent: list[Counter[int]] = [Counter() for _ in node.pools]
        for pool, lent in zip(node.pools, self._lent, strict=True):
            self._tap_pool(pool, lent)
        if isinstance(node, DecodeNode):
            self._tap_decode(node)
        else:
            self._tap_prefill(node)

    @staticmethod
    def _tap_pool(pool: PagePool, lent: Counter[int]) -> None:
        """Count how often each page is leased."""
        original = pool.lease

        def lease(n: int) -> Lease | None:
            taken = original(n)
            if taken is not None:
                lent.update(taken.pages.tolist())
            return taken

        pool.lease = lease

    def _tap_decode(self, node: DecodeNode) -> None:
        original = node.prefilled

        def prefilled(active: Any, now: float) -> None:
            if active.prompt_length > 1:
                attempt = node.prefiller._attempts.of_request(active)
                self._take(
                    active.id,
                    attempt.id,
                    active.rank,
                    active.lease.pages,
                    active.prompt_length,
                    active.context,
                )
            original(active, now)

        node.prefilled = prefilled
        release = node._release

        def checked_release(active: Any) -> None:
            taken = self._held.pop(active.id, None)
            if taken is not None:
                self._compare(taken)
            release(active)

        node._release = checked_release

    def _compare(self, taken: Taken) -> None:
        """Note it if the prompt's rows are no longer what they were when the request was ready."""
        self._settle()
        now = self._read(taken.dp_rank, taken.pages)
        known = slice(taken.length - 1)
        if not np.array_equal(now[..., known, :], taken.rows[..., known, :]):
            self._hurt.append(f"pages of {taken.request}, after it was ready")

    def _tap_prefill(self, node: Any) -> None:
        original = node.transfer_ended

        def transfer_ended(request: Any, *how: Any) -> None:
            self._take(
                request.id,
                request.id,
                request.rank,
                request.lease.pages,
                request.message.prompt_length,
                request.context,
            )
            original(request, *how)

        node.transfer_ended = transfer_ended

    def _settle(self) -> None:
        """Wait for the steps in flight; they write through the same memory."""
        jax.block_until_ready((self._cache.layers, self._cache.context))

    def _take(
        self, request: str, attempt: str, rank: int, pages: np.ndarray, length: int, context: int
    ) -> None:
        self._settle()
        fresh = np.array([self._lent[rank][page] == 1 for page in pages.tolist()])
        contexts = np.stack(
            [self._views[r, len(self._cache.layers)][context] for r in self._ranks(rank)]
        )
        rows = self._read(rank, pages)
        taken = Taken(request, attempt, rank, pages.copy(), fresh, length, rows, contexts)
        if isinstance(self._node, DecodeNode):
            self._held[request] = taken
        with self._changed:
            self._taken[attempt] = taken
            self._changed.notify_all()

    def _ranks(self, dp_rank: int) -> range:
        return range(dp_rank * self._tp, (dp_rank + 1) * self._tp)

    def _read(self, dp_rank: int, pages: np.ndarray) -> np.ndarray:
        """A copy [tp, layers, heads, planes, tokens, values]."""
        layers = range(len(self._cache.layers))
        return np.array(
            [[rows_of(self._views[r, n], pages) for n in layers] for r in self._ranks(dp_rank)]
        )

    def wait(self, attempts: list[str], seconds: float) -> list[Taken]:
        """The copies of these attempts, which are forgotten; TimeoutError names what is missing."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._taken.keys() >= set(attempts), seconds):
                missing = sorted(set(attempts) - self._taken.keys())
                raise TimeoutError(f"not over within {seconds} s: {', '.join(missing)}")
            return [self._taken.pop(attempt) for attempt in attempts]

    def attempts(self) -> list[str]:
        """Those of the copies that nobody has asked for, in the order in which they were taken."""
        with self._changed:
            return list(self._taken)

    def poison(self, seconds: float) -> None:
        """Fill every page and context row of the idle node; what was lent or taken is forgotten."""

        def fill() -> None:
            self._settle()
            for view in self._views.values():
                view[:] = POISON
            for lent in self._lent:
                lent.clear()
            self._hurt.clear()
            with self._changed:
                self._taken.clear()

        self._on_loop(fill, seconds)

    def strays(self, seconds: float) -> list[str]:
        """Where memory changed since `poison` and should not have; the node must be idle.

        That is in pages that no request held (but page 0, which takes the writes of padding rows),
        and in the prompts' rows of a request that was ready.
        """
        found: list[str] = []

        def look() -> None:
            self._settle()
            found.extend(self._hurt)
            for (device, layer), view in self._views.items():
                if layer == len(self._cache.layers):
                    continue
                changed = (view != POISON).any(axis=tuple(range(1, view.ndim)))
                pages = set(np.flatnonzero(changed).tolist()) - {0}
                for page in sorted(pages - self._lent[device // self._tp].keys()):
                    found.append(f"device {device} layer {layer} page {page}")

        self._on_loop(look, seconds)
        return found

    def _on_loop(self, call: Callable[[], None], seconds: float) -> None:
        done = threading.Event()

        def run() -> None:
            call()
            done.set()

        self._node.post(run)
        if not done.wait(seconds):
            raise TimeoutError(f"the loop of the node did not answer within {seconds} s")
