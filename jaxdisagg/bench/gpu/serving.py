"""Prefill and decode apart and in one process, all on the same device: tokens, counts, times.

`python -m jaxdisagg.bench.gpu.serving MODEL --dtype D [--words W] [--chunks C] [--lengths L]`. The
three nodes share the machine's first GPU; the decode node is asked, then the mixed one.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from jaxdisagg.bench.gpu.rows import Row, take_stdout
from jaxdisagg.config import BatchConfig, CacheConfig, NodeConfig, ServeConfig
from jaxdisagg.config_text import parse_node, parse_numbers
from jaxdisagg.deployment import Deployment, NodeProcess

ANSWER_SECONDS = 60.0
NOT_AMONG_THEM = 99.0  # in place of infinity, which JSON has not
LOGPROB_LIMIT = 0.5  # in bfloat16, of tokens that both chose: what rounding may make of it


@dataclass
class Answer:
    """A streamed answer: token texts, their logprobs and those of the best, when they came (s)."""

    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[str, float]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    timing: dict[str, Any] = field(default_factory=dict)


def ask(url: str, prompt: list[int], max_tokens: int) -> Answer:
    """Greedy tokens for a prompt of token ids. Raises RuntimeError with what the server says."""
    body = {
        "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 5,
        "stream": True, "ignore_eos": True,
    }  # fmt: skip
    answer = Answer(times=[time.perf_counter()])
    with (
        httpx.Client(timeout=ANSWER_SECONDS) as client,
        client.stream(
            "POST", f"{url}/v1/completions", json=body, headers={"x-jaxdisagg-timing": "1"}
        ) as response,
    ):
        if response.status_code != 200:
            raise RuntimeError(response.read().decode(errors="replace"))
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            for choice in event["choices"]:
                found = choice.get("logprobs") or {}
                answer.tokens += found.get("tokens") or []
                answer.logprobs += found.get("token_logprobs") or []
                answer.top += found.get("top_logprobs") or []
                answer.times += [time.perf_counter()] * len(found.get("tokens") or [])
                answer.timing = choice.get("timing") or answer.timing
    return answer


def compare(apart: Answer, whole: Answer, dtype: str) -> Row:
    """How far two answers agree; `passed` in float32 if wholly.

    In bfloat16 two programs round differently, so that near ties may fall either way: there the
    tokens up to the first difference must have about the same logprobs, and so must, where they
    differ first, the token that each chose with the other.
    """
    pairs = zip(apart.tokens, whole.tokens, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    both = list(zip(apart.logprobs[:same], whole.logprobs[:same], strict=True))
    equal = apart.tokens == whole.tokens and len(apart.tokens) > 0
    for one, other in ((apart, whole), (whole, apart)):
        if same < len(one.tokens):
            there = other.top[same] if same < len(other.top) else {}
            both.append((one.logprobs[same], there.get(one.tokens[same], -math.inf)))
    gap = max((abs(a - b) for a, b in both), default=math.inf)
    return {
        "tokens": len(apart.tokens),
        "equal_tokens": same,
        "logprob_gap": min(gap, NOT_AMONG_THEM),
        "passed": equal if dtype == "float32" else gap < LOGPROB_LIMIT,
    }


def times_of(answer: Answer) -> Row:
    """TTFT and the median gap between tokens, in milliseconds."""
    start, *came = answer.times
    gaps = [b - a for a, b in pairwise(came)]
    return {
        "ttft_ms": (came[0] - start) * 1e3 if came else None,
        "itl_ms": statistics.median(gaps) * 1e3 if gaps else None,
    }


def config_of(model: Path, dtype: str, words: str, chunks: tuple[int, ...], longest: int,
              pages: int) -> ServeConfig:  # fmt: skip
    """A prefill, a decode and a mixed node of one model."""
    base = NodeConfig(
        role="mixed",
        model=model,
        dtype=dtype,
        cache=CacheConfig(page_size=16, pages=pages),
        batch=BatchConfig(chunks=chunks, decode_rows=(2,), max_model_len=longest),
    )
    nodes = [
        parse_node(words, replace(base, role=role, id=f"{role}-0"))
        for role in ("prefill", "decode", "mixed")
    ]
    return ServeConfig(nodes=tuple(nodes), port=0)


def state(url: str) -> dict[str, Any]:
    """A node's /debug/state."""
    return httpx.get(f"{url}/debug/state", timeout=10.0).json()


def tell_progress(nodes: list[NodeProcess]) -> None:
    """What the nodes do, on stderr: the last that is known of a start that does not end."""
    print(", ".join(f"{n.name}: {n.progress} {n.done}/{n.total}" for n in nodes), file=sys.stderr)


def serve(config: ServeConfig, lengths: tuple[int, ...], max_tokens: int) -> Iterator[Row]:
    """A row for each prompt length, and one of the counts of both sides."""
    rng = np.random.default_rng(0)
    first = config.nodes[0]
    base = {"model": first.model.name, "dtype": first.dtype}
    began = time.perf_counter()
    with Deployment(config, progress=tell_progress) as deployment:
        started = time.perf_counter() - began
        urls = {node.config.role: node.url for node in deployment.nodes}
        counted = 0
        for length in lengths:
            prompt = rng.integers(0, 256, length).tolist()
            apart, whole = (ask(urls[role], prompt, max_tokens) for role in ("decode", "mixed"))
            counted += apart.timing.get("page_writes", 0)
            yield (
                base
                | {"prompt_tokens": length}
                | compare(apart, whole, first.dtype)
                | {f"apart_{k}": v for k, v in times_of(apart).items()}
                | {f"whole_{k}": v for k, v in times_of(whole).items()}
                | {"timing": apart.timing}
            )
        prefilled, decoded = state(urls["prefill"]), state(urls["decode"])
        compiles = sum(state(url)["compiles_after_warm_up"] for url in urls.values())
        pushed = prefilled["page_writes"]
        yield (
            base
            | {
                "provider": decoded["fabric"]["provider"],
                "page_writes_pushed": pushed,
                "page_writes_counted": counted,
                "compiles_after_warm_up": compiles,
                "start_s": started,
                "gpu_memory": [node.config.gpu_memory for node in deployment.nodes],
                "prefill_fabric": prefilled["fabric"],
                "decode_fabric": decoded["fabric"],
                "passed": pushed == counted and counted > 0 and compiles == 0,
            }
        )


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--words", default="")
    parser.add_argument("--chunks", default="64")
    parser.add_argument("--lengths", default="2,15,17,49,200")
    parser.add_argument("--max-tokens", type=int, default=16)
    wanted = parser.parse_args()
    tell = take_stdout()
    lengths = parse_numbers(wanted.lengths, "lengths")
    longest = max(lengths) + wanted.max_tokens
    config = config_of(
        wanted.model, wanted.dtype, wanted.words, parse_numbers(wanted.chunks, "chunks"), longest,
        4 * -(-longest // 16) + 1,
    )  # fmt: skip
    for row in serve(config, lengths, wanted.max_tokens):
        tell(row)


if __name__ == "__main__":
    main()
