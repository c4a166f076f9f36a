"""Rows of a sweep against figures worked by hand: counts, NICs, times, and what cannot be."""

from pathlib import Path

import numpy as np
import pytest
from repository import REPOSITORY

from jaxdisagg.config import NodeConfig
from jaxdisagg.sweep.compute import Device
from jaxdisagg.sweep.nics import imbalance, nic_load
from jaxdisagg.sweep.overlap import Stage, overlap
from jaxdisagg.sweep.predict import Load, Question, Side, fit_side, predict
from jaxdisagg.sweep.shapes import find_config, read_shapes
from jaxdisagg.transfer_plan import Traffic

CONFIGS = REPOSITORY / "scripts" / "model_configs"
BASE = NodeConfig(role="mixed", model=Path("none"))
QUESTION = Question(Device(1000.0, 0.5))
GIGABIT = 8 / 1e9  # seconds of a byte at 1 Gbit/s


def sides(name: str, prefill: str, decode: str) -> tuple[Side, Side]:
    shapes = read_shapes(find_config(name, CONFIGS))
    return fit_side(prefill, BASE, shapes), fit_side(decode, BASE, shapes)


def ask(name: str, prefill: str, decode: str, tokens: int = 4096, question: Question = QUESTION):
    return predict(*sides(name, prefill, decode), tokens, question)


@pytest.mark.parametrize(
    ("name", "prefill", "decode", "page_writes", "bytes_moved", "mapping"),
    [
        # 4,095 tokens are 256 pages of 16; of a page of 62 layers each of 8 heads is 8,192 bytes.
        # The context is one hidden state of 6,144 for each decode rank.
        ("qwen3-coder-480b", "tp=8", "tp=8", 256 * 62 * 8 + 8, 256 * 62 * 65536 + 8 * 12288,
         "the same on both sides"),
        ("qwen3-coder-480b", "tp=8", "tp=4,dp=2", 256 * 62 * 8 + 4, 256 * 62 * 65536 + 4 * 12288,
         "rebuilt: a decode rank's page comes in parts from 2 prefill ranks"),
        ("qwen3-coder-480b", "tp=2", "tp=8", 256 * 62 * 8 + 8, 256 * 62 * 65536 + 8 * 12288,
         "split: a prefill rank's page is cut by heads into 4"),
        ("qwen3-coder-480b", "tp=8", "tp=16", 256 * 62 * 16 + 16,
         2 * 256 * 62 * 65536 + 16 * 12288, "2 decode ranks get copies"),
        ("qwen3-coder-480b", "tp=16", "tp=8", 256 * 62 * 8 + 8, 256 * 62 * 65536 + 8 * 12288,
         "one of 2 prefill ranks with the same heads sends, by the seed"),
        # A latent page of a layer is 16 x 576 x 2 = 18,432 bytes, and every decode rank has one.
        ("deepseek-r1", "tp=8", "tp=8", 256 * 61 * 8 + 8, 256 * 61 * 8 * 18432 + 8 * 14336,
         "each of 8 decode ranks gets a copy of every latent page; 8 of 8 prefill ranks send it"),
        ("deepseek-r1", "tp=8", "tp=4,dp=2", 256 * 61 * 4 + 4, 256 * 61 * 4 * 18432 + 4 * 14336,
         "4 of 8 prefill ranks send it, chosen by the seed, 1 copy at most"),
        ("deepseek-r1", "tp=8", "tp=1", 256 * 61 + 1, 256 * 61 * 18432 + 14336,
         "the decode rank gets a copy of every latent page; 1 of 8"),
        ("deepseek-r1", "tp=4", "tp=8", 256 * 61 * 8 + 8, 256 * 61 * 8 * 18432 + 8 * 14336,
         "4 of 4 prefill ranks send it, 2 copies at most"),
    ],
)  # fmt: skip
def test_counts_are_those_worked_by_hand(name, prefill, decode, page_writes, bytes_moved, mapping):
    row = ask(name, prefill, decode)
    assert row["page_writes"] == page_writes
    assert row["bytes"] == bytes_moved
    assert mapping in row["mapping"]


def test_page_sizes_of_both_sides_count():
    row = ask("qwen3-coder-480b", "tp=8,page_size=64", "tp=8,page_size=64")
    assert row["unit_bytes"] == [32768, 32768]
    assert row["page_writes"] == 64 * 62 * 8 + 8
    assert "tokens are cut" not in row["mapping"]
    # Every 48 tokens are cut at 16, 24 and 32: spans of 16, 8, 8 and 16 tokens, K and V apart, of
    # 256 bytes a token. 4,095 tokens are 85 times 48 and 15 more: 341 spans of a head and plane.
    row = ask("qwen3-coder-480b", "tp=8", "tp=8,page_size=24")
    assert row["unit_bytes"] == [8 * 256, 16 * 256]
    assert row["page_writes"] == 341 * 2 * 62 * 8 + 8
    assert "pages of 16 and 24 tokens are cut at both" in row["mapping"]


def test_nics_share_a_request_evenly_where_every_rank_sends():
    row = ask("qwen3-coder-480b", "tp=8", "tp=4", question=Question(QUESTION.device, nics=(2, 4)))
    pages = 256 * 62 * 65536
    assert row["prefill_nic_bytes"] == pytest.approx(pages / 16, abs=8192 + 12288)
    assert row["decode_nic_bytes"] == pytest.approx(pages / 16, abs=8192 + 12288)
    assert row["prefill_imbalance"] == pytest.approx(1, abs=1e-3)
    assert row["decode_imbalance"] == pytest.approx(1, abs=1e-3)


def test_idle_ranks_of_one_request_are_busy_with_another():
    few, many = (
        ask("deepseek-r1", "tp=8", "tp=4", question=Question(QUESTION.device, seeds=seeds))
        for seeds in (4, 400)
    )
    for row in (few, many):  # four of eight prefill ranks send a request
        assert row["prefill_imbalance"] == pytest.approx(2, abs=1e-3)
        assert row["decode_imbalance"] == pytest.approx(1, abs=1e-3)
    assert many["prefill_imbalance_all"] < few["prefill_imbalance_all"] < 2
    # 400 draws of half of the ranks: 200 +- 10 each, so that 1.2 is four deviations off.
    assert 1 < many["prefill_imbalance_all"] < 1.2


def traffic_of(pages: list[list[int]], context: list[list[int]], unit: int, layers: int):
    units = np.array(pages) * layers
    whole = Traffic(units + np.array(context), units * unit + np.array(context) * 7)
    return Traffic(units, units * unit), whole


def test_units_go_to_a_devices_nics_in_turn_from_layer_to_layer():
    pages, whole = traffic_of([[3, 0], [0, 2]], [[0, 1], [1, 0]], unit=10, layers=2)
    load = nic_load(pages, whole, 2, nics=(2, 1))
    # Three units: two and one, then one and two; two units: one each. A context of 7 bytes each.
    assert load.source.tolist() == [[20, 10, 10, 10], [10, 20, 10, 10], [7, 0, 7, 0]]
    assert load.destination.tolist() == [[30, 20], [30, 20], [7, 7]]
    assert load.both.sum() == 2 * whole.bytes.sum()
    other = nic_load(pages, whole, 2, nics=(1, 3))
    assert other.destination.tolist() == [
        [10, 10, 10, 10, 10, 0],
        [10, 10, 10, 10, 0, 10],
        [7, 0, 0, 7, 0, 0],
    ]


def test_imbalance_is_the_busiest_over_the_mean():
    assert imbalance(np.array([3.0, 1.0])) == 1.5
    assert imbalance(np.array([4.0, 0.0, 0.0, 0.0])) == 4.0
    assert imbalance(np.array([2.0, 2.0])) == 1.0


def stages(*layers: tuple[float, float, list[float]]) -> list[Stage]:
    return [Stage(a, b, np.array(load) / GIGABIT) for a, b, load in layers]


NO_CONTEXT = np.zeros(1)


def test_a_transfer_shorter_than_the_rest_of_its_layer_is_hidden():
    found = overlap(stages((1, 1, [1]), (1, 1, [1])), NO_CONTEXT, gbps=1)
    assert found.compute == 4
    assert found.wire == pytest.approx(2)
    assert found.tail == pytest.approx(0)
    assert found.hidden


def test_the_last_layer_alone_is_exposed_where_transfer_keeps_up():
    # Ready at 1 and 3; sent 1 to 2.5 and 3 to 4.5; the prefill ends at 4.
    found = overlap(stages((1, 1, [1.5]), (1, 1, [1.5])), NO_CONTEXT, gbps=1)
    assert found.hidden
    assert found.tail == pytest.approx(0.5)


def test_a_transfer_longer_than_a_layer_queues_up():
    # Ready at 1 and 3; sent 1 to 4 and 4 to 7; the prefill ends at 4.
    found = overlap(stages((1, 1, [3]), (1, 1, [3])), NO_CONTEXT, gbps=1)
    assert not found.hidden
    assert found.tail == pytest.approx(3)
    faster = overlap(stages((1, 1, [3]), (1, 1, [3])), NO_CONTEXT, gbps=3)
    assert faster.hidden
    assert faster.tail == pytest.approx(0)


def test_the_busiest_nic_decides_and_the_context_comes_last():
    context = np.array([0.0, 0.25]) / GIGABIT
    found = overlap(stages((1, 0, [1, 2]), (1, 0, [1, 0])), context, gbps=1)
    # NIC 0: 1 to 2, 2 to 3. NIC 1: 1 to 3, then 0.25 of context. The prefill ends at 2.
    assert found.tail == pytest.approx(1.25)
    assert found.wire == pytest.approx(2.25)
    assert not found.hidden  # NIC 1 still sends the first layer when the second is ready


def test_a_row_hides_what_its_layers_compute_and_says_where_it_does_not():
    question = Question(QUESTION.device, nic_gbps=(400.0, 1.0))
    fast, slow = ask("qwen3-coder-480b", "tp=8", "tp=8", question=question)["times"]
    # By hand: a layer of 4,095 tokens at 500 TFLOPS, and 256 pages of 8,192 bytes on each NIC.
    attention = 4095 * 40_894_464 + 4095 * 4096 // 2 * 6144
    layer = (attention + 4095 * 96_337_920) / 500e12
    assert fast["layer_compute_ms"] == pytest.approx(layer * 1e3)
    assert fast["compute_ms"] == pytest.approx(62 * layer * 1e3)
    wire = 256 * 8192 * 8 / 400e9
    assert fast["layer_transfer_ms"] == pytest.approx(wire * 1e3, rel=1e-3)
    assert fast["hidden"]
    assert fast["tail_ms"] == pytest.approx(12288 * 8 / 400e9 * 1e3)  # the context
    assert not slow["hidden"]
    # Every layer waits for the one before: all of it, from the first layer's attention on.
    whole = 62 * 256 * 8192 * 8 / 1e9 + 12288 * 8 / 1e9
    assert slow["transfer_ms"] == pytest.approx(whole * 1e3)
    assert slow["tail_ms"] == pytest.approx((attention / 500e12 + whole - 62 * layer) * 1e3)


def test_chunks_change_when_bytes_go_not_how_many():
    whole = ask("smollm2-135m", "tp=1", "tp=1")
    cut = ask("smollm2-135m", "tp=1", "tp=1", question=Question(QUESTION.device, chunk=1000))
    for key in ("compute_ms", "transfer_ms"):
        assert cut["times"][0][key] == pytest.approx(whole["times"][0][key])
    # The last chunk of a layer is a quarter of it, so less is left when the prefill ends.
    assert cut["times"][0]["tail_ms"] < whole["times"][0]["tail_ms"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nics": (0, 1)}, "nics_per_device"),
        ({"nics": (1, 65)}, "nics_per_device: 65, must be at most 64"),
        ({"nic_gbps": ()}, "nic_gbps"),
        ({"nic_gbps": (400.0, 0.0)}, "nic_gbps"),
        ({"chunk": -1}, "chunk: -1"),
        ({"seeds": 0}, "seeds: 0"),
        ({"seeds": 10**11}, "seeds: 100000000000"),
    ],
)
def test_a_question_that_has_no_answer_is_refused_by_field(fields, message):
    with pytest.raises(ValueError, match=message):
        Question(QUESTION.device, **fields)


def test_a_prompt_in_too_many_steps_is_refused():
    question = Question(QUESTION.device, chunk=1, seeds=1)
    assert ask("smollm2-135m", "tp=1", "tp=1", 200, question)["times"][0]["tail_ms"] > 0
    with pytest.raises(ValueError, match="chunk: 1 makes more than 4096 steps of 8000 tokens"):
        ask("smollm2-135m", "tp=1", "tp=1", 8000, question)


def test_a_load_without_requests_is_refused():
    with pytest.raises(ValueError, match="requests: 0"):
        Load((100,), 0)


def test_sides_that_cannot_be_mapped_are_refused_by_field():
    source, _ = sides("qwen3-30b", "tp=1", "tp=1")
    shapes = read_shapes(find_config("qwen3-30b", CONFIGS), dtype="float32")
    with pytest.raises(ValueError, match="itemsize: 2 on the prefill node, 4 on the decode node"):
        predict(source, fit_side("tp=1", BASE, shapes), 100, QUESTION)
