"""What a request would move between two meshes, and how long: a row of the sweep."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxdisagg.config import MAX_NICS, NodeConfig
from jaxdisagg.config_text import parse_node
from jaxdisagg.model_fit import ModelFit, fit_config
from jaxdisagg.sweep.compute import Device, LayerWork, layer_work
from jaxdisagg.sweep.nics import NicLoad, imbalance, nic_load
from jaxdisagg.sweep.overlap import Stage, overlap
from jaxdisagg.sweep.shapes import ModelShapes
from jaxdisagg.sweep.words import mapping
from jaxdisagg.transfer_plan import Traffic, TransferPlan, plan, traffic

MAX_STEPS = 4096  # of a prompt: each is gone through, layer by layer
MAX_SEEDS = 1 << 16  # a plan is made for each


@dataclass(frozen=True)
class Question:
    """What to ask of every pair of meshes.

    `nics` of a prefill and of a decode device; `nic_gbps` each NIC's speeds to try, 10^9 bits/s;
    `chunk` tokens per prefill step, 0 being the whole prompt; `seeds` requests to average over.
    Raises ValueError naming the field.
    """

    device: Device
    nics: tuple[int, int] = (1, 1)
    nic_gbps: tuple[float, ...] = (400.0,)
    chunk: int = 0
    seeds: int = 64

    def __post_init__(self) -> None:
        if len(self.nics) != 2 or min(self.nics) < 1:
            raise ValueError(f"nics_per_device: {self.nics}, must be at least 1 on both sides")
        if max(self.nics) > MAX_NICS:
            raise ValueError(f"nics_per_device: {max(self.nics)}, must be at most {MAX_NICS}")
        if not self.nic_gbps or not all(0 < speed < float("inf") for speed in self.nic_gbps):
            raise ValueError(f"nic_gbps: {self.nic_gbps}, must be above 0")
        if self.chunk < 0:
            raise ValueError(f"chunk: {self.chunk}, must not be negative")
        if self.seeds < 1:
            raise ValueError(f"seeds: {self.seeds}, must be at least 1")
        if self.seeds > MAX_SEEDS:
            raise ValueError(f"seeds: {self.seeds}, must be at most {MAX_SEEDS}")

    def assumptions(self) -> str:
        """What the estimates assume, in a line."""
        source, destination = self.nics
        step = f"steps of {self.chunk:,} tokens" if self.chunk else "one step"
        device = self.device
        return (
            f"assumed: {device.tflops:g} TFLOPS a device, {device.mfu:.0%} of it reached; "
            f"{source} NIC{'s' * (source > 1)} a prefill device, {destination} a decode device; "
            f"a prompt in {step}"
        )


@dataclass(frozen=True)
class Load:
    """The requests of a pair: `requests` prompts of each of `tokens` lengths.

    Raises ValueError naming the field.
    """

    tokens: tuple[int, ...]
    requests: int

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ValueError(f"requests: {self.requests}, must be at least 1")


@dataclass(frozen=True)
class Side:
    """One mesh as the user wrote it, its node, and the model on it."""

    text: str
    node: NodeConfig
    fit: ModelFit


def fit_side(text: str, base: NodeConfig, shapes: ModelShapes) -> Side:
    """The side that `text` (`tp=4,dp=2,page_size=64`) describes, `base` filling in the rest.

    Raises ValueError, naming the field, for a mesh that cannot be or does not fit the model.
    """
    node = parse_node(text, replace(base, dtype=shapes.config.dtype, mtp=shapes.config.mtp))
    return Side(text, node, fit_config(node, shapes.family, shapes.config))


def check_tokens(tokens: Sequence[int], shapes: ModelShapes) -> None:
    """Raise ValueError for a prompt length that has no transfer, or that the model cannot take."""
    for length in tokens:
        if not 2 <= length <= shapes.config.max_position:
            raise ValueError(
                f"tokens: {length}, must be 2 to {shapes.config.max_position} "
                f"(max_position_embeddings of {shapes.name}; one token alone moves nothing)"
            )


def context_bytes(side: Side) -> int:
    """Bytes of the context: one hidden state."""
    return side.fit.config.hidden_size * side.fit.layout.itemsize


def request_traffic(prefill: Side, decode: Side, tokens: int, seed: int) -> Traffic:
    """What one request moves, the context included, by rank pair."""
    planned = plan(prefill.fit.layout, decode.fit.layout, seed)
    return traffic(planned, tokens, context_bytes=context_bytes(prefill))


def predict(prefill: Side, decode: Side, tokens: int, question: Question) -> dict[str, Any]:
    """The row of a pair for prompts of `tokens` tokens; docs/mesh-experiments.md has its keys.

    Raises ValueError, naming the field, for meshes that cannot be mapped.
    """
    if question.chunk and tokens > question.chunk * MAX_STEPS:
        raise ValueError(
            f"chunk: {question.chunk} makes more than {MAX_STEPS} steps of {tokens} tokens"
        )
    source, destination = prefill.fit.layout, decode.fit.layout
    context = context_bytes(prefill)
    loads: list[NicLoad] = []
    for seed in range(question.seeds):
        planned = plan(source, destination, seed)
        pages = traffic(planned, tokens, context_bytes=None)
        whole = traffic(planned, tokens, context_bytes=context)
        loads.append(nic_load(pages, whole, source.layers, question.nics))
    first = plan(source, destination, 0)
    moved = traffic(first, tokens, context_bytes=context)
    lengths = [unit.length for unit in first.units]
    return {
        "prefill": prefill.text,
        "decode": decode.text,
        "tokens": tokens,
        "dtype": prefill.fit.config.dtype,
        "prefill_cache_bytes_per_token": source.token_bytes,
        "decode_cache_bytes_per_token": destination.token_bytes,
        "page_writes": int(moved.units.sum()),
        "bytes": int(moved.bytes.sum()),
        "unit_bytes": [min(lengths), max(lengths)],
        "nics_per_device": list(question.nics),
        **_balance("prefill", [load.source for load in loads]),
        **_balance("decode", [load.destination for load in loads]),
        "mapping": mapping(first),
        "times": _times(prefill, first, tokens, question, loads[0]),
    }


def _balance(side: str, loads: list[np.ndarray]) -> dict[str, Any]:
    """Of one side's NICs: the busiest in any request, and max over mean in two senses."""
    requests = [load.sum(axis=0) for load in loads]
    return {
        f"{side}_nic_bytes": round(max(float(load.max()) for load in requests)),
        f"{side}_imbalance": float(np.mean([imbalance(load) for load in requests])),
        f"{side}_imbalance_all": imbalance(np.sum(requests, axis=0)),
    }


def _times(
    prefill: Side, planned: TransferPlan, tokens: int, question: Question, load: NicLoad
) -> list[dict[str, Any]]:
    """An estimate for each NIC speed, of any seed: the busiest NIC is as busy with each."""
    works = layer_work(prefill.fit)
    stages = _stages(works, _chunks(planned, tokens, question.chunk), question.device, load)
    found = []
    for gbps in question.nic_gbps:
        run = overlap(stages, load.both[-1], gbps)
        found.append(
            {
                "nic_gbps": gbps,
                "layer_compute_ms": run.compute / len(works) * 1e3,
                "layer_transfer_ms": run.wire / len(works) * 1e3,
                "compute_ms": run.compute * 1e3,
                "transfer_ms": run.wire * 1e3,
                "hidden": run.hidden,
                "tail_ms": run.tail * 1e3,
            }
        )
    return found


def _chunks(planned: TransferPlan, tokens: int, size: int) -> Iterator[tuple[int, int, float]]:
    """(first token, end, its part of a layer's bytes) of each prefill step; size 0: one step."""
    total = tokens - 1

    def completed(begin: int, end: int) -> int:
        spans = planned.spans
        return sum(
            unit.length * len(spans.completed(spans.spans[unit.span], begin, end, total))
            for unit in planned.units
        )

    whole = completed(0, total)
    for begin in range(0, total, size or total):
        end = min(begin + (size or total), total)
        yield begin, end, completed(begin, end) / whole


def _stages(
    works: Sequence[LayerWork],
    chunks: Iterator[tuple[int, int, float]],
    device: Device,
    load: NicLoad,
) -> list[Stage]:
    """Every layer of every chunk, one after the other."""
    layers = load.both
    return [
        Stage(
            device.seconds(work.before_pages(begin, end)),
            device.seconds(work.after_pages(begin, end)),
            layers[number] * part,
        )
        for begin, end, part in chunks
        for number, work in enumerate(works)
    ]
