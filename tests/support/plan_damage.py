"""Prefill nodes that send pages to wrong places, each in a way that leaves every count right.

What no counter can see is what a byte oracle is for; these show that it sees it. And nodes that
send late.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from ffi_transport.engine import TransferEngine
from jaxdisagg.runner import ModelRunner

Writes = list[Any]  # of ffi_transport.types.PlanWrite, the page writes of one step


def swapped_heads(writes: Writes) -> Writes:
    """The first two units that read different parts of a shard read each other's."""
    first = writes[0].unit.source_offset
    other = next(w.unit.source_offset for w in writes if w.unit.source_offset != first)
    exchange = {first: other, other: first}

    def swap(write: Any) -> Any:
        offset = write.unit.source_offset
        unit = replace(write.unit, source_offset=exchange.get(offset, offset))
        return replace(write, unit=unit)

    return [swap(w) for w in writes]


def swapped_ranks(writes: Writes) -> Writes:
    """The first two destination ranks get each other's pages."""
    first = writes[0].remotes
    other = next(w.remotes for w in writes if w.remotes != first)
    exchange = {first: other, other: first}
    return [replace(w, remotes=exchange.get(w.remotes, w.remotes)) for w in writes]


def swapped_pages(writes: Writes) -> Writes:
    """The first two pages of a step lie in each other's place."""
    return _with_pages(writes, lambda pages: pages[[1, 0, *range(2, len(pages))]])


def doubled_page(writes: Writes) -> Writes:
    """The first page comes twice, the second never."""
    return _with_pages(writes, lambda pages: pages[[0, 0, *range(2, len(pages))]])


def strayed_page(writes: Writes) -> Writes:
    """The second page goes to the last one of the decode node, which nobody holds."""
    first = writes[0]
    last = first.remotes[0].length // first.unit.destination_page_bytes - 1
    return _with_pages(writes, lambda pages: np.where(np.arange(len(pages)) == 1, last, pages))


def swapped_layers(writes: Writes) -> Writes:
    """The first two layers lie in each other's place."""
    return [replace(w, remotes=(w.remotes[1], w.remotes[0], *w.remotes[2:])) for w in writes]


def _with_pages(writes: Writes, arrange: Callable[[np.ndarray], np.ndarray]) -> Writes:
    def arranged(write: Any) -> Any:
        pages = write.destination_pages
        changed = arrange(pages).astype(pages.dtype) if len(pages) > 1 else pages
        return replace(write, destination_pages=changed)

    return [arranged(w) for w in writes]


DAMAGES = {
    f.__name__: f
    for f in (
        swapped_heads,
        swapped_ranks,
        swapped_pages,
        doubled_page,
        strayed_page,
        swapped_layers,
    )
}


@contextmanager
def damaged(engine: TransferEngine, name: str) -> Iterator[None]:
    """Let a prefill node's plans be changed by one of DAMAGES; contexts are sent as they were."""
    original, damage = engine.add_plan, DAMAGES[name]

    def add_plan(step: int, ordinals: Any, layers: int, writes: Writes, **how: Any) -> None:
        pages = [w for w in writes if w.first_layer == 0]
        others = [w for w in writes if w.first_layer != 0]
        original(step, ordinals, layers, (damage(pages) if pages else []) + others, **how)

    engine.add_plan = add_plan
    try:
        yield
    finally:
        engine.add_plan = original


def slow_down(runner: ModelRunner, seconds: float) -> None:
    """Let each prefill step wait between the filing of its plan and its dispatch, from now on."""
    dispatch = type(runner).prefill.__get__(runner)

    def prefill(*how: Any) -> Any:
        time.sleep(seconds)
        return dispatch(*how)

    runner.prefill = prefill
