"""What the processes of one node say to each other, as one tagged union (MessagePack by msgspec).

They are of one version by construction: the leader refuses a follower whose configuration differs.
Messages that are ORDERED go to the follower's step thread, in the order in which they were sent;
all others are handled on its reader thread at once.
"""

import msgspec

from jaxdisagg.group.fabric_messages import FileStep, FollowerWord, LeaderWord
from jaxdisagg.group.message_base import GroupMessage

MAX_MESSAGE = 1 << 28  # bytes; a longer one is garbage


class Ping(GroupMessage, frozen=True):
    """Sent when nothing else was for a while: silence means that the other has hung."""


class Join(GroupMessage, frozen=True):
    """Follower to leader, first of all: which process it is, and what runs it."""

    process: int
    pid: int


class Begin(GroupMessage, frozen=True):
    """Leader to all, ordered, once all have joined: where jax.distributed meets, and its config.

    `config` is what `start.comparable` gives there.
    """

    coordinator: str
    config: str


class Begun(GroupMessage, frozen=True):
    """Follower to leader: it knows all devices of the node."""


class Loaded(GroupMessage, frozen=True):
    """Follower to leader: the model is on its devices, sharded by these rules."""

    fingerprint: str
    rules: str


class Step(GroupMessage, frozen=True):
    """Leader to all, ordered: run one step program on these host inputs.

    `kind` is "prefill" or "decode", `bucket` its T or B, `number` the step's number (prefill; 0 in
    warm-up). `arrays` are the bytes of the inputs, in the order of the dataclass. "meet" is a step
    without inputs that comes before all others and connects the processes' devices.
    """

    kind: str
    number: int
    bucket: int
    arrays: tuple[bytes, ...]


class WarmedUp(GroupMessage, frozen=True):
    """Leader to all, ordered: the warm-up is over; what is compiled from now on is a bug.

    A follower answers with its own, once its fabric is open, too.
    """


class Status(GroupMessage, frozen=True):
    """Follower to leader, when it changed: how many steps ran there, and what was compiled."""

    steps: int
    compiles_after_warm_up: int


class Failed(GroupMessage, frozen=True):
    """Follower to leader: something went wrong there; it ends."""

    reason: str


class Stop(GroupMessage, frozen=True):
    """Leader to all: end, for this reason ("" is a stop that somebody asked for)."""

    reason: str


OwnMessage = Ping | Join | Begin | Begun | Loaded | Step | WarmedUp | Status | Failed | Stop
Message = OwnMessage | FollowerWord | LeaderWord
ORDERED = (Begin, Step, WarmedUp, FileStep)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """The message of these bytes; msgspec.DecodeError (a ValueError) if they are none."""
    return _decoder.decode(data)
