"""What the processes of one node say to each other about memory, links, counters and transfers.

A *link* is one process's connection to one process of another node, named by the engine that has
it: its peer id there. A *peer* is another node, named by the leader's link to that node's leader.
A *transfer* is a request's writes from all processes, named by the leader.
"""

from typing import Any, Literal

from jaxdisagg.group.message_base import GroupMessage
from jaxdisagg.hello import ContextBuffers, Region
from jaxdisagg.landings import Destination
from jaxdisagg.planned_request import PlannedRequest

# ---- of a follower -------------------------------------------------------------------------------


class Registered(GroupMessage, frozen=True):
    """The process's shards are registered: its control address, and what HELLO says of them.

    `regions[device][layer]` and `contexts[device]` are in the rank order of its devices; `mode` is
    how peers reach them (`CacheMemory.mode`).
    """

    address: str
    regions: tuple[tuple[Region, ...], ...]
    contexts: tuple[ContextBuffers, ...]
    mode: str


class Linked(GroupMessage, frozen=True):
    """Answer to LinkTo: a link to each process of the other node, -1 where there is a problem.

    `problems` says of each what is wrong with it, "" for nothing.
    """

    number: int
    links: tuple[int, ...]
    problems: tuple[str, ...]


class Greeted(GroupMessage, frozen=True):
    """Process `process` of a node that says it is `node` in its life `epoch` greeted here."""

    link: int
    node: str
    epoch: int
    process: int


class LinkLost(GroupMessage, frozen=True):
    """A link's data endpoint is closed, its transfers have ended; nothing lands over it any more.

    `seen` holds the count of every slot that is armed here.
    """

    link: int
    reason: str
    elapsed_s: float
    seen: dict[int, int]


class Armed(GroupMessage, frozen=True):
    """Answer to Arm; `problem` is "" when the counter waits."""

    slot: int
    problem: str


class Reached(GroupMessage, frozen=True):
    """All units that a slot was armed for have landed here."""

    slot: int
    count: int


class NotArrived(GroupMessage, frozen=True):
    """All units of a slot have landed here, but its pages did not come into the devices."""

    slot: int
    error: str


class Overshot(GroupMessage, frozen=True):
    """More units than a slot was armed for have landed here."""

    slot: int
    expected: int
    seen: int


class Tally(GroupMessage, frozen=True):
    """Now and then, when they changed: counts of armed slots, and the engine's counters.

    `domains` is as `TransferEngine.domain_counters` gives it.
    """

    seen: dict[int, int]
    counters: dict[str, int]
    domains: list[dict[str, Any]]


class PartEnded(GroupMessage, frozen=True):
    """This process's writes of a transfer to one process have ended, as TransferEnded says it."""

    transfer: int
    process: int
    status: Literal["completed", "cancelled", "failed"]
    error: str
    units_done: int
    units_planned: int
    bytes: int


class PlanRefused(GroupMessage, frozen=True):
    """A step's writes could not be filed here: these transfers cannot be completed."""

    transfers: tuple[int, ...]
    reason: str


class Fault(GroupMessage, frozen=True):
    """A trigger that cannot be what the plan meant, as TriggerFault says it."""

    kind: str
    step: int
    layer: int
    ordinal: int
    detail: str


# ---- of the leader -------------------------------------------------------------------------------


class Introduce(GroupMessage, frozen=True):
    """From now on answer those who greet, as a process of this node in this life."""

    node: str
    epoch: int


class LinkTo(GroupMessage, frozen=True):
    """Connect to every process of another node, and say Linked, within `timeout_s`.

    `addresses` are in the order of its processes, each of which must say that it is `node` in its
    life `epoch`.
    """

    number: int
    node: str
    epoch: int
    addresses: tuple[str, ...]
    timeout_s: float


class Unlink(GroupMessage, frozen=True):
    """Take leave of links that nothing was written over."""

    links: tuple[int, ...]


class Fence(GroupMessage, frozen=True):
    """Fence these links; LinkLost answers for each."""

    links: tuple[int, ...]


class Arm(GroupMessage, frozen=True):
    """Expect this many units on a slot here, and say Armed.

    `destination` is where they land, if that is in devices of their own.
    """

    slot: int
    expected: int
    destination: Destination | None


class Disarm(GroupMessage, frozen=True):
    """Forget a slot's count.

    What comes later, a step too, is handled once nothing lands for the slot any more.
    """

    slot: int


class Know(GroupMessage, frozen=True):
    """A decode node's NodeHello as it came: peers are written by what it says."""

    peer: int
    hello: bytes


class Forget(GroupMessage, frozen=True):
    """A decode node is gone."""

    peer: int


class Open(GroupMessage, frozen=True):
    """Begin this process's part of a transfer: over `links`, by process of the decode node."""

    transfer: int
    peer: int
    slot: int
    links: dict[int, int]
    request: PlannedRequest


class CancelPart(GroupMessage, frozen=True):
    """Post nothing more of a transfer; PartEnded follows for each of its parts."""

    transfer: int


class FileStep(GroupMessage, frozen=True):
    """Ordered, before its step: what the step completes, as (transfer, begin row, end row).

    The chunk that ends at a request's last row seals its transfer.
    """

    number: int
    chunks: tuple[tuple[int, int, int], ...]


FollowerWord = (
    Registered
    | Linked
    | Greeted
    | LinkLost
    | Armed
    | Reached
    | NotArrived
    | Overshot
    | Tally
    | PartEnded
    | PlanRefused
    | Fault
)
LeaderWord = (
    Introduce
    | LinkTo
    | Unlink
    | Fence
    | Arm
    | Disarm
    | Know
    | Forget
    | Open
    | CancelPart
    | FileStep
)
