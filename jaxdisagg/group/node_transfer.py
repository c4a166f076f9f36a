"""A request's writes from all processes of a prefill node: one transfer made of parts."""

from dataclasses import dataclass, field
from typing import Literal

from ffi_transport.events import TransferEnded
from jaxdisagg.group.fabric_messages import PartEnded
from jaxdisagg.group.node_fabric import Pair, Peer
from jaxdisagg.planned_request import PlannedRequest

Status = Literal["completed", "cancelled", "failed"]
_WORSE: tuple[Status, ...] = ("completed", "cancelled", "failed")


@dataclass(eq=False)
class NodeTransfer:
    """`open` are the parts that have not ended: (process here, process there).

    `native` are the parts of the leader's own engine, by process there. `stopped` once nothing more
    is to be posted. Units and bytes are sums over the parts that have ended.
    """

    id: int
    peer: Peer
    request: PlannedRequest
    open: set[Pair]
    native: dict[int, int] = field(default_factory=dict)
    stopped: bool = False
    status: Status = "completed"
    error: str = ""
    units_done: int = 0
    units_planned: int = 0
    bytes: int = 0

    def worsen(self, status: Status, error: str) -> None:
        """The worst of the parts is the whole's status, with the first reason for it."""
        if _WORSE.index(status) > _WORSE.index(self.status):
            self.status, self.error = status, error

    def end(self, process: int, part: PartEnded) -> bool:
        """Add what a part came to; False if it had ended before."""
        pair = process, part.process
        if pair not in self.open:
            return False
        self.open.discard(pair)
        self.units_done += part.units_done
        self.units_planned += part.units_planned
        self.bytes += part.bytes
        error = f"process {process}: {part.error}" if process and part.error else part.error
        self.worsen(part.status, error)
        return True

    def ended(self) -> TransferEnded:
        """What all parts came to, once they have ended."""
        return TransferEnded(
            self.id,
            self.peer.id,
            self.status,
            self.error,
            self.units_done,
            self.units_planned,
            self.bytes,
        )


def part_ended(event: TransferEnded, transfer: int, process: int) -> PartEnded:
    """The end of a native transfer as that of a part: of `transfer`, to `process` there."""
    return PartEnded(
        transfer,
        process,
        event.status,
        event.error,
        event.units_done,
        event.units_planned,
        event.bytes,
    )
