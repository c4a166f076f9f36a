"""What the transfer engine raises. Every text says what failed, with which value."""


class TransportError(Exception):
    """A transfer engine's failure, and the base of the more precise ones.

    `peer` and `id` (a transfer, region or slot) are None where they do not apply, `elapsed_s` the
    seconds until the failure was certain, `missing` what was waited for or must be installed.
    """

    def __init__(
        self,
        text: str,
        *,
        peer: int | None = None,
        id: int | None = None,
        elapsed_s: float | None = None,
        missing: str = "",
    ) -> None:
        super().__init__(text)
        self.peer = peer
        self.id = id
        self.elapsed_s = elapsed_s
        self.missing = missing


class PeerLost(TransportError):
    """The peer is gone: it died, left, restarted or was fenced."""


class TransferTimeout(TransportError):
    """A deadline passed; `missing` says what did not come."""


class RegistrationFailed(TransportError):
    """A memory region could not be registered, or cannot be deregistered yet."""


class FabricUnavailable(TransportError):
    """No libfabric, no such provider or domain, or the port is in use."""


class ProtocolError(TransportError):
    """The peer speaks another protocol or version, or refused this node; the text says why."""


# By ffi_transport::Code in csrc/status.h.
_CLASSES: dict[int, type[TransportError]] = {
    1: TransportError,
    3: FabricUnavailable,
    4: PeerLost,
    5: TransferTimeout,
    6: RegistrationFailed,
    7: ProtocolError,
    8: TransportError,
}
_INVALID = 2


def from_native(
    code: int, text: str, peer: int, id: int, elapsed_s: float, missing: str
) -> Exception:
    """What a native Status stands for; a caller's fault is a ValueError. Called by _native."""
    if code == _INVALID:
        return ValueError(text)
    return _CLASSES.get(code, TransportError)(
        text,
        peer=None if peer < 0 else peer,
        id=None if id < 0 else id,
        elapsed_s=None if elapsed_s < 0 else elapsed_s,
        missing=missing,
    )
