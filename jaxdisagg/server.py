"""The HTTP server of a decode or mixed node: the app over an engine, and running it."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Generator, Mapping
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import Lifespan

from jaxdisagg.api import Engine
from jaxdisagg.http.errors import install_handlers
from jaxdisagg.http.routes import Frontend, make_routes
from jaxdisagg.http.status import make_status_routes
from jaxdisagg.http.streaming import Attendant
from jaxdisagg.metrics import ServerMetrics, StateMetrics
from jaxdisagg.tokenizer import Tokenizer

DEFAULT_CHAT_TOKENS = 1024
FORCED_STOP_S = 5
KEEP_ALIVE_S = 10


def create_app(
    engine: Engine, tokenizer: Tokenizer, *, default_max_tokens: int = DEFAULT_CHAT_TOKENS
) -> FastAPI:
    """The OpenAI-compatible app of an engine that runs in the same event loop.

    `default_max_tokens` bounds the answers of chats that do not say how long they may be: pages
    are leased for all of it.
    """

    def about() -> dict[str, str]:
        return {"role": engine.info.role, "model": engine.info.model}

    app = bare_app()
    metrics = ServerMetrics(engine.state)
    front = Frontend(engine, tokenizer, metrics, app.state.attendant, default_max_tokens)
    app.include_router(make_routes(front))
    app.include_router(make_status_routes(engine.ready, metrics, about, engine.state))
    return app


def create_status_app(
    state: Callable[[], Mapping[str, Any]], ready: Callable[[], tuple[bool, str]]
) -> FastAPI:
    """The app of a node that serves no requests over HTTP: /health, /metrics, /debug/state.

    `state` and `ready` are as in api.Engine.
    """
    app = bare_app()
    app.include_router(make_status_routes(ready, StateMetrics(state), state=state))
    return app


def bare_app(lifespan: Lifespan[FastAPI] | None = None) -> FastAPI:
    """An app without endpoints: OpenAI's error objects, and an Attendant in its state."""
    app = FastAPI(
        title="jaxdisagg", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan
    )
    app.state.attendant = Attendant()
    install_handlers(app)
    return app


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 picks a free one. Raises ValueError naming what failed."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        reason = "it is in use" if error.errno == 98 else error.strerror or str(error)
        raise ValueError(f"cannot listen on {host} port {port}: {reason}") from error


class HttpServer:
    """An app served from a task of the running event loop; signals are left to the caller.

    The app must have an Attendant in `app.state.attendant`.
    """

    def __init__(self, app: FastAPI, listener: socket.socket) -> None:
        self._listener = listener
        self._attendant: Attendant = app.state.attendant
        self._task: asyncio.Task[None] | None = None
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="on",
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=FORCED_STOP_S,
        )
        self._server = _Server(config)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that the server listens on."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    async def start(self) -> None:
        """Start to accept connections; returns once they are accepted."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not self._server.started:
            if self._task.done():
                await self._task
                raise RuntimeError("the HTTP server ended while it started")
            await asyncio.sleep(0.005)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Accept nothing new; what still runs after `grace_s` seconds ends with an error."""
        self._server.stop()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=grace_s)
            self._attendant.stop()
            await self._task
        self._listener.close()


class _Server(uvicorn.Server):
    """uvicorn with one wake-up a second, for the Date header, instead of ten."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._told_to_stop = asyncio.Event()

    def stop(self) -> None:
        """Let `serve` come to its end."""
        self.should_exit = True
        self._told_to_stop.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._told_to_stop.wait(), 1.0)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield
