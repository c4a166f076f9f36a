"""A process of a node that does as its leader says: it loads its share, then runs step after step.

Two threads matter. The step thread takes ordered messages and is all that touches jax; the reader
thread of the channel handles the rest at once, even while a step hangs. The process ends when the
leader says so or is lost, and when anything fails here.
"""

import logging
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import jax

from ffi_transport.engine import TransferEngine
from ffi_transport.errors import TransportError
from jaxdisagg.assembly import make_runner
from jaxdisagg.config import START_SECONDS, NodeConfig
from jaxdisagg.fabric import open_fabric
from jaxdisagg.group.channel import FollowerChannel
from jaxdisagg.group.errors import GroupError
from jaxdisagg.group.fabric_messages import FileStep, LeaderWord
from jaxdisagg.group.follower_fabric import FollowerFabric, open_follower_fabric
from jaxdisagg.group.key import group_key
from jaxdisagg.group.messages import (
    ORDERED,
    Begin,
    Begun,
    Failed,
    Loaded,
    Message,
    Status,
    Step,
    Stop,
    WarmedUp,
)
from jaxdisagg.group.start import comparable, differences, initialize
from jaxdisagg.model_loading import load_model, resolve_limits
from jaxdisagg.runner import ModelRunner

log = logging.getLogger(__name__)

STEPS_IN_FLIGHT = 4
EXPLAIN_SECONDS = 2.0
LEAVE_SECONDS = 5.0
STATUS_SECONDS = 1.0
CLOSE_SECONDS = 5.0

Say = Callable[[dict[str, Any]], None]


def run_follower(node: NodeConfig, say: Say) -> int:
    """Follow until the leader ends or something fails; returns the exit status.

    Raises ValueError, FileNotFoundError, TransportError or GroupError with a message for a person.
    """
    node = resolve_limits(node)
    engine = None if node.role == "mixed" else open_fabric(node)
    follower = Follower(node, group_key(), engine, say)
    signal.signal(signal.SIGTERM, lambda *_: follower.told_to_end())
    return follower.run()


class Follower:
    """One follower. `say` is told of its progress."""

    def __init__(
        self, node: NodeConfig, key: bytes, engine: TransferEngine | None, say: Say
    ) -> None:
        self._node, self._engine, self._say = node, engine, say
        self._ordered: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._end_lock = threading.Lock()
        self._close_lock = threading.Lock()
        self._closed = False
        self._error: str | None = None
        self._fabric: FollowerFabric | None = None
        self._runner: ModelRunner | None = None
        assert node.group is not None
        self._channel = FollowerChannel(
            node.group,
            node.process,
            key=key,
            silence=node.timeouts.member,
            timeout=START_SECONDS,
            on_message=self._take,
            on_lost=lambda reason: self._end(f"process 0 {reason}"),
        )

    def run(self) -> int:
        """Until the end; 0 when the leader asked for it. Raises GroupError for a failed start."""
        threading.Thread(target=self._steps, name="group-steps", daemon=True).start()
        said = None
        while not self._ended.wait(STATUS_SECONDS):
            runner = self._runner
            status = runner and Status(runner.steps, runner.compiles_after_warm_up)
            if status and status != said:  # steps are counted before they compile
                self._channel.send(status)
                said = status
        closing = threading.Thread(target=self._close_fabric, name="closing", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        self._channel.close(1.0)
        if self._error is None:
            return 0
        raise GroupError(self._error)

    def _close_fabric(self) -> None:
        """End the transfer engine, and with it every link; once."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        if self._fabric is not None:
            self._fabric.close()
        elif self._engine is not None:
            self._engine.close()

    def told_to_end(self) -> None:
        """SIGTERM: who told the leader too (a service manager tells all) gets a stop in order.

        The leader then says Stop, once it has stopped serving. In a thread, since a signal's
        handler must not wait for a lock that the code it interrupts may hold.
        """

        def leave() -> None:
            if not self._ended.wait(LEAVE_SECONDS):
                self.fail("was told to end")

        threading.Thread(target=leave, name="told-to-end", daemon=True).start()

    def fail(self, reason: str) -> None:
        """Tell the leader that something went wrong here, and end."""
        self._end(reason, Failed(reason))

    def _end(self, error: str | None, last_word: Failed | None = None) -> None:
        """The first call decides how this process ends."""
        with self._end_lock:
            if self._ended.is_set():
                return
            self._error = error
            if last_word is not None:
                self._channel.send(last_word)
            self._ended.set()

    def _take(self, message: Message) -> None:
        if isinstance(message, Stop):
            self._end(message.reason or None)
        elif isinstance(message, ORDERED):
            self._ordered.put(message)
        elif self._closed:
            return  # it ends
        elif isinstance(message, LeaderWord) and self._fabric is not None:
            self._fabric.handle(message)
        else:
            raise ValueError(f"{type(message).__name__} is not expected here now")

    # ---- the step thread -----------------------------------------------------------------------

    def _steps(self) -> None:
        try:
            self._start()
            in_flight: deque[Any] = deque()
            while not self._ended.is_set():
                self._do(self._ordered.get(), in_flight)
        except (ValueError, FileNotFoundError, TransportError, GroupError) as error:
            self._fail_unless_told(str(error))
        except Exception as error:
            log.exception("a step failed")
            self._fail_unless_told(f"{type(error).__name__}: {error}")

    def _fail_unless_told(self, reason: str) -> None:
        """Fail; but if another process is gone, which breaks collectives, the leader says which."""
        self._close_fabric()  # at once: the cache may be unmapped (R19)
        if not self._ended.wait(EXPLAIN_SECONDS):
            self.fail(reason)

    def _start(self) -> None:
        node = self._node
        self._say({"progress": "waiting for process 0"})
        begin = self._ordered.get()
        if not isinstance(begin, Begin):
            raise GroupError(f"process 0 began with {type(begin).__name__}")
        problem = differences(comparable(node), begin.config)
        if problem is not None:
            raise ValueError(problem)
        initialize(begin.coordinator, node, START_SECONDS)
        self._channel.send(Begun())
        self._say({"progress": f"loading {node.model.name}"})
        self._model = load_model(node)
        self._runner = make_runner(node, self._model, self._engine)
        self._channel.send(Loaded(self._model.fingerprint, str(self._model.rules)))
        self._say({"progress": "following"})

    def _do(self, message: Message, in_flight: deque[Any]) -> None:
        runner = self._runner
        assert runner is not None
        if isinstance(message, Step):
            in_flight.append(runner.follow(message))
            moved = runner.cache.check_addresses()
            if moved is not None:
                raise RuntimeError(moved)
            if len(in_flight) > STEPS_IN_FLIGHT:
                jax.block_until_ready(in_flight.popleft())
        elif isinstance(message, WarmedUp):
            runner.end_warm_up()
            self._open_fabric(runner)
            self._channel.send(WarmedUp())
            self._say({"ready": {"id": self._node.id, "process": self._node.process}})
        elif isinstance(message, FileStep):
            assert self._fabric is not None
            self._fabric.file(message)

    def _open_fabric(self, runner: ModelRunner) -> None:
        if self._engine is None:
            return
        self._fabric = open_follower_fabric(
            self._node, runner, self._engine, self._channel.send, self.fail
        )
