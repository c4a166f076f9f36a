"""The processes of a node, for what only sends to them and hears them; of one process, nobody.

`leader.LeaderGroup` is those of a node of several.
"""

from collections.abc import Callable
from typing import Any, Protocol

from jaxdisagg.group.fabric_messages import LeaderWord


class Group(Protocol):
    """The processes of a node, as their leader reaches them."""

    @property
    def size(self) -> int:
        """Processes of the node, the leader among them."""

    def on(self, kind: type[Any], handler: Callable[[int, Any], None]) -> None:
        """Call `handler(process, message)` for every message of a kind, on a reader thread."""

    def send(self, process: int, message: LeaderWord) -> None:
        """Send to one follower, in order, without waiting."""

    def broadcast(self, message: LeaderWord) -> None:
        """Send to every follower, in order, without waiting."""

    def collect[M](self, kind: type[M], timeout: float) -> dict[int, M]:
        """One message of a kind from each follower; raises an error naming who said nothing."""
        ...


class OneProcess:
    """The group of a node of one process."""

    size = 1

    def on(self, kind: type[Any], handler: Callable[[int, Any], None]) -> None:
        """Nobody will ever say anything."""

    def send(self, process: int, message: LeaderWord) -> None:
        """There is nobody. Raises ValueError."""
        raise ValueError(f"process={process}: this node has one process")

    def broadcast(self, message: LeaderWord) -> None:
        """There is nobody."""

    def collect[M](self, kind: type[M], timeout: float) -> dict[int, M]:
        """Nobody says anything."""
        return {}
