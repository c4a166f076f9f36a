"""Brings the transfer engine's events to a node's loop."""

import logging
import threading
from collections.abc import Callable, Sequence

from ffi_transport.engine import TransferEngine
from ffi_transport.events import Event

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5


class EventPump:
    """A thread that waits for the engine's events (without the GIL) and hands them on in order.

    `fail` is told why, should the events not be readable any more: a node that does not hear of
    counts and losses must not go on. `after_wait` is called after each wait, whether events came
    or not.
    """

    def __init__(
        self,
        engine: TransferEngine,
        deliver: Callable[[Sequence[Event]], None],
        fail: Callable[[str], None],
        name: str,
        after_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._deliver = deliver
        self._fail = fail
        self._after_wait = after_wait
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; returns when it has ended."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                events = self._engine.poll(POLL_SECONDS)
                if events:
                    self._deliver(events)
                self._after_wait()
        except Exception as error:
            log.exception("the fabric's events cannot be read")
            self._fail(f"the fabric's events cannot be read: {error}")
