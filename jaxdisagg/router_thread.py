"""The router of a deployment, beside whatever else its process does."""

import asyncio
import threading
from typing import Any

from jaxdisagg.router import create_router_app
from jaxdisagg.server import HttpServer, bind

STOP_SECONDS = 10.0


class RouterThread:
    """The router, in an event loop on a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="router", daemon=True)
        self._server: HttpServer | None = None

    def start(self, host: str, port: int) -> str:
        """Serve; returns the URL. Raises ValueError if the port cannot be had."""
        listener = bind(host, port)
        self._thread.start()
        self._server = self._run(self._serve(listener))
        host, port = self._server.address
        return f"http://{host}:{port}"

    async def _serve(self, listener: Any) -> HttpServer:
        server = HttpServer(create_router_app(), listener)
        await server.start()
        return server

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(STOP_SECONDS)

    def stop(self) -> None:
        """Stop serving and end the thread; without effect the second time."""
        if self._server is not None:
            self._run(self._server.stop())
            self._server = None
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_SECONDS)
        if not self._loop.is_running() and not self._loop.is_closed():
            self._loop.close()
