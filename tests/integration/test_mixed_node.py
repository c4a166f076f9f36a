"""The mixed node by itself: batching, cancels, limits, sampling, and pages that come back."""

import asyncio
import re
import time
from dataclasses import replace

import jax
import pytest
from golden_cases import CASES
from nodes import check_pools, generate_all, mixed, wait_until

from jaxdisagg.api import GenerationRequest, RequestError, SamplingParams
from jaxdisagg.config import CacheConfig, Timeouts
from jaxdisagg.model_loading import load_model

PROMPTS = [[(7 * i + j) % 250 for j in range(length)] for i, length in enumerate((1, 5, 40, 130))]


@pytest.fixture(scope="module")
def node(golden_folder):
    assert "qwen3_untied" in CASES
    parts = mixed(golden_folder("qwen3_untied"))
    yield parts.node
    parts.stop(10.0)


def test_tokens_do_not_depend_on_what_else_runs(node):
    alone = [g.tokens for g in generate_all(node, PROMPTS, 10, prefix="alone")]
    together = [g.tokens for g in generate_all(node, PROMPTS, 10, at_once=4, prefix="together")]
    assert alone == together


def test_seeded_sampling_repeats_and_differs_by_seed(node):
    def tokens(seed: int, prefix: str) -> list[list[int]]:
        how = SamplingParams(temperature=1.0, top_p=0.9, seed=seed)
        found = generate_all(node, PROMPTS, 12, at_once=4, prefix=prefix, sampling=how)
        return [g.tokens for g in found]

    first = tokens(5, "a")
    assert tokens(5, "b") == first
    assert tokens(6, "c") != first


def test_a_stop_token_ends_the_answer_and_is_not_in_it(node):
    (whole,) = generate_all(node, PROMPTS[2:3], 8, prefix="whole")
    stop = whole.tokens[4]
    cut = whole.tokens.index(stop)

    async def run():
        request = GenerationRequest("stopped", tuple(PROMPTS[2]), 8, stop_token_ids=(stop,))
        return [output async for output in node.generate(request)]

    outputs = asyncio.run(run())
    assert [o.token for o in outputs] == [*whole.tokens[:cut], None]
    assert outputs[-1].finish_reason == "stop"


def test_logprobs_are_as_many_as_asked_for(node):
    async def run():
        request = GenerationRequest("lp", tuple(PROMPTS[1]), 3, SamplingParams(logprobs=5))
        return [output async for output in node.generate(request)]

    for output in asyncio.run(run()):
        assert len(output.top) == 5
        assert output.top[0] == (output.token, pytest.approx(output.logprob, abs=1e-6))


def test_an_answer_that_is_whole_before_its_last_token_is_finished(node):
    before = dict(node.state()["outcomes"])

    async def run():
        stream = node.generate(GenerationRequest("whole", tuple(PROMPTS[3]), 200))
        await anext(stream)
        node.finish("whole")
        await stream.aclose()

    asyncio.run(run())
    wait_until(lambda: not node.state()["requests"], "the request is gone")
    after = node.state()["outcomes"]
    assert after["finished"] == before.get("finished", 0) + 1
    assert after.get("cancelled") == before.get("cancelled")
    wait_until(lambda: node.pools[0].counts().free == node.pools[0].counts().total, "pages")


def test_a_client_that_leaves_frees_its_pages(node):
    async def run():
        stream = node.generate(GenerationRequest("left", tuple(PROMPTS[3]), 200))
        await anext(stream)
        await stream.aclose()

    asyncio.run(run())
    wait_until(lambda: not node.state()["requests"], "the request is gone")
    check_pools(node)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [(500, 20, "exceed the 512 tokens"), (10, 503, "exceed the 512 tokens")],
)
def test_what_never_fits_is_a_400_that_names_the_limit(node, prompt, max_tokens, message):
    with pytest.raises(RequestError, match=message) as caught:
        generate_all(node, [[1] * prompt], max_tokens, prefix="never")
    assert caught.value.status == 400


def test_requests_wait_for_pages_and_all_are_served(golden_folder):
    parts = mixed(golden_folder("qwen3_untied"), cache=CacheConfig(page_size=16, pages=12))
    try:
        prompts = [[(3 * i + j) % 250 for j in range(60)] for i in range(10)]
        found = generate_all(parts.node, prompts, 20, at_once=10)
        assert all(len(g.tokens) == 20 and g.finish_reason == "length" for g in found)
        wait_until(lambda: parts.node.pools[0].counts().free == 11, "every page is free again")
        with pytest.raises(RequestError, match=r"needs 12 cache pages .* has 11"):
            generate_all(parts.node, [[1] * 100], 90)
    finally:
        parts.stop(10.0)


@pytest.mark.parametrize("mtp", [False, True])
def test_logits_that_are_not_finite_fail_their_request(golden_folder, mtp):
    """Token 9 has an embedding of NaN: who meets it fails, who does not goes on."""

    def damaged(config, devices):
        model = load_model(config, devices)
        table = model.params["embedding.table"]
        bad = jax.device_put(table.at[9].set(float("nan")), table.sharding)
        return replace(model, params=model.params | {"embedding.table": bad})

    folder = golden_folder("deepseek_serving" if mtp else "qwen3_untied")
    parts = mixed(folder, load=damaged, mtp=mtp)
    try:
        with pytest.raises(RequestError, match="not finite for token 1") as found:
            generate_all(parts.node, [[1, 9, 3, 4]], 4, prefix="bad")
        assert (found.value.status, found.value.code) == (500, "not_finite")
        (whole,) = generate_all(parts.node, [[1, 2, 3, 4]], 4, prefix="good")
        assert len(whole.tokens) == 4
    finally:
        parts.stop(10.0)


def test_nothing_is_compiled_after_warm_up(node):
    before = node.runner.compiles.count  # of this process: other nodes of it compiled as well
    generate_all(node, PROMPTS * 3, 5, at_once=12, prefix="warm")
    assert node.runner.compiles.count == before


def test_a_request_that_waits_too_long_is_told_what_for(golden_folder):
    parts = mixed(golden_folder("qwen3_untied"), cache=CacheConfig(page_size=16, pages=12))
    admission = parts.node._admission
    try:

        async def run():
            first = parts.node.generate(GenerationRequest("long", (1,) * 10, 160))
            await anext(first)  # holds all the pages
            admission._node = replace(admission._node, timeouts=Timeouts(queue=0.2))
            waited = r"waited (\d+\.\d) s for 2 cache pages; 0 are free"
            with pytest.raises(RequestError, match=waited) as caught:
                await anext(parts.node.generate(GenerationRequest("waits", (1,) * 10, 20)))
            assert float(re.search(waited, str(caught.value))[1]) >= 0.2
            assert len([output async for output in first]) == 159

        parts.node.runner.decode = slowly(parts.node.runner.decode)
        asyncio.run(run())
    finally:
        parts.stop(10.0)


def slowly(f):
    def slow(*arguments):
        time.sleep(0.01)
        return f(*arguments)

    return slow
