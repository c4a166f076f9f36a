"""The way of a request's tokens from the step loop's thread to the HTTP server's event loop."""

import asyncio
from collections.abc import AsyncIterator

from jaxdisagg.api import RequestError, TokenOutput


class TokenStream:
    """Outputs of one request, in order, ending with a finish reason or an error.

    `deliver` and `fail` are for any thread; iterating is for the event loop that made it.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[TokenOutput | RequestError] = asyncio.Queue()

    def deliver(self, output: TokenOutput) -> None:
        """Hand over one output."""
        self._put(output)

    def fail(self, error: RequestError) -> None:
        """End the stream with an error."""
        self._put(error)

    def _put(self, item: TokenOutput | RequestError) -> None:
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
        except RuntimeError:
            return  # the server's event loop has ended: nobody is left to tell

    async def __aiter__(self) -> AsyncIterator[TokenOutput]:
        while True:
            item = await self._queue.get()
            if isinstance(item, RequestError):
                raise item
            yield item
            if item.finish_reason is not None:
                return
