"""Prefill and decode apart: tokens, pages, counts, order, and what is left behind."""

import asyncio
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from leases import lent
from nodes import CHUNK, PAGE, Pair, generate_all, timing_of, wait_until

from ffi_transport.engine import TransferEngine
from jaxdisagg.api import GenerationRequest, RequestError, SamplingParams
from jaxdisagg.config import BatchConfig, CacheConfig, NodeConfig, Timeouts
from jaxdisagg.model_loading import LoadedModel, load_model
from jaxdisagg.page_spans import pages_for
from jaxdisagg.registration import RemoteCache
from models.interface import Hook, ModelFamily

LENGTHS = (1, 2, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 1)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(1000 * seed + length).integers(0, 250, length).tolist()


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def pair(request, golden_folder):
    with Pair(golden_folder("qwen3_untied"), tp=2, shuffle=True, dtype=request.param) as pair:
        yield pair


@pytest.mark.parametrize("length", LENGTHS)
def test_pages_and_context_arrive_byte_for_byte(pair, length):
    sources, destinations = lent(pair.prefill.node), lent(pair.decode.node)
    generate_all(pair.decode.node, [prompt(length)], 1, prefix=f"pages-{length}")
    pair.idle()
    if length == 1:
        assert not sources
        return
    ((_, source),), ((_, destination),) = sources, destinations
    n = pages_for(length, PAGE)
    assert len(source) == n
    filled = (length - 1) % PAGE or PAGE
    prefill, decode = pair.prefill.runner.cache, pair.decode.runner.cache
    for rank in range(2):
        for layer in range(len(prefill.layers)):
            sent = prefill.read_pages(rank, layer, source)
            got = decode.read_pages(rank, layer, destination[:n])
            # The decoder itself has written the last prompt token, into the last page's next row
            # or into a page of its own.
            sent[-1, :, :, filled:], got[-1, :, :, filled:] = 0, 0
            assert zlib.crc32(sent.tobytes()) == zlib.crc32(got.tobytes()), (rank, layer)
            assert sent.astype(np.float32).any(axis=(1, 2, 3, 4)).all(), (
                "an empty page proves nothing"
            )
    contexts = [
        cache.read_pages(rank, len(prefill.layers), np.array([cache.context_rows - 1]))
        for cache in (prefill, decode)
        for rank in range(2)
    ]
    assert contexts[0].astype(np.float32).any()
    assert len({zlib.crc32(row.tobytes()) for row in contexts}) == 1, "a row for each device"


def test_counts_agree_on_both_sides(pair):
    before = pair.decode.node.state()["page_writes"], pair.prefill.node.state()["page_writes"]
    generate_all(pair.decode.node, [prompt(100)], 4, prefix="count")
    timing = timing_of(pair.decode.node, "count-0")
    layers = len(pair.prefill.runner.cache.layers)
    expected = pages_for(100, PAGE) * layers * 2 + 2  # two ranks, each with its context
    assert timing.page_writes == expected
    pair.idle()
    after = pair.decode.node.state()["page_writes"], pair.prefill.node.state()["page_writes"]
    assert [b - a for a, b in zip(before, after, strict=True)] == [expected, expected]
    assert timing.prefill_node == "prefill-0"
    assert timing.pages == pages_for(100, PAGE)
    prefill = pair.prefill.runner.cache
    rows = prefill.context.nbytes // prefill.context.shape[0]
    assert timing.bytes == timing.pages * layers * 2 * prefill.page_bytes + 2 * rows
    terms = timing.queue + timing.prefill + timing.exposed_transfer + timing.first_decode
    assert terms == pytest.approx(timing.ttft, abs=1e-6)


def test_addresses_stay_over_a_thousand_steps_and_nothing_is_compiled(pair):
    compiled = pair.decode.runner.compiles.count
    prompts = [prompt(40, seed) for seed in range(40)]
    generate_all(pair.decode.node, prompts, 200, at_once=8, prefix="long")
    pair.idle()
    assert pair.decode.runner.cache.check_addresses() is None
    assert pair.prefill.runner.cache.check_addresses() is None
    assert pair.decode.runner.compiles.count == compiled
    counters = pair.prefill.engine.counters()
    assert counters["ring_overflows"] == 0
    assert counters["trigger_faults"] == 0


def test_clients_that_leave_at_any_moment_lose_no_page(pair):
    async def leave(i: int) -> None:
        stream = pair.decode.node.generate(
            GenerationRequest(f"leave-{i}", tuple(prompt(150, i)), 40, SamplingParams())
        )
        task = asyncio.create_task(anext(stream))
        done, _ = await asyncio.wait({task}, timeout=0.003 * i)
        if not done:
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await stream.aclose()

    async def run() -> None:
        await asyncio.gather(*(leave(i) for i in range(24)))

    asyncio.run(run())
    pair.idle()
    first = generate_all(pair.decode.node, [prompt(150)], 8, prefix="after")
    again = generate_all(pair.decode.node, [prompt(150)], 8, prefix="after-2")
    assert first[0].tokens == again[0].tokens


class HeldFamily:
    """Its steps with a trigger wait at the last layer, while `engine` is known and posts.

    Until the engine has posted pages of layer 0 of as many steps as came so far.
    """

    engine: TransferEngine | None = None

    def __init__(self, base: ModelFamily) -> None:
        self._base = base
        self._steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def forward(self, config: Any, *arguments: Any, hook: Hook | None = None, **more: Any) -> Any:
        def held(step: jax.Array, x: jax.Array, cache: jax.Array, layer: int) -> jax.Array:
            if layer == config.num_layers - 1:
                zero = jax.pure_callback(self._wait, jax.ShapeDtypeStruct((), x.dtype), x[0, 0])
                x = x + zero
            return hook(step, x, cache, layer)

        return self._base.forward(config, *arguments, hook=hook and held, **more)

    def _wait(self, x: Any) -> np.ndarray:
        if self.engine is not None:
            self._steps += 1
            try:
                wait_until(self._posted, "pages of layer 0 are posted")
            except AssertionError:
                self.engine = None
        return np.zeros((), x.dtype)

    def _posted(self) -> bool:
        trace = self.engine.trace()
        first = trace[(trace["kind"] == b"post") & (trace["layer"] == 0)]
        return len(np.unique(first["step"])) >= self._steps


def test_a_layer_is_posted_before_the_last_layer_has_run(golden_folder):
    """By recorded order: the engine notes every trigger and every post as it happens."""
    few = BatchConfig(chunks=(CHUNK,), decode_rows=(2,), max_model_len=128)
    families = {}

    def load(node: NodeConfig, devices: Sequence[jax.Device]) -> LoadedModel:
        model = load_model(node, devices)
        families[node.role] = HeldFamily(model.family)
        return replace(model, family=families[node.role])

    with Pair(golden_folder("qwen3_untied"), trace=True, batch=few, load=load) as pair:
        families["prefill"].engine = pair.prefill.engine
        generate_all(pair.decode.node, [prompt(60, i) for i in range(6)], 1, prefix="order")
        pair.idle()
        trace = pair.prefill.engine.trace()
    last = len(pair.prefill.runner.cache.layers) - 1
    steps = [s for s in np.unique(trace["step"]) if s > 0]
    early = 0
    for step in steps:
        of = trace[trace["step"] == step]
        triggers = of[of["kind"] == b"trigger"]
        assert triggers["layer"].tolist() == list(range(last + 2)), "each layer once, in order"
        posts = of[of["kind"] == b"post"]
        assert set(posts["layer"]) == set(range(last + 2))
        finished = triggers[triggers["layer"] == last]["order"][0]
        early += (posts[posts["layer"] == 0]["order"] < finished).all()
        for layer in range(last + 2):  # never before its own trigger
            fired = triggers[triggers["layer"] == layer]["order"][0]
            assert (posts[posts["layer"] == layer]["order"] > fired).all()
    assert early == len(steps), f"layer 0 was posted early in {early} of {len(steps)} steps"


def test_a_prompt_of_one_token_needs_no_prefill_node(pair):
    before = pair.prefill.node.state()["outcomes"]
    (found,) = generate_all(pair.decode.node, [[7]], 5, prefix="one")
    assert len(found.tokens) == 5
    assert pair.prefill.node.state()["outcomes"] == before


@pytest.mark.slow
def test_a_queue_longer_than_the_pools_is_served(golden_folder):
    small = {"cache": CacheConfig(page_size=PAGE, pages=24)}
    with Pair(golden_folder("qwen3_untied"), prefill=small, decode=small) as pair:
        found = generate_all(
            pair.decode.node, [prompt(120, i) for i in range(12)], 30, at_once=12, prefix="queue"
        )
        assert all(len(g.tokens) == 30 for g in found)
        wait_until(lambda: not pair.decode.node.state()["requests"], "idle")
        pair.idle()


@pytest.mark.parametrize("when", ["awaiting", "decoding"])
def test_a_write_that_comes_twice_fails_its_request_and_fences_the_writer(golden_folder, when):
    """One unit too many on the request's slot, from the prefill node's own engine."""
    with Pair(golden_folder("qwen3_untied")) as pair:
        node, messenger = pair.decode.node, pair.decode.messenger
        (peer,) = pair.prefill.node.messenger._peers
        region = pair.prefill.engine.register_memory(*scratch(pair.prefill.runner.cache))
        hello = pair.prefill.node.messenger._peers[peer].hello
        remote = RemoteCache(hello).layers(0, 0)[0]

        def write_again():
            (attempt,) = messenger._attempts._by_request.values()
            count = attempt.expected[0] + 1 if when == "awaiting" else 1
            transfer = pair.prefill.engine.open_transfer(peer, attempt.slot)
            for _ in range(count):
                pair.prefill.engine.write(transfer, region, 0, remote, 0, 16)
            pair.prefill.engine.seal(transfer)

        async def run():
            stream = node.generate(GenerationRequest("twice", tuple(prompt(60)), 300))
            if when == "decoding":
                await anext(stream)
                write_again()
            else:
                original = messenger.begin

                def begin(active):
                    messenger.begin = original
                    original(active)
                    write_again()

                messenger.begin = begin
            async for _ in stream:
                pass

        with pytest.raises(RequestError, match="page-writes were counted where") as caught:
            asyncio.run(run())
        assert caught.value.status == 502
        pair.idle()
        assert pair.decode.engine.counters()["overshoots"] == 1
        wait_until(lambda: messenger.unavailable() is None, "connected again after the fence")
        assert generate_all(node, [prompt(60)], 3, prefix="after")[0].finish_reason == "length"


def test_nodes_that_do_not_fit_refuse_each_other_by_field(golden_folder):
    few = BatchConfig(chunks=(16,), decode_rows=(2,), max_model_len=32)
    decode = {"dtype": "bfloat16"}
    both = {"batch": few, "timeouts": Timeouts(connect=1.0), "connected": False}
    with Pair(golden_folder("qwen3_untied"), decode=decode, **both) as pair:
        wait_until(
            lambda: "refused" in (pair.decode.messenger.unavailable() or ""), "it was refused"
        )
        assert "dtype: bfloat16 at decode-0, float32 at prefill-0" in pair.decode.node.ready()[1]
        with pytest.raises(RequestError, match="itemsize: 2 at decode-0") as caught:
            generate_all(pair.decode.node, [prompt(20)], 2)
        assert caught.value.status == 503


def scratch(cache):
    """Address and length of the scratch page of the first layer's first shard."""
    return cache.shards()[0].address, cache.page_bytes
