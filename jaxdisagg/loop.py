"""The one thread of a node that changes its state: it runs posted calls, then steps, then waits.

Everything that comes from elsewhere (HTTP, fabric events, membership) is posted as a call, so the
schedulers, the page pools and the requests need no locks.
"""

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

MAX_WAIT = 1.0


class StepLoop(ABC):
    """Runs `tick` for as long as it has work, and sleeps until a call or a deadline otherwise."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._failing = threading.Lock()
        self._failed = False
        self.failure: str | None = None
        # Of a node of several processes: may say which of them an exception comes from.
        self.explain: Callable[[str], str] = lambda reason: reason
        # What /debug/state shows of them; None: there is one.
        self.processes: Callable[[], dict[str, Any]] | None = None

    @abstractmethod
    def tick(self, now: float) -> bool:
        """Dispatch and finish at most one step. Returns whether there may be more to do at once."""

    @abstractmethod
    def next_deadline(self) -> float | None:
        """The next time (of `time.monotonic`) at which `tick` has something to do by itself."""

    @abstractmethod
    def fence(self, reason: str) -> None:
        """An exception ended the stepping: let nobody read or write this node's memory (R19)."""

    @abstractmethod
    def on_failure(self, reason: str) -> None:
        """After `fence`: fail what is open. Calls that are posted still run."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` on the loop's thread, soon and in order."""
        self._calls.put(call)

    def fail(self, reason: str) -> None:
        """End the stepping for a reason found outside the loop; for any thread."""

        def raise_it() -> None:
            raise RuntimeError(reason)

        self.post(raise_it)

    def abandon(self, reason: str, timeout: float) -> None:
        """Fail for a reason for which a step may hang for ever; for any thread.

        The loop has `timeout` seconds to do it itself; what is open is then failed from here.
        """
        self.fail(reason)
        deadline = time.monotonic() + timeout
        while not self._failed and time.monotonic() < deadline:
            time.sleep(0.01)
        self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        """The first call decides. The fence does not wait for an explanation, which takes time."""
        with self._failing:
            if self._failed:
                return
            self._failed = True
        self.fence(reason)
        self.failure = self.explain(reason)
        self.on_failure(self.failure)

    def stop(self, timeout: float) -> bool:
        """End the thread after its present tick. Returns whether it ended in time."""
        self._stopping.set()
        self.post(lambda: None)
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _drain(self, wait: float) -> None:
        try:
            call = self._calls.get(timeout=wait) if wait > 0 else self._calls.get_nowait()
            while True:
                call()
                call = self._calls.get_nowait()
        except queue.Empty:
            return

    def _wait_time(self) -> float:
        deadline = self.next_deadline()
        if deadline is None:
            return MAX_WAIT
        return min(max(deadline - time.monotonic(), 0.001), MAX_WAIT)

    def _run(self) -> None:
        busy = False
        try:
            while not self._stopping.is_set():
                self._drain(0.0 if busy else self._wait_time())
                busy = self.tick(time.monotonic())
        except Exception as error:
            # Whatever went wrong, the device state is unknown: fail what is open, say why, end.
            log.exception("the step loop failed")
            self._give_up(f"{type(error).__name__}: {error}")
            while not self._stopping.is_set():
                try:
                    self._drain(MAX_WAIT)  # what is still posted must be answered, if only by no
                except Exception:  # a second thing went wrong; the calls behind it count
                    log.exception("a call failed on a node that has failed")
