"""A scripted engine, and apps over it: in the test's own event loop or on a real socket."""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from jaxdisagg.api import EngineInfo, GenerationRequest, RequestTiming, TokenOutput
from jaxdisagg.server import HttpServer, bind, create_app

DEADLINE_S = 60.0
TIMING = RequestTiming(
    queue=0.01,
    prefill=0.02,
    exposed_transfer=0.03,
    first_decode=0.04,
    ttft=0.1,
    prefill_node="p0",
    pages=3,
    page_writes=12,
    bytes=4096,
)

Step = int | TokenOutput | Exception


@dataclass
class FakeEngine:
    """Plays `script` for each request: tokens, outputs or errors; then `length`.

    With `gate`, it waits for one `release()` before each step. Records the requests it got,
    those that were closed before their end, and those that were said to be `finished` before it.
    Timings are unknown the first `timing_unknown` times that one is asked for.
    """

    script: Sequence[Step] = tuple(b"hi")
    scripts: dict[tuple[int, ...], Sequence[Step]] = field(default_factory=dict)
    gate: bool = False
    missing: str | None = None
    info: EngineInfo = field(default_factory=lambda: EngineInfo("tiny", 262, 100, 5, "decode"))
    requests: list[GenerationRequest] = field(default_factory=list)
    generators: list[AsyncGenerator[TokenOutput]] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)
    timing_unknown: int = 0
    permits: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenOutput]:
        # Kept, so that only an explicit close can end it, never the garbage collector.
        self.generators.append(self._generate(request))
        return self.generators[-1]

    async def _generate(self, request: GenerationRequest) -> AsyncGenerator[TokenOutput]:
        self.requests.append(request)
        self._notify()
        finished = False
        try:
            script = list(self.scripts.get(request.prompt, self.script))[: request.max_tokens]
            for i, step in enumerate(script):
                if self.gate:
                    await self.permits.acquire()
                await asyncio.sleep(0)
                if isinstance(step, Exception):
                    finished = True
                    raise step
                last = i == len(script) - 1
                output = step if isinstance(step, TokenOutput) else TokenOutput(step)
                if last and output.finish_reason is None:
                    output = TokenOutput(output.token, output.logprob, output.top, "length")
                finished = output.finish_reason is not None
                yield output
        finally:
            well = finished or request.id in self.finished
            (self.ended if well else self.cancelled).add(request.id)
            self._notify()

    def release(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.permits.release()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition on what is recorded; fails at the deadline."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def _notify(self) -> None:
        self.changed.set()

    def finish(self, request_id: str) -> None:
        self.finished.add(request_id)

    def timing(self, request_id: str) -> RequestTiming | None:
        if self.timing_unknown > 0:
            self.timing_unknown -= 1
            return None
        return TIMING if any(r.id == request_id for r in self.requests) else None

    def ready(self) -> tuple[bool, str]:
        return self.missing is None, self.missing or ""

    def state(self) -> Mapping[str, Any]:
        return {"pages": {"free": 7, "leased": 1}, "peers": [{"id": "p0"}], "role": "decode"}


@pytest.fixture
def make_engine() -> type[FakeEngine]:
    return FakeEngine


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def client(engine, tiny_tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app over `engine`, without a socket."""
    transport = httpx.ASGITransport(create_app(engine, tiny_tokenizer))
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        yield client


@asynccontextmanager
async def served(app: Any, listener: socket.socket | None = None) -> AsyncIterator[str]:
    """Serve an app on a free loopback port, unless a listener is given, and give its URL."""
    server = HttpServer(app, listener or bind("127.0.0.1", 0))
    async with asyncio.timeout(DEADLINE_S):
        await server.start()
    try:
        yield "http://{}:{}".format(*server.address)
    finally:
        async with asyncio.timeout(DEADLINE_S):
            await server.stop()


@pytest.fixture
def serve() -> Callable[[Any], Any]:
    """`async with serve(app) as url`."""
    return served


@pytest.fixture
def node(engine, tiny_tokenizer) -> SimpleNamespace:
    """The engine and the app over it, to be served on a socket."""
    return SimpleNamespace(engine=engine, app=create_app(engine, tiny_tokenizer))


@pytest.fixture
def eventually() -> Callable[[Callable[[], object]], Any]:
    """`await eventually(condition)` polls; fails at the deadline."""

    async def wait(condition: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    return wait
