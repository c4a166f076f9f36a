"""A load client for servers of the OpenAI API: when requests start, and when their tokens came.

A segment is one stretch of load against one server: requests that arrive by a schedule, and
`streams` that decode all the time beside them, whose gaps show what the requests disturb.
"""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import httpx
import msgspec

TTFT_TERMS = ("queue", "prefill", "exposed_transfer", "first_decode")


@dataclass(frozen=True)
class Load:
    """The load of one segment; lengths in tokens, `rate` in requests/s (0: all at once).

    Bounded by `requests` and by `duration_s`, whichever ends first; a segment with streams lasts
    `duration_s`. Prompts are random token ids below `vocab_size`; equal seeds give equal loads.
    Raises ValueError naming the field that cannot be.
    """

    requests: int = 32
    duration_s: float = 30.0
    rate: float = 1.0
    arrivals: Literal["poisson", "fixed"] = "poisson"
    concurrency: int = 64
    prompt_tokens: int = 256
    output_tokens: int = 64
    streams: int = 0
    stream_prompt_tokens: int = 16
    stream_output_tokens: int = 256
    vocab_size: int = 256
    seed: int = 0
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        for name in ("requests", "rate", "streams"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        lengths = ("prompt_tokens", "output_tokens", "stream_prompt_tokens", "stream_output_tokens")
        for name in (*lengths, "duration_s", "concurrency", "vocab_size", "timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if self.requests == 0 and self.streams == 0:
            raise ValueError("requests=0 and streams=0 leave nothing to do")

    def start_times(self) -> list[float]:
        """When each request starts, in seconds from the segment's start."""
        times, now = [], 0.0
        generator = random.Random(self.seed)
        while len(times) < self.requests and now < self.duration_s:
            times.append(now)
            if self.rate > 0:
                fixed = self.arrivals == "fixed"
                now += 1 / self.rate if fixed else generator.expovariate(self.rate)
        return times

    def prompt(self, kind: str, number: int, tokens: int) -> list[int]:
        """A prompt of its own for each request and stream."""
        generator = random.Random(f"{self.seed} {kind} {number}")
        return [generator.randrange(self.vocab_size) for _ in range(tokens)]


@dataclass
class Record:
    """One request: seconds from sending it to each token, or the error that ended it."""

    sent: float
    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0
    timing: dict[str, Any] | None = None
    error: str | None = None

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [b - a for a, b in pairwise(self.arrivals)]


@dataclass
class Segment:
    """What a segment measured: requests, streams, and how long it took, in seconds."""

    requests: list[Record] = field(default_factory=list)
    streams: list[Record] = field(default_factory=list)
    seconds: float = 0.0


async def complete(
    client: httpx.AsyncClient, prompt: list[int], output_tokens: int, timeout_s: float
) -> Record:
    """Stream one greedy completion of exactly `output_tokens`; failures are in the record."""
    body = {
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    record = Record(sent=time.perf_counter())
    try:
        async with (
            asyncio.timeout(timeout_s),
            client.stream(
                "POST", "/v1/completions", json=body, headers={"x-jaxdisagg-timing": "1"}
            ) as response,
        ):
            if response.status_code != 200:
                record.error = _message(await response.aread(), response.status_code)
                return record
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    _take(record, msgspec.json.decode(line[6:]))
        if record.error is None and record.tokens != output_tokens:
            record.error = f"the stream ended after {len(record.arrivals)} tokens"
    except TimeoutError:
        record.error = f"no end within {timeout_s:g} s"
    except (httpx.HTTPError, msgspec.MsgspecError) as error:
        record.error = str(error) or type(error).__name__
    return record


async def run_segment(
    client: httpx.AsyncClient, load: Load, on_done: Callable[[], None] = lambda: None
) -> Segment:
    """Put a load on a server until all its requests have ended; `on_done` is called after each."""
    segment = Segment()
    places = asyncio.Semaphore(load.concurrency)
    begin = time.perf_counter()

    async def request(number: int, start: float) -> None:
        await asyncio.sleep(max(0.0, begin + start - time.perf_counter()))
        async with places:
            prompt = load.prompt("request", number, load.prompt_tokens)
            record = await complete(client, prompt, load.output_tokens, load.timeout_s)
        segment.requests.append(record)
        on_done()

    async def stream(number: int) -> None:
        # One answer after another; what runs at the end is finished, so that it is whole.
        while time.perf_counter() - begin < load.duration_s:
            prompt = load.prompt("stream", number, load.stream_prompt_tokens)
            record = await complete(client, prompt, load.stream_output_tokens, load.timeout_s)
            segment.streams.append(record)
            if record.error is not None:
                return

    async with asyncio.TaskGroup() as group:
        for number in range(load.streams):
            group.create_task(stream(number))
        for number, start in enumerate(load.start_times()):
            group.create_task(request(number, start))
    segment.seconds = time.perf_counter() - begin
    return segment


def _take(record: Record, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        record.error = str(chunk["error"].get("message"))
        return
    if chunk.get("usage"):
        record.tokens = chunk["usage"]["completion_tokens"]
    for choice in chunk.get("choices", ()):
        record.arrivals.append(time.perf_counter() - record.sent)
        record.timing = choice.get("timing") or record.timing


def _message(body: bytes, status: int) -> str:
    try:
        return f"{status}: {msgspec.json.decode(body)['error']['message']}"
    except (msgspec.MsgspecError, KeyError, TypeError):
        return f"{status}: {body[:200].decode(errors='replace')}"
