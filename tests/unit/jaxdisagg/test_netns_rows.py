"""What a bed's rows are compared with: the bars, and what must add up of a split deployment."""

import re
from dataclasses import replace

import pytest

from jaxdisagg.bench.netns_bars import add_speed_ups, missed_bars
from jaxdisagg.bench.netns_nodes import Answer, Split

PAGE = 64 << 10


def row_of(nics, gbps, *, peer_nics=None, page_bytes=PAGE):
    return {
        "nics": nics,
        "peer_nics": peer_nics or nics,
        "page_bytes": page_bytes,
        "gbps": gbps,
        "of_line": gbps / (nics * 0.125),
    }


def test_bars_are_missed_below_them_alone():
    rows = [row_of(1, 0.1126), row_of(2, 0.2027), row_of(4, 0.3829)]
    add_speed_ups(rows)
    assert [row["speed_up"] for row in rows] == pytest.approx([1.0, 1.8002, 3.4005], abs=1e-4)
    assert missed_bars(rows) == []
    rows = [row_of(1, 0.1124), row_of(2, 0.2020), row_of(4, 0.3820)]
    add_speed_ups(rows)
    one, two, four = missed_bars(rows)
    assert one.startswith("1 NIC: 89.9% of the line rate")
    assert two.startswith("2 NICs: 1.80 times one, below 1.8")
    assert four.startswith("4 NICs: 3.40 times one, below 3.4")


def test_bars_are_those_of_one_page_size_and_equal_numbers():
    rows = [row_of(1, 0.05, page_bytes=4096), row_of(2, 0.12, peer_nics=4), row_of(2, 0.15)]
    add_speed_ups(rows)
    assert [row["speed_up"] for row in rows] == [1.0, None, None]
    assert missed_bars(rows) == []


ANSWERS = (Answer(("a", "b"), (-0.5, -0.25), 6), Answer(("c",), (-1.0,), 4))
SPLIT = Split(ANSWERS, 10, 10, (500, 500), (600, 540), (5, 5))


def test_a_split_that_adds_up_has_no_problem():
    assert SPLIT.problem(ANSWERS) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"answers": (ANSWERS[0], Answer(("d",), (-1.0,), 4))}, r"answer 1: \('d',\) apart"),
        ({"answers": (ANSWERS[0], Answer(("c",), (-1.0,), 3))}, r"page-writes: .*\(10, 10, 10\)"),
        ({"pushed": 11}, r"page-writes: .*\(11, 10, 10\)"),
        ({"counted": 9}, r"page-writes: .*\(10, 9, 10\)"),
        ({"received_units": (5, 4)}, r"page-writes: .*\(10, 10, 9\)"),
        ({"frame_bytes": (1100, 40)}, "nic1 has sent 40 bytes, the engine says 500"),
    ],
)
def test_a_split_that_does_not_add_up_is_told(change, words):
    problem = replace(SPLIT, **change).problem(ANSWERS)
    assert problem is not None
    assert re.search(words, problem)
