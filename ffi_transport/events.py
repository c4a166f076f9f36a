"""What the transfer engine tells through `TransferEngine.poll`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PeerConnected:
    """A peer has greeted this engine and was accepted. The side that connected gets no event."""

    peer: int
    address: str
    hello: bytes


@dataclass(frozen=True)
class PeerLostEvent:
    """A peer is gone. Its data endpoints are closed and its transfers have ended before this.

    `elapsed_s` is the time since it was last heard.
    """

    peer: int
    reason: str
    elapsed_s: float


@dataclass(frozen=True)
class MessageReceived:
    """A control message, complete and in its sender's order."""

    peer: int
    payload: bytes


@dataclass(frozen=True)
class TransferEnded:
    """A transfer has ended and none of its writes is in flight any more.

    `bytes` and `units_done` were acknowledged as landed; `units_planned` were asked for. `error`
    says why it failed.
    """

    transfer: int
    peer: int
    status: Literal["completed", "cancelled", "failed"]
    error: str
    units_done: int
    units_planned: int
    bytes: int


@dataclass(frozen=True)
class CounterReached:
    """All `count` units that the slot was armed for have landed."""

    slot: int
    count: int


@dataclass(frozen=True)
class CounterOvershoot:
    """More units came for a slot than were expected: a protocol error. Reported once a slot."""

    slot: int
    expected: int
    seen: int


@dataclass(frozen=True)
class TriggerFault:
    """A trigger that cannot be what the plan meant.

    `kind` is address_changed (the cache shard is not where it was registered), repeated,
    outside_plan, ring_overflow (triggers were lost; step, layer and ordinal are -1), or
    not_enqueued (CUDA's driver did not take the trigger of a layer; step is -1).
    """

    kind: str
    step: int
    layer: int
    ordinal: int
    detail: str


@dataclass(frozen=True)
class ArrivalFailed:
    """All units of a slot have landed, but its pages did not come into a device's memory.

    In place of CounterReached. No copy for the slot is under way any more, unless `error` says that
    a device has hung: then `disarm` raises TransferTimeout.
    """

    slot: int
    error: str


Event = (
    PeerConnected
    | PeerLostEvent
    | MessageReceived
    | TransferEnded
    | CounterReached
    | CounterOvershoot
    | TriggerFault
    | ArrivalFailed
)
