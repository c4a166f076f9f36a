"""Which process of a node holds which devices: equal shares of them, in rank order."""

from jaxdisagg.transfer_plan import CacheLayout


def process_of(ordinal: int, devices: int, processes: int) -> int:
    """The process that holds a device of a node of `devices` devices."""
    return ordinal * processes // devices


def devices_of(process: int, devices: int, processes: int) -> range:
    """The devices that a process holds. `devices` must be a multiple of `processes`."""
    share = devices // processes
    return range(process * share, (process + 1) * share)


def ranks_of(layout: CacheLayout, dp_rank: int, process: int, processes: int) -> range:
    """The tp ranks of a dp rank that a process holds; often none with dp over processes."""
    held = devices_of(process, layout.devices, processes)
    first = layout.ordinal(dp_rank, 0)
    return range(max(held.start - first, 0), max(min(held.stop - first, layout.tp), 0))
