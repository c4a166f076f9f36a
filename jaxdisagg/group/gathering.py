"""What the leader of a node announces for all of its processes."""

from dataclasses import dataclass

from jaxdisagg.group.fabric_messages import Registered
from jaxdisagg.group.processes import Group
from jaxdisagg.hello import ContextBuffers, Region
from jaxdisagg.landings import DeviceLandings
from jaxdisagg.registration import CacheMemory

REGISTER_SECONDS = 60.0


@dataclass(frozen=True)
class Memory:
    """Regions by device and layer, context buffers by device, all processes' control addresses.

    `landings` are the leader's own. `modes` says of each process how its memory is reached
    (`CacheMemory.mode`). `processes` is empty for a node of one process.
    """

    regions: tuple[tuple[Region, ...], ...]
    contexts: tuple[ContextBuffers, ...]
    modes: tuple[str, ...]
    landings: DeviceLandings
    processes: tuple[str, ...]


def gather(group: Group, address: str, own: CacheMemory) -> Memory:
    """The node's memory, from what the leader registered and what its followers say.

    Raises what `group.collect` does, naming the processes that have not registered in time.
    """
    found = group.collect(Registered, REGISTER_SECONDS)
    words = [found[process] for process in range(1, group.size)]
    return Memory(
        regions=(*own.regions, *(row for word in words for row in word.regions)),
        contexts=(*own.contexts, *(buffers for word in words for buffers in word.contexts)),
        landings=own.landings,
        modes=(own.mode, *(word.mode for word in words)),
        processes=(address, *(word.address for word in words)) if words else (),
    )
