"""The transfer engine: registered memory, peers, transfers, counters, step plans, events.

Everything that waits releases the GIL, and the native threads never take it.
"""

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, Literal, Self

from numpy.typing import NDArray

from ffi_transport import _native
from ffi_transport.events import Event
from ffi_transport.native_values import (
    MEMORY_MODES,
    event_of,
    landing_tuple,
    pages_array,
    plan_tuple,
    resolved_address,
    trace_of,
    unit_tuple,
)
from ffi_transport.types import (
    EngineConfig,
    Landing,
    MemoryRegion,
    PageList,
    PageUnit,
    PlanWrite,
    RemoteRegion,
)

_LOG = logging.getLogger(__name__)

LIBFABRIC_VARIABLE = "JAXDISAGG_LIBFABRIC"
"""The environment variable that names the library where EngineConfig.libfabric_path does not."""


class TransferEngine:
    """Moves pages between processes and counts them.

    A context manager; every method is thread-safe. Raises FabricUnavailable when libfabric, the
    provider or the port cannot be had. `hello` is what peers read in this node's HELLO; with None
    nobody is greeted until set_hello.
    """

    def __init__(self, config: EngineConfig, hello: bytes | None = b"") -> None:
        values: dict[str, Any] = asdict(config)
        values["domains"] = list(config.domains)
        values["domain_cpus"] = [list(cpus) for cpus in config.domain_cpus]
        values["libfabric_path"] = config.libfabric_path or os.environ.get(LIBFABRIC_VARIABLE, "")
        self.config = config
        self._native = _native.make_engine(values, hello)
        self.provider = self._native.provider
        self.control_address = self._native.control_address
        self.epoch = self._native.epoch
        self.index = self._native.index
        self.event_fd = self._native.event_fd

    def close(self) -> None:
        """Say goodbye, close every endpoint, end every transfer and thread. Idempotent.

        Host mirrors from which hung copies may still read stay mapped as long as the process lives;
        a warning is logged then, and counters() says how many as "mirrors_kept".
        """
        kept = self._native.close()
        if kept:
            _LOG.warning(
                "host mirrors of device memory that stay mapped until the process ends: %d, as "
                "copies out of them into their devices have hung",
                kept,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ---- memory ------------------------------------------------------------------------------

    def register_memory(
        self,
        address: int,
        length: int,
        domains: Sequence[int] | None = None,
        *,
        device: int | None = None,
    ) -> MemoryRegion:
        """Let peers write `length` bytes at `address`, which must outlive the registration.

        With these of the engine's domains (indices into config.domains, in any order), or with all.
        Peers write to the region, and it is written from, through them alone. `device` is the CUDA
        ordinal of the device whose memory it is, None for the host's; config.device_memory says how
        it is reached. A ValueError for a domain that is out of range or there twice, or memory that
        is not the device's, or not all of it; FabricUnavailable without CUDA's driver, or if it
        must be reached directly and the provider cannot; RegistrationFailed when the provider
        refuses.
        """
        id, descriptor = self._native.register_memory(
            address, length, None if domains is None else list(domains), device
        )
        return MemoryRegion(id, address, length, descriptor)

    def memory_mode(self, region: MemoryRegion) -> Literal["host", "direct", "staged"]:
        """How the region's memory is reached; "host" is memory of this process."""
        return MEMORY_MODES[self._native.memory_mode(region.id)[0]]

    def why_staged(self, region: MemoryRegion) -> str:
        """Why a staged region is not reached directly; "" for others."""
        return self._native.memory_mode(region.id)[1]

    def deregister(self, region: MemoryRegion) -> None:
        """Forget a region. RegistrationFailed while writes read from it.

        Copies out of a staged region are waited for, as they end by themselves: at most 5 seconds.
        With TCP providers this alone stops no writer: fence the peers that know it first.
        """
        self._native.deregister(region.id)

    # ---- peers -------------------------------------------------------------------------------

    def connect(self, control_address: str, timeout_s: float) -> int:
        """Greet the engine at host:port and return its peer id.

        Raises TransferTimeout when nobody answers in time, ProtocolError when it refuses.
        """
        return self._native.connect(resolved_address(control_address), timeout_s)

    def peer_hello(self, peer: int) -> bytes:
        """What the application at the peer put into its HELLO. PeerLost if it is gone."""
        return self._native.peer_hello(peer)

    def set_hello(self, hello: bytes) -> None:
        """What later HELLOs say; peers that greeted while there was none are answered now."""
        self._native.set_hello(hello)

    def send(self, peer: int, payload: bytes) -> None:
        """Queue a message of at most 64 MiB; it arrives whole and in order. Never waits.

        Raises PeerLost if the peer is gone, TransferTimeout if 128 MiB wait for it already.
        """
        self._native.send(peer, payload)

    def fence(self, peer: int) -> None:
        """Hard fence: when this returns, nothing of the peer lands here and nothing goes to it.

        Its transfers end as failed, then PeerLostEvent comes, on the peer's side too. Nothing
        happens to a peer that is lost already.
        """
        self._native.fence(peer)

    def disconnect(self, peer: int) -> None:
        """Say goodbye after the messages queued so far, waiting at most a second.

        Its transfers end as failed. This side gets no PeerLostEvent, the peer does.
        """
        self._native.disconnect(peer)

    # ---- counters ----------------------------------------------------------------------------

    def arm(
        self,
        slot: int,
        expected: int,
        *,
        adopt_early: bool = False,
        landings: Sequence[Landing] = (),
    ) -> None:
        """Expect `expected` units on a slot; CounterReached follows when they have landed.

        Units that came while the slot was not armed are stale and dropped, or counted with
        `adopt_early`. A ValueError if the slot is armed.

        `landings` says which pages the units fill. In a device's memory CounterReached then waits
        until the device can read them: where a NIC wrote them, for a flush if the device needs one;
        where they landed in a host mirror, for their copies (or it is ArrivalFailed). Regions of
        host memory need no landing. A ValueError if a page leaves its region, FabricUnavailable if
        a device cannot be opened.
        """
        self._native.arm(slot, expected, adopt_early, [landing_tuple(one) for one in landings])

    def disarm(self, slot: int) -> None:
        """Forget a slot's count; later units on it are stale.

        When this returns nothing is copied into a device for the slot any more: it waits for the
        copies that have begun. TransferTimeout if they have hung, so that its pages are not safe.
        """
        self._native.disarm(slot)

    def seen(self, slot: int) -> int:
        """Units counted on the slot so far."""
        return self._native.seen(slot)

    # ---- transfers ---------------------------------------------------------------------------

    def open_transfer(self, peer: int, slot: int) -> int:
        """Begin a group of writes that count on the peer's `slot`. PeerLost if it is gone."""
        return self._native.open_transfer(peer, slot)

    def write(
        self,
        transfer: int,
        region: MemoryRegion,
        offset: int,
        remote: RemoteRegion,
        remote_offset: int,
        length: int,
        units: int = 1,
    ) -> None:
        """Post `length` bytes that count as `units` units (each of at most 1 MiB).

        On a transfer that has ended nothing happens; its TransferEnded says why. It ends as failed
        if `remote` names a domain that the peer does not have. A ValueError if a range leaves its
        region or the transfer is sealed.
        """
        self._native.write(
            transfer, region.id, offset, remote.descriptor, remote_offset, length, units
        )

    def write_paged(
        self,
        transfer: int,
        region: MemoryRegion,
        remote: RemoteRegion,
        source_pages: PageList,
        destination_pages: PageList,
        unit: PageUnit,
    ) -> None:
        """Post source_pages[i] -> destination_pages[i] for all i; one unit each. As `write`."""
        self._native.write_paged(
            transfer,
            region.id,
            remote.descriptor,
            pages_array("source_pages", source_pages),
            pages_array("destination_pages", destination_pages),
            unit_tuple(unit),
        )

    def seal(self, transfer: int) -> None:
        """No more is planned: the transfer completes when everything planned has landed."""
        self._native.seal(transfer)

    def cancel_transfer(self, transfer: int) -> None:
        """Post nothing more; TransferEnded(cancelled) follows when what was posted has drained."""
        self._native.cancel_transfer(transfer)

    # ---- step plans --------------------------------------------------------------------------

    def open_slots(self, ordinals: Sequence[int], layers: int, *, device: bool = True) -> None:
        """Let triggers of these devices and layers come through slots of host memory (M8).

        A program on CUDA has no other way: its trigger runs when it is put on the stream, and what
        it puts there copies the step's number into the pinned slot of (ordinal, layer), which a
        thread polls while a plan is live. `ordinals` are CUDA's own among the devices that this
        process sees; `layers` are all that triggers name. Once, before such a program first runs,
        warm-up too: without slots its triggers say nothing. With `device=False` the slots are plain
        memory and a CPU's triggers store into them: a stand-in for tests.

        A slot that has seen a later step or layer answers for the earlier ones. So numbers ascend
        as steps are dispatched, one by one; those without a plan have lower numbers than the next
        with one, or have ended before it is filed; and a step that was filed but will not run is
        dropped before a later one is dispatched. Raises ValueError for what cannot have slots,
        FabricUnavailable when there is no CUDA driver or it refuses the memory.
        """
        self._native.open_slots(list(ordinals), layers, device)

    def set_source_region(self, ordinal: int, layer: int, region: MemoryRegion) -> None:
        """The cache shard of a device and layer: triggers read from it and compare its address."""
        self._native.set_source_region(ordinal, layer, region.id)

    def add_plan(
        self,
        step: int,
        ordinals: int | Iterable[int],
        layers: int,
        writes: Sequence[PlanWrite],
        *,
        timeout_s: float = 30.0,
    ) -> None:
        """What the triggers of a step post; before the step is dispatched.

        `step` is a 64-bit number whose low half the program carries; `ordinals` a number of devices
        or their ordinals. The plan is freed when every (ordinal, layer) has fired. At most four
        steps are live: with a fifth this waits until one is freed, and raises TransferTimeout,
        which names the triggers that did not come, after `timeout_s` seconds. A ValueError if a
        page leaves its region or a source region is missing.
        """
        devices = list(range(ordinals)) if isinstance(ordinals, int) else list(ordinals)
        native = [plan_tuple(write) for write in writes]
        self._native.add_plan(step, devices, layers, native, timeout_s)

    def drop_plan(self, step: int) -> None:
        """The step failed: transfers with writes that have not fired end as failed."""
        self._native.drop_plan(step)

    # ---- events ------------------------------------------------------------------------------

    def poll(self, timeout_s: float) -> list[Event]:
        """Wait for events at most `timeout_s` seconds and take all that are there, in order."""
        return [event_of(event) for event in self._native.poll(timeout_s)]

    def counters(self) -> dict[str, int]:
        """Numbers since the start, each explained in csrc/stats.h, and two of this moment.

        Those are "steps_live", the steps whose plans are filed and not freed, and
        "staging_bytes_held", the bytes of pinned memory that copies to be sent take up.
        """
        return self._native.counters()

    def domain_counters(self) -> list[dict[str, Any]]:
        """For each domain its "name" (as configured, or the provider's), "cpus" and numbers.

        "units_posted" and "bytes_posted" of writes that left through it, "units_completed" and
        "bytes_completed" of those that were acknowledged, "units_counted" the weight of the
        immediates that came in through it, on whatever slot. "cpus" is [] if not pinned.
        """
        return self._native.domain_counters()

    def trace(self) -> NDArray[Any]:
        """What was recorded with `trace=True`, in order, as an array of TRACE_DTYPE."""
        return trace_of(self._native.trace())
