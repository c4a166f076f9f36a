"""The processes of a node as their leader has them: start them together, talk to them, miss them.

The leader is process 0. If a follower is lost or fails, so has the node: `lost` says why, and
`on_lost` is called; there is no running on without it, since its devices hold a part of everything.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxdisagg.config import NodeConfig
from jaxdisagg.group.channel import LeaderChannel
from jaxdisagg.group.errors import GroupError
from jaxdisagg.group.messages import Begin, Begun, Failed, Message, Status, Stop
from jaxdisagg.group.start import comparable, initialize
from jaxdisagg.process_shares import devices_of

log = logging.getLogger(__name__)

EXPLAIN_SECONDS = 2.0


class LeaderGroup:
    """The followers of one node. Methods are for any thread, where not said.

    The channel listens at once; `begin` waits for the followers.
    """

    def __init__(self, node: NodeConfig, key: bytes) -> None:
        self.size = node.mesh.processes
        self.lost: str | None = None
        self._node = node
        self._handlers: dict[type, Callable[[int, Any], None]] = {}
        self._kept: dict[type, dict[int, Any]] = {}
        self._changed = threading.Condition()
        self._on_lost: Callable[[str], None] | None = None
        self._statuses: dict[int, Status] = {}
        self._stopping = False
        self._ended: set[int] = set()
        host, port = node.host, 0
        if node.group is not None:
            host, _, text = node.group.rpartition(":")
            port = int(text)
        try:
            self._channel = LeaderChannel(
                self.size,
                key=key,
                silence=node.timeouts.member,
                on_message=self._take,
                on_lost=self._gone,
                host=host,
                port=port,
            )
        except OSError as error:
            raise GroupError(f"group: cannot listen at {host}:{port}: {error}") from None
        self.address = self._channel.address
        self.on(Status, self._statuses.__setitem__)
        self.on(Failed, lambda process, failed: self._lose(f"process {process}: {failed.reason}"))

    def on(self, kind: type, handler: Callable[[int, Any], None]) -> None:
        """Call `handler(process, message)` for every message of a kind, on a reader thread.

        Messages without a handler wait for `collect`.
        """
        self._handlers[kind] = handler

    def send(self, process: int, message: Message) -> None:
        """Send to one follower, in order, without waiting."""
        self._channel.send(process, message)

    def broadcast(self, message: Message) -> None:
        """Send to every follower, in order, without waiting."""
        self._channel.broadcast(message)

    def collect[M](self, kind: type[M], timeout: float) -> dict[int, M]:
        """One message of a kind from each follower, which is taken away.

        Raises GroupError naming a follower that was lost, or those that said nothing in time.
        """
        with self._changed:
            kept = self._kept.setdefault(kind, {})
            self._changed.wait_for(lambda: self.lost or len(kept) == self.size - 1, timeout)
            self.check()
            if len(kept) < self.size - 1:
                missing = sorted(set(range(1, self.size)) - set(kept))
                raise GroupError(
                    f"no {kind.__name__} from process {', '.join(map(str, missing))} of "
                    f"{self._node.id} within {timeout:g} s"
                )
            return self._kept.pop(kind)

    def check(self) -> None:
        """Raise GroupError if a follower was lost."""
        if self.lost is not None:
            raise GroupError(self.lost)

    def wait_joined(self, timeout: float) -> None:
        """Return once all followers have joined; GroupError naming those that did not."""
        self._channel.wait_joined(timeout)

    def begin(self, timeout: float) -> None:
        """Wait for the followers, and make jax know the devices of all; `timeout` s at most.

        Raises GroupError saying who is missing, or what went wrong.
        """
        deadline = time.monotonic() + timeout
        self.wait_joined(timeout)
        coordinator = f"{self._node.host}:{_free_port(self._node.host)}"
        self.broadcast(Begin(coordinator, comparable(self._node)))
        initialize(coordinator, self._node, deadline - time.monotonic())
        self.collect(Begun, max(deadline - time.monotonic(), 0.1))

    def when_lost(self, call: Callable[[str], None]) -> None:
        """Call this with the reason once a follower is lost, on any thread; at once if it is."""
        with self._changed:
            self._on_lost, lost = call, self.lost
        if lost is not None:
            call(lost)

    def explain(self, reason: str, timeout: float = EXPLAIN_SECONDS) -> str:
        """Why a step failed: a lost follower, if that is what it was, or `reason` as it is.

        A step notices the loss by a broken connection, often before the channel does.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.lost, timeout)
        return self.lost or reason

    def state(self, steps: int, compiles_after_warm_up: int) -> dict[str, Any]:
        """Each process, by its number as text; the arguments are the leader's own."""
        statuses = {0: Status(steps, compiles_after_warm_up), **self._statuses}
        pids = {0: os.getpid(), **self._channel.pids}
        found = {}
        for process in range(self.size):
            devices = devices_of(process, self._node.mesh.devices, self.size)
            status = statuses.get(process, Status(0, 0))
            found[str(process)] = {
                "pid": pids.get(process),
                "devices": [devices.start, devices.stop - 1],
                "steps": status.steps,
                "compiles_after_warm_up": status.compiles_after_warm_up,
            }
        return found

    def stop(self, reason: str, timeout: float = 5.0) -> None:
        """Let the followers end, and close the links; a second call has no effect.

        Those that do not end within `timeout` seconds are left: they find the leader gone.
        """
        with self._changed:
            if self._stopping:
                return
            self._stopping = True
        self.broadcast(Stop(reason))
        with self._changed:
            # jax aborts a process whose coordinator, which is this one, ends before it does.
            self._changed.wait_for(lambda: self._ended >= set(self._channel.pids), timeout)
        self._channel.close(1.0)

    def _take(self, process: int, message: Message) -> None:
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(process, message)
            return
        with self._changed:
            self._kept.setdefault(type(message), {})[process] = message
            self._changed.notify_all()

    def _gone(self, process: int, reason: str) -> None:
        """A link has ended, which a follower does when it is told to stop."""
        with self._changed:
            self._ended.add(process)
            self._changed.notify_all()
        self._lose(f"process {process} {reason}")

    def _lose(self, reason: str) -> None:
        with self._changed:
            if self._stopping or self.lost is not None:
                return
            self.lost = reason
            self._changed.notify_all()
            call = self._on_lost
        log.error("%s: %s", self._node.id, self.lost)
        if call is not None:
            call(self.lost)


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as probe:
        return probe.getsockname()[1]
