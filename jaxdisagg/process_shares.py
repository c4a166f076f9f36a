"""Which process of a node holds which devices: equal shares of them, in rank order."""

from jaxdisagg.cache_layout import CacheLayout
from jaxdisagg.transfer_plan import TransferPlan


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


def expected_units(
    plan: TransferPlan, prompt_length: int, dp_rank: int, processes: int, *, context: bool
) -> tuple[int, ...]:
    """How many units each process of the decode node counts for a prompt on a dp rank (R3)."""
    return tuple(
        plan.expected_units(
            prompt_length,
            context=context,
            destination_ranks=ranks_of(plan.destination, dp_rank, process, processes),
        )
        for process in range(processes)
    )
