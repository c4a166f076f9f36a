"""A prefill node on devices that no NIC reads: its pages go through pinned memory.

The CPU's devices play GPUs, and the fake driver copies, late and at random.
"""

import numpy as np
import pytest
from fake_cuda import FakeCuda
from nodes import PAGE, Pair, generate_all, mixed, timing_of, wait_until

from ffi_transport.engine import TransferEngine
from ffi_transport.types import MemoryRegion
from jaxdisagg.page_spans import pages_for

PROMPTS = [
    np.random.default_rng(length).integers(0, 250, length).tolist()
    for length in (2, PAGE, PAGE + 1, 100, 193)
]


@pytest.fixture
def prefill_on_gpus(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """What engines with a trace register is memory of a GPU: a Pair's prefill node's."""
    register = TransferEngine.register_memory

    def on_gpu(
        self: TransferEngine, address: int, length: int, *more: object, device: int | None = None
    ) -> MemoryRegion:
        return register(self, address, length, *more, device=0 if self.config.trace else device)  # type: ignore[arg-type]

    monkeypatch.setattr(TransferEngine, "register_memory", on_gpu)
    fake_cuda.set_delay(5, 2000)
    return fake_cuda


def test_tokens_are_those_of_one_process(golden_folder, prefill_on_gpus):
    folder = golden_folder("qwen3_untied")
    pinned = prefill_on_gpus.live("host")
    with Pair(folder, tp=2, shuffle=True, trace=True) as pair:
        got = generate_all(pair.decode.node, PROMPTS, 6, at_once=3)
        pair.idle()
        layers = len(pair.prefill.runner.cache.layers)
        timing = timing_of(pair.decode.node, "r-3")
        assert timing.page_writes == pages_for(100, PAGE) * layers * 2 + 2
        held = lambda: pair.prefill.engine.counters()["staging_bytes_held"]  # noqa: E731
        wait_until(lambda: held() == 0, "pinned memory is given back")
        counters = pair.prefill.engine.counters()
        assert prefill_on_gpus.live("host") == pinned + 1
    assert counters["regions_staged"] == 2 * (layers + 1)
    assert counters["staged_bytes"] == counters["bytes_completed"] > 0
    assert counters["staging_failures"] == counters["trigger_faults"] == 0
    assert prefill_on_gpus.live("host") == pinned
    node = mixed(folder, tp=2)
    try:
        want = generate_all(node.node, PROMPTS, 6)
    finally:
        node.stop(10.0)
    assert [one.tokens for one in got] == [one.tokens for one in want]
