"""Server-sent events, and work that ends when the client leaves."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from jaxdisagg.api import RequestError
from jaxdisagg.http.errors import error_object

DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""


def event(document: Mapping[str, Any]) -> bytes:
    """One server-sent event with a JSON document; encoded JSON has no line breaks."""
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


class Attendant:
    """Runs the work of requests, and ends it early when the client leaves or the server stops."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[Any]] = set()
        self._stopping = False

    async def run[T](self, receive: Receive, work: Awaitable[T]) -> T:
        """Await `work`, but cancel it if the client disconnects or the server stops first.

        The request's body must have been read. Raises ClientGone or RequestError (503) then.
        Returns after `work` has ended.
        """
        task = asyncio.ensure_future(work)
        watch = asyncio.create_task(_disconnected(receive))
        self._tasks.add(task)
        if self._stopping:
            task.cancel()
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone
            if task.cancelled():
                raise RequestError(503, "the server is stopping", code="stopping")
            return task.result()
        finally:
            self._tasks.discard(task)
            task.cancel()
            watch.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    def stop(self) -> None:
        """End what runs now and what is started later with an error."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()


class ByteStream(StreamingResponse):
    """A response made of the parts that an async generator yields, sent as they come.

    The generator must have been started, so that closing it runs its `finally` blocks: `first` is
    what it has yielded. It is closed before the response ends, whether it is exhausted, the client
    left, the server stops, or sending failed. Where the server stops,
    `last_words` turns the error into a last part; without it the connection is cut.
    """

    def __init__(
        self,
        attendant: Attendant,
        first: bytes,
        parts: AsyncGenerator[bytes],
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        media_type: str | None = None,
        last_words: Callable[[RequestError], bytes] | None = None,
    ) -> None:
        super().__init__(parts, status, headers, media_type)
        self._attendant = attendant
        self._first = first
        self._parts = parts
        self._last_words = last_words

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the parts until they end or the client leaves."""
        async with aclosing(self._parts):
            try:
                await self._attendant.run(receive, self._deliver(send))
            except ClientGone:
                return
            except RequestError as error:
                if self._last_words is None:
                    raise
                await send(_body(self._last_words(error), more=False))

    async def _deliver(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        await send(_body(self._first, more=True))
        async for part in self._parts:
            await send(_body(part, more=True))
        await send(_body(b"", more=False))


async def event_stream(attendant: Attendant, events: AsyncGenerator[bytes]) -> ByteStream:
    """The response of an SSE generator, not started yet, whose first event does not wait."""
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return ByteStream(
        attendant,
        await anext(events),
        events,
        headers=headers,
        media_type="text/event-stream",
        last_words=lambda error: event(error_object(error)),
    )


def _body(part: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": part, "more_body": more}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
