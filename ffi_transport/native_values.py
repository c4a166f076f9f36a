"""What the engine's API says and hears, as the native module takes and gives it."""

import socket
from collections.abc import Callable
from operator import index
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ffi_transport.errors import FabricUnavailable
from ffi_transport.events import (
    ArrivalFailed,
    CounterOvershoot,
    CounterReached,
    Event,
    MessageReceived,
    PeerConnected,
    PeerLostEvent,
    TransferEnded,
    TriggerFault,
)
from ffi_transport.types import TRACE_DTYPE, Landing, PageList, PageUnit, PlanWrite

if TYPE_CHECKING:
    from ffi_transport._native import EventTuple, LandingTuple, PlanTuple, UnitTuple

_OUTCOMES: tuple[Literal["completed", "cancelled", "failed"], ...] = (
    "completed",
    "cancelled",
    "failed",
)

MEMORY_MODES: tuple[Literal["host", "direct", "staged"], ...] = ("host", "direct", "staged")
"""By ffi_transport::MemoryMode."""

# By ffi_transport::EventKind. The arguments are those of _native.Engine.poll.
_EVENTS: "tuple[Callable[[EventTuple], Event], ...]" = (
    lambda e: PeerConnected(e[1], e[8], e[9]),
    lambda e: PeerLostEvent(e[1], e[8], e[7]),
    lambda e: MessageReceived(e[1], e[9]),
    lambda e: TransferEnded(e[2], e[1], _OUTCOMES[e[6]], e[8], e[3], e[4], e[5]),
    lambda e: CounterReached(e[2], e[3]),
    lambda e: CounterOvershoot(e[2], e[3], e[4]),
    lambda e: TriggerFault(e[8], e[2], e[3], e[4], e[9].decode()),
    lambda e: ArrivalFailed(e[2], e[8]),
)

_NATIVE_TRACE = np.dtype(
    [
        ("order", "u8"),
        ("t_ns", "i8"),
        ("kind", "i4"),
        ("layer", "i4"),
        ("step", "i8"),
        ("transfer", "i8"),
        ("bytes", "i8"),
        ("ordinal", "i4"),
        ("reserved", "i4"),
    ]
)
_TRACE_KINDS = np.array([b"trigger", b"post", b"complete"], "S12")


def resolved_address(address: str) -> str:
    """host:port with the host as an IPv4 address; FabricUnavailable if it has none."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or host == "loopback":
        return address
    try:
        return f"{socket.gethostbyname(host)}:{port}"
    except OSError as error:
        raise FabricUnavailable(f"the host of {address!r} is not known: {error}") from error


def pages_array(name: str, pages: PageList) -> NDArray[np.uint32]:
    """Page numbers as a contiguous array [n]; a ValueError that names `name` if they are none."""
    array = np.asarray(pages)
    if array.ndim != 1:
        raise ValueError(f"{name}: an array of shape {array.shape}, not of one dimension")
    if array.dtype == np.uint32:
        return np.ascontiguousarray(array)
    if array.size == 0:
        return np.zeros(0, np.uint32)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name}: pages are integers, not {array.dtype}")
    if array.min() < 0 or array.max() > 0xFFFFFFFF:
        raise ValueError(f"{name}: pages {array.min()} to {array.max()} are not in 0..2^32-1")
    return np.ascontiguousarray(array, np.uint32)


def unit_tuple(unit: PageUnit) -> "UnitTuple":
    """A unit's five numbers; a ValueError if one is negative."""
    values = (
        unit.source_page_bytes,
        unit.source_offset,
        unit.destination_page_bytes,
        unit.destination_offset,
        unit.length,
    )
    if min(values) < 0:
        raise ValueError(f"a negative number in {unit}")
    return values


def landing_tuple(landing: Landing) -> "LandingTuple":
    """A landing with its regions' numbers."""
    regions = [region.id for region in landing.regions]
    return regions, pages_array("pages", landing.pages), index(landing.page_bytes)


def plan_tuple(write: PlanWrite) -> "PlanTuple":
    """A planned write; a ValueError if it does not have one remote for each layer."""
    if len(write.remotes) != write.layers:
        raise ValueError(f"{len(write.remotes)} remotes for {write.layers} layers")
    return (
        write.transfer,
        write.ordinal,
        write.first_layer,
        pages_array("source_pages", write.source_pages),
        pages_array("destination_pages", write.destination_pages),
        unit_tuple(write.unit),
        [remote.descriptor for remote in write.remotes],
    )


def event_of(event: "EventTuple") -> Event:
    """The event that `_native.Engine.poll` gave."""
    return _EVENTS[event[0]](event)


def trace_of(records: bytes) -> NDArray[Any]:
    """The records of `_native.Engine.trace` as an array [n] of TRACE_DTYPE."""
    native = np.frombuffer(records, _NATIVE_TRACE)
    out = np.zeros(len(native), TRACE_DTYPE)
    for name in ("order", "t_ns", "step", "layer", "ordinal", "transfer", "bytes"):
        out[name] = native[name]
    out["kind"] = _TRACE_KINDS[native["kind"]]
    return out
