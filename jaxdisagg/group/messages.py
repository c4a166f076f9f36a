"""What the processes of one node say to each other, as one tagged union (MessagePack by msgspec).

They are of one version by construction: the leader refuses a follower whose configuration differs.
Messages that are ORDERED go to the follower's step thread, in the order in which they were sent;
all others are handled on its reader thread at once.
"""

import msgspec

MAX_MESSAGE = 1 << 28  # bytes; a longer one is garbage


class GroupMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all."""


class Ping(GroupMessage, frozen=True):
    """Sent when nothing else was for a while: silence means that the other has hung."""


class Join(GroupMessage, frozen=True):
    """Follower to leader, first of all: which process it is, and what runs it."""

    process: int
    pid: int


class Begin(GroupMessage, frozen=True):
    """Leader to all, once all have joined: where jax.distributed meets, and the leader's config.

    `config` is the JSON of the leader's NodeConfig with limits resolved.
    """

    coordinator: str
    config: str


class Loaded(GroupMessage, frozen=True):
    """Follower to leader: the model is on its devices; `fingerprint` is of what it loaded."""

    fingerprint: str


class Step(GroupMessage, frozen=True):
    """Leader to all, ordered: run one step program on these host inputs.

    `kind` is "prefill" or "decode", `bucket` its T or B, `number` the step's number (prefill; 0 in
    warm-up). `arrays` are the bytes of the inputs' leaves, in the order of the dataclass.
    """

    kind: str
    number: int
    bucket: int
    arrays: tuple[bytes, ...]


class WarmedUp(GroupMessage, frozen=True):
    """Leader to all, ordered: the warm-up is over; what is compiled from now on is a bug.

    A follower answers with a WarmedUp of its own.
    """


class Status(GroupMessage, frozen=True):
    """Follower to leader, now and then: what /debug/state shows of the process."""

    pid: int
    ordinals: tuple[int, ...]  # first and last device of the process, in rank order
    steps: int
    compiles_after_warm_up: int


class Failed(GroupMessage, frozen=True):
    """Follower to leader: something went wrong there; it ends."""

    reason: str


class Stop(GroupMessage, frozen=True):
    """Leader to all: end, for this reason ("" is a stop that somebody asked for)."""

    reason: str


Message = Ping | Join | Begin | Loaded | Step | WarmedUp | Status | Failed | Stop
ORDERED = (Step, WarmedUp)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """The message of these bytes; msgspec.DecodeError (a ValueError) if they are none."""
    return _decoder.decode(data)
