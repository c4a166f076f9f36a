"""Prefill nodes whose triggers come through slots, as a GPU's do: CPU devices play the GPUs.

Each device's call stores the step's number into its slot and the poller finds it there. So values
are skipped, and nothing but the slots says which layers are written.
"""

import golden_serving
import numpy as np
import pytest
from nodes import CHUNK, PAGE, Pair, generate_all, timing_of, wait_until

from jaxdisagg.config import BatchConfig
from jaxdisagg.page_spans import pages_for

TOLERANCE = 1e-3
READ = ("triggers", "no_plan_triggers")
FEW = BatchConfig(chunks=(CHUNK,), decode_rows=(8,), max_model_len=256)

CASES = {
    "qwen3-tp2-to-tp4": ("qwen3_serving", {"tp": 2}, {"tp": 4}, {}),
    "deepseek-tp1-to-tp2-mtp": (
        "deepseek_serving",
        {"tp": 1},
        {"tp": 2},
        {"mtp": True, "batch": FEW},
    ),
}


def open_slots(pair: Pair) -> None:
    """After warm-up: a program finds the slots when it runs, however it was compiled."""
    shards = pair.prefill.runner.cache.shards()
    pair.prefill.engine.open_slots(
        sorted({shard.ordinal for shard in shards}),
        1 + max(shard.layer for shard in shards),
        device=False,
    )


@pytest.fixture(scope="module", params=list(CASES))
def served(request, golden_folder):
    model, prefill, decode, more = CASES[request.param]
    folder = golden_folder(model)
    golden = golden_serving.load(model, folder)
    assert golden.gap > TOLERANCE, "a flip would prove nothing"
    sides = {"prefill": prefill, "decode": decode}
    with Pair(folder, shuffle=True, **sides, **more) as pair:
        open_slots(pair)
        yield pair, golden, decode["tp"]


def test_tokens_are_those_of_transformers(served):
    pair, golden, _ = served
    new = min(8, golden.tokens.shape[1])
    counters_of = pair.prefill.engine.counters
    # The engine's thread reads them a moment after the steps have run.
    wait_until(lambda: len({counters_of()[n] for n in READ}) == 1, "triggers are read")
    warm_up = counters_of()
    assert warm_up["triggers"] == warm_up["no_plan_triggers"] > 0
    found = generate_all(pair.decode.node, golden.prompts, new, at_once=8, prefix="golden")
    for i, generated in enumerate(found):
        assert generated.tokens == golden.tokens[i, :new].tolist(), f"prompt {i}"
        expected = golden.logprobs[i, :new]
        np.testing.assert_allclose(generated.logprobs, expected, atol=TOLERANCE, err_msg=f"{i}")
    pair.idle()
    counters = pair.prefill.engine.counters()
    assert counters["triggers"] > warm_up["triggers"]
    assert counters["no_plan_triggers"] == warm_up["triggers"]  # slots tell what plans await
    assert counters["trigger_faults"] == counters["ring_overflows"] == counters["steps_live"] == 0


def test_page_writes_agree_with_the_layout(served):
    pair, _, written = served
    length = 100
    before = pair.decode.node.state()["page_writes"], pair.prefill.node.state()["page_writes"]
    prompt = np.random.default_rng(length).integers(0, 250, length).tolist()
    generate_all(pair.decode.node, [prompt], 2, prefix="count")
    layers = len(pair.prefill.runner.cache.layers)
    expected = pages_for(length, PAGE) * layers * written + written
    assert timing_of(pair.decode.node, "count-0").page_writes == expected
    pair.idle()
    after = pair.decode.node.state()["page_writes"], pair.prefill.node.state()["page_writes"]
    assert [b - a for a, b in zip(before, after, strict=True)] == [expected, expected]
