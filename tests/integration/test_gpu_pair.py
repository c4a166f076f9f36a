"""Whole nodes whose XLA buffers are said to be GPU memory, over the fake CUDA driver.

XLA's CPU buffers play device memory: what the arrivals thread copies goes into the live, donated
buffers of nodes that step meanwhile. Nothing of this ran on a GPU.
"""

import asyncio
import contextlib
import functools
import time

import nodes
import numpy as np
import pytest
from fake_cuda import VARIABLE, FakeCuda
from leases import lent
from nodes import PAGE, Pair, generate_all, mixed, timing_of, wait_until
from page_tap import POISON, memory_of

from jaxdisagg import cache
from jaxdisagg.api import GenerationRequest, RequestError, SamplingParams, TokenOutput
from jaxdisagg.page_spans import pages_for

COPY = "cuMemcpyHtoDAsync_v2"
FLUSH = "cuFlushGPUDirectRDMAWrites"
FLUSH_OPTIONS = 117  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS
INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE
LENGTHS = (2, PAGE, PAGE + 1, 40, 100, 193)


def prompt(length, seed=0):
    return np.random.default_rng(1000 * seed + length).integers(0, 250, length).tolist()


@pytest.fixture(scope="module")
def cuda(fake_cuda_library):
    """The fake driver, for engines of this whole module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(fake_cuda_library))
        yield FakeCuda(fake_cuda_library)


@pytest.fixture
def fake(cuda):
    """As after a fresh start, for one test."""
    cuda.reset()
    yield cuda
    cuda.reset()


def pair_of(folder, gpus, mode):
    """Two nodes of which these of the process's CPUs are said to be GPUs, by number."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "cuda_device", lambda d: d.id if d.id in gpus else None)
        return Pair(folder, tp=2, shuffle=True, device_memory=mode)


@pytest.fixture(scope="module")
def both_staged(cuda, oracle, golden_folder):  # the oracle compiles before it counts
    """Both nodes' memory is reached through host memory."""
    with pair_of(golden_folder("qwen3_untied"), range(8), "staged") as pair:
        yield pair


@pytest.fixture(scope="module")
def staged(cuda, golden_folder):
    """The decode node's alone, so that streams that are held hold up no source."""
    with pair_of(golden_folder("qwen3_untied"), range(2, 8), "staged") as pair:
        yield pair


def poison(node):
    """Fill a decode node's memory, scratch included, with what nothing here computes."""
    for view in memory_of(node.runner.cache).values():
        view[:] = POISON


@pytest.fixture(scope="module")
def oracle(golden_folder):
    """Tokens of a mixed node by prompt."""
    parts = mixed(golden_folder("qwen3_untied"), tp=2)

    @functools.cache
    def tokens(length, seed=0, max_tokens=12):
        (found,) = generate_all(
            parts.node, [prompt(length, seed)], max_tokens, prefix=f"o-{length}-{seed}"
        )
        return found.tokens

    yield tokens
    parts.stop(10.0)


def fabric(parts):
    return parts.node.state()["fabric"]


def test_staged_nodes_answer_as_one_node_and_count_as_they_write(fake, both_staged, oracle):
    fake.set_delay(5, 300)
    pair = both_staged
    poison(pair.decode)
    layers = len(pair.prefill.runner.cache.layers)
    for length in LENGTHS:
        (found,) = generate_all(pair.decode.node, [prompt(length)], 12, prefix=f"s-{length}")
        assert found.tokens == oracle(length), length
        expected = pages_for(length, PAGE) * layers * 2 + 2
        assert timing_of(pair.decode.node, f"s-{length}-0").page_writes == expected
    # Eight at once: pages are copied into buffers that steps of other requests use.
    prompts = [prompt(60 + 17 * i, i) for i in range(8)]
    found = generate_all(pair.decode.node, prompts, 12, at_once=8, prefix="many")
    assert [f.tokens for f in found] == [oracle(60 + 17 * i, i) for i in range(8)]
    pair.idle()
    decode, prefill = fabric(pair.decode), fabric(pair.prefill)
    assert decode["memory"] == prefill["memory"] == "staged"
    assert pair.decode.node.state()["page_writes"] == decode["units_received"]
    assert decode["units_received"] == prefill["units_completed"]
    assert decode["arrival_bytes"] == prefill["bytes_completed"]
    assert decode["arrivals_failed"] == decode["arrivals_dropped"] == decode["overshoots"] == 0
    assert pair.decode.runner.cache.check_addresses() is None
    assert pair.decode.node.state()["compiles_after_warm_up"] == 0


def test_staged_pages_and_context_arrive_byte_for_byte(fake, both_staged):
    fake.set_delay(9, 500)
    pair = both_staged
    poison(pair.decode)
    sources, destinations = lent(pair.prefill.node), lent(pair.decode.node)
    generate_all(pair.decode.node, [prompt(100)], 1)
    pair.idle()
    ((_, source),), ((_, destination),) = sources, destinations
    filled = 99 % PAGE
    sent, got = memory_of(pair.prefill.runner.cache), memory_of(pair.decode.runner.cache)
    layers = len(pair.prefill.runner.cache.layers)
    for (rank, layer), view in got.items():
        there = sent[rank, layer]
        if layer == layers:  # the first row is scratch, one was lent
            (row,) = [row for row in view[1:] if (row != POISON).any()]
            assert any((row == other).all() for other in there[1:])
            continue
        n = len(source)
        mine, theirs = view[destination[:n]].copy(), there[source].copy()
        mine[-1, :, :, filled:] = theirs[-1, :, :, filled:] = 0  # decode has gone on there
        np.testing.assert_array_equal(mine, theirs)
        others = np.setdiff1d(np.arange(1, len(view)), destination)
        assert (view[others] == POISON).all(), "no other page was touched"


@contextlib.asynccontextmanager
async def held(fake):
    """Streams stand still inside."""
    fake.hold(True)
    try:
        yield
    finally:
        fake.hold(False)


def begun(pair):
    """A request whose first token is waited for."""
    request = GenerationRequest("held", tuple(prompt(150)), 8, SamplingParams())
    stream = pair.decode.node.generate(request)
    return stream, asyncio.ensure_future(anext(stream))


async def until(condition, what):
    deadline = time.monotonic() + nodes.WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.005)


def copying(fake):
    return any(COPY in line for line in fake.log())


def test_a_request_cancelled_while_its_pages_are_copied_leaves_them_alone(fake, staged, oracle):
    pair = staged

    async def leave():
        async with held(fake):
            stream, task = begun(pair)
            await until(lambda: copying(fake), "its copies have begun")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await stream.aclose()
            await asyncio.sleep(0.1)
            pools = [pool.counts() for pool in pair.decode.node.pools]
            assert any(pool.free < pool.total for pool in pools), "held till they have ended"

    for _ in range(3):
        asyncio.run(leave())
        pair.idle()
        ran = len([line for line in fake.log() if f"ran {COPY}" in line])
        poison(pair.decode)  # the pages are nobody's
        time.sleep(0.02)
        assert len([line for line in fake.log() if f"ran {COPY}" in line]) == ran
        assert all((v == POISON).all() for v in memory_of(pair.decode.runner.cache).values())
        (found,) = generate_all(pair.decode.node, [prompt(193)], 12, prefix="after")
        assert found.tokens == oracle(193)
        fake.reset()
    assert fabric(pair.decode)["arrivals_dropped"] >= 1
    assert not pair.decode.node.failure


def test_a_prefill_node_that_dies_while_pages_are_copied_ends_the_request_alone(
    fake, golden_folder
):
    with pair_of(golden_folder("qwen3_untied"), range(2, 8), "staged") as pair:

        async def lose():
            async with held(fake):
                _, task = begun(pair)
                await until(lambda: copying(fake), "its copies have begun")
                pair.prefill.engine.close()
                await asyncio.sleep(0.1)
            return (await asyncio.gather(task, return_exceptions=True))[0]

        answer = asyncio.run(lose())
        # The count may have been told before the loss was: then it is an answer.
        if isinstance(answer, RequestError):
            assert answer.code == "prefill_node_lost"
        else:
            assert isinstance(answer, TokenOutput), answer
            assert answer.token is not None
        wait_until(lambda: not pair.decode.node.state()["requests"], "no request is open")
        nodes.check_pools(pair.decode.node)
        poison(pair.decode)
        time.sleep(0.05)
        assert all((v == POISON).all() for v in memory_of(pair.decode.runner.cache).values())
        assert not pair.decode.node.failure


def test_a_copy_that_fails_fails_its_request_and_no_other(fake, staged, oracle):
    pair = staged
    fake.fail(COPY, INVALID_VALUE, skip=3)
    with pytest.raises(RequestError, match=r"not come into the device.*INVALID") as got:
        generate_all(pair.decode.node, [prompt(100)], 12)
    assert (got.value.status, got.value.code) == (500, "prefill_failed")
    pair.idle()
    (found,) = generate_all(pair.decode.node, [prompt(100)], 12, prefix="next")
    assert found.tokens == oracle(100)
    assert fabric(pair.decode)["arrivals_failed"] == 1


def test_a_request_starts_after_its_flush_where_a_nic_wrote_its_pages(
    fake, golden_folder, oracle, monkeypatch
):
    """The loopback provider plays a NIC that reaches device memory."""
    for device in range(8):
        fake.set_attribute(device, FLUSH_OPTIONS, 1)
    engine_for = nodes.engine_for
    monkeypatch.setattr(
        nodes, "engine_for", lambda node, **more: engine_for(node, provider="loopback", **more)
    )
    with pair_of(golden_folder("qwen3_untied"), range(8), "direct") as pair:
        prefilled = pair.decode.node.prefilled

        def note(active, now):
            fake.note(f"starts {active.id}")
            prefilled(active, now)

        monkeypatch.setattr(pair.decode.node, "prefilled", note)
        for length in (40, 100):
            (found,) = generate_all(pair.decode.node, [prompt(length)], 12, prefix=f"d-{length}")
            assert found.tokens == oracle(length)
        pair.idle()
        seen = [line for line in fake.log() if FLUSH in line or line.startswith("starts")]
        # Once for each device and request, and before it starts.
        kinds = ["flush" if FLUSH in line else line for line in seen]
        assert kinds == ["flush", "flush", "starts d-40-0", "flush", "flush", "starts d-100-0"]
        assert not copying(fake)
        assert fabric(pair.decode)["memory"] == "direct"
        assert fabric(pair.decode)["arrival_flushes"] == 4
