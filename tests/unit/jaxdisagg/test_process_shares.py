"""Equal shares of a node's devices, and the tp ranks of each dp rank in them."""

import pytest

from jaxdisagg.cache_layout import CacheLayout
from jaxdisagg.process_shares import devices_of, process_of, ranks_of


@pytest.mark.parametrize(
    ("tp", "dp", "processes", "held"),
    [
        # held[dp_rank][process]: written down by hand
        (2, 1, 1, [[[0, 1]]]),
        (2, 1, 2, [[[0], [1]]]),
        (4, 1, 2, [[[0, 1], [2, 3]]]),
        (1, 2, 2, [[[0], []], [[], [0]]]),
        (2, 2, 2, [[[0, 1], []], [[], [0, 1]]]),
        (2, 2, 4, [[[0], [1], [], []], [[], [], [0], [1]]]),
        (4, 3, 2, [[[0, 1, 2, 3], []], [[0, 1], [2, 3]], [[], [0, 1, 2, 3]]]),
    ],
)
def test_each_process_holds_its_ranks(tp, dp, processes, held):
    layout = CacheLayout("mla", 1, 1, 8, 4, 4, tp, dp)
    found = [
        [list(ranks_of(layout, dp_rank, process, processes)) for process in range(processes)]
        for dp_rank in range(dp)
    ]
    assert found == held
    for process in range(processes):
        for device in devices_of(process, layout.devices, processes):
            assert process_of(device, layout.devices, processes) == process
