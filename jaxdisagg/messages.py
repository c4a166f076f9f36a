"""What nodes say to each other: the HELLO of an application and its control messages.

On the wire: one byte PROTOCOL_VERSION, then msgpack of a map tagged by "type". Arrays of page and
token ids travel as packed uint32, little-endian, so that a 128K-token PREFILL is about 4 bytes a
token. `decode` answers anything malformed with a MessageError that names what is wrong; an
instance, however it was made, satisfies its own bounds (`decode` never returns one that does not).
Framing, sequence numbers, epochs and fragments belong to the transport beneath.
"""

from typing import Annotated, Any

import msgspec
import numpy as np

from jaxdisagg.hello import PROTOCOL_VERSION, Count, MemberHello, NodeHello
from jaxdisagg.page_spans import pages_for

SLOT_LIMIT = 1 << 20
MAX_TOKEN_ID = (1 << 31) - 1

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Slot = Annotated[int, msgspec.Meta(ge=0, lt=SLOT_LIMIT)]
RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class MessageError(ValueError):
    """Bytes that are no message of this protocol version; the text says what is wrong."""


class Prefill(msgspec.Struct, frozen=True, tag="prefill", forbid_unknown_fields=True):
    """Decode -> prefill: compute this prompt's cache and write it to these pages of mine.

    `request` is unique per attempt: a retry has a new one, with a new slot and new pages.
    `expected[i]` is the number of units that the decode node's process i will count.
    `tokens` is the whole prompt, packed uint32 (the last one, which the decoder runs itself, too);
    `pages` the destination pages of dp rank `dp_rank`, packed uint32, in the order of the tokens,
    for tokens 0..L-2. `context` is the index of the buffer lent to the request on every device of
    that dp rank, `seed` the transfer plan's. The deadline travels as what is left.
    """

    request: RequestId
    slot: Slot
    expected: tuple[Count, ...]
    tokens: bytes
    pages: bytes
    dp_rank: Count
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    deadline_ms: Count
    context: Count | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "pages"):
            if len(getattr(self, name)) % 4:
                raise ValueError(f"{name}: {len(getattr(self, name))} bytes are not packed uint32")
        if self.prompt_length < 2:
            raise ValueError(
                f"tokens: a prompt of {self.prompt_length} has nothing to prefill, at least 2"
            )
        if not self.expected:
            raise ValueError("expected: empty, must hold a number for each process")

    @property
    def prompt_length(self) -> int:
        """Tokens in the prompt, the last one included."""
        return len(self.tokens) // 4

    def token_ids(self) -> np.ndarray:
        """The prompt as int32[prompt_length]; raises ValueError if one exceeds int32."""
        ids = unpack(self.tokens)
        if ids.max() > MAX_TOKEN_ID:
            raise ValueError(f"tokens: {ids.max()} is no token id")
        return ids.astype(np.int32)

    def page_ids(self) -> np.ndarray:
        """The destination pages as uint32[n]."""
        return unpack(self.pages)

    def problem(self, hello: NodeHello) -> str | None:
        """What is wrong with this PREFILL from the node that greeted with `hello`, or None.

        Checked by the prefill node before it accepts, so that no write can leave the pool.
        """
        pages, layout = self.page_ids(), hello.layout
        need = pages_for(self.prompt_length, layout.page_size)
        if self.prompt_length > hello.max_model_len:
            return f"tokens: {self.prompt_length}, max_model_len is {hello.max_model_len}"
        if (token := unpack(self.tokens).max()) > MAX_TOKEN_ID:
            return f"tokens: {token} is no token id"
        if len(pages) != need:
            return f"pages: {len(pages)}, a prompt of {self.prompt_length} tokens fills {need}"
        if pages.max(initial=0) >= hello.num_pages:
            return f"pages: page {pages.max()}, the node announced {hello.num_pages}"
        if len(np.unique(pages)) != len(pages):
            return "pages: a page is listed twice"
        if self.dp_rank >= layout.dp:
            return f"dp_rank: {self.dp_rank}, the node announced dp={layout.dp}"
        if self.context is not None:
            if not hello.contexts:
                return "context: a buffer is named, the node announced none"
            first = layout.ordinal(self.dp_rank, 0)
            count = min(c.count for c in hello.contexts[first : first + layout.tp])
            if self.context >= count:
                return f"context: buffer {self.context}, the node announced {count}"
        return None


class Busy(msgspec.Struct, frozen=True, tag="busy", forbid_unknown_fields=True):
    """Prefill -> decode, terminal: the request was not accepted; nothing was or will be written."""

    request: RequestId
    reason: str


class Failed(msgspec.Struct, frozen=True, tag="failed", forbid_unknown_fields=True):
    """Prefill -> decode, terminal: the request failed; its writes are drained.

    `code` is a word to act on (such as "deadline", "expected", "step", "transfer", "refused"),
    `reason` a sentence for the person who reads the error.
    """

    request: RequestId
    code: str
    reason: str


class Cancel(msgspec.Struct, frozen=True, tag="cancel", forbid_unknown_fields=True):
    """Decode -> prefill: stop; resent until a terminal message answers. Idempotent."""

    request: RequestId


class CancelAck(msgspec.Struct, frozen=True, tag="cancel_ack", forbid_unknown_fields=True):
    """Prefill -> decode, terminal: no write of the request will come any more.

    Also the answer for a request that is done, was never seen, or failed before.
    """

    request: RequestId


class Telemetry(msgspec.Struct, frozen=True, tag="telemetry", forbid_unknown_fields=True):
    """Prefill -> decode, after the last acknowledged write: where the time went. Not needed to
    decode: the count alone starts that, and it may arrive before or after this message.

    Seconds on the prefill node's clock: `queue_s` from PREFILL's arrival to the first step's
    dispatch, `prefill_s` from there to the end of the last step. `bytes` were written in all.
    """

    request: RequestId
    queue_s: Seconds
    prefill_s: Seconds
    bytes: Count


Message = NodeHello | MemberHello | Prefill | Busy | Failed | Cancel | CancelAck | Telemetry

_VERSION = bytes([PROTOCOL_VERSION])
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Message, strict=True)


def encode(message: Message) -> bytes:
    """The message as bytes for the wire."""
    return _VERSION + _encoder.encode(message)


def decode(data: bytes | bytearray | memoryview) -> Message:
    """The message in `data`. Raises MessageError for anything that is not exactly one."""
    view = memoryview(data)
    if not view.nbytes:
        raise MessageError("message: empty")
    if view[0] != PROTOCOL_VERSION:
        raise MessageError(
            f"protocol version: {PROTOCOL_VERSION} here, {view[0]} at the peer; "
            "run the same release on every node"
        )
    try:
        return _decoder.decode(view[1:])
    except (ValueError, RecursionError) as error:  # msgspec's errors and a field's own check
        raise MessageError(f"message: {error}") from error


def decode_greeting(data: bytes | bytearray | memoryview) -> NodeHello | MemberHello:
    """The HELLO in `data`, a node's or a member's. Raises MessageError for anything else."""
    message = decode(data)
    if not isinstance(message, NodeHello | MemberHello):
        raise MessageError(f"message: {type(message).__name__} where a HELLO was expected")
    return message


def decode_hello(data: bytes | bytearray | memoryview) -> NodeHello:
    """The HELLO of a node in `data`. Raises MessageError for anything else."""
    message = decode_greeting(data)
    if isinstance(message, MemberHello):
        raise MessageError(
            f"process {message.process} of {message.node} answers here; greet its first process"
        )
    return message


def pack(ids: np.ndarray | list[int] | tuple[int, ...]) -> bytes:
    """Ids (any integers in 0..2**32-1) as packed uint32, little-endian.

    Raises ValueError for a negative or too large one.
    """
    array = np.asarray(ids)
    if array.size == 0:
        return b""
    if array.dtype.kind not in "iu":
        raise ValueError(f"ids: {array.dtype}, must be integers")
    if int(array.min()) < 0 or int(array.max()) >= 1 << 32:
        raise ValueError(f"ids: {array.min()}..{array.max()} is outside 0..2**32-1")
    return array.astype("<u4").tobytes()


def unpack(data: bytes) -> np.ndarray:
    """Packed uint32 as a read-only uint32[n] array over `data`; no copy."""
    if len(data) % 4:
        raise ValueError(f"{len(data)} bytes are not packed uint32")
    return np.frombuffer(data, dtype="<u4")
