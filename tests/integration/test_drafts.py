"""Decode with drafts: the plain node's tokens, whatever is drafted, and counts as predicted."""

import asyncio
import functools

import jax
import numpy as np
import pytest
from leases import lent
from nodes import PAGE, Pair, check_pools, generate, generate_all, mixed, wait_until
from paged_model import PagedModel
from random_checkpoint import write_checkpoint
from scripted_drafts import SCRIPT, load_with_drafts, place, predicted, script_of
from serving_model import CONFIG

from jaxdisagg.api import GenerationRequest, SamplingParams
from jaxdisagg.config import BatchConfig, CacheConfig

POSITIONS = 256
BATCH = BatchConfig(chunks=(16, 64), decode_rows=(2, 4), max_model_len=POSITIONS)
LENGTHS = (1, 2, 3, PAGE - 1, PAGE, PAGE + 1, 40, 65, 130)
PROMPTS = [np.random.default_rng(n).integers(0, 250, n).tolist() for n in LENGTHS]
NEW = 24
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=11, logprobs=3)
DRAFTING = {"mtp": True, "batch": BATCH, "cache": CacheConfig(page_size=PAGE, pages=128)}
MESHES = {"tp1": {"tp": 1}, "tp2-dp2": {"tp": 2, "dp": 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafts") / "model"
    write_checkpoint(folder, CONFIG, std=0.25, seed=2)
    return folder


@pytest.fixture(scope="module")
def plain(folder):
    parts = mixed(folder, batch=BATCH)
    yield parts.node
    parts.stop(10.0)


@pytest.fixture(scope="module", params=list(MESHES))
def node(request, folder):
    parts = mixed(folder, load=load_with_drafts, **DRAFTING, **MESHES[request.param])
    yield parts.node
    parts.stop(10.0)


@pytest.fixture(scope="module")
def alone(folder):
    """A node with one pool, whose pages the tests read."""
    parts = mixed(folder, load=load_with_drafts, **DRAFTING)
    yield parts.node
    parts.stop(10.0)


@pytest.fixture(scope="module")
def answers(plain):
    """From sampling parameters (None: greedy) to the plain node's answers to all prompts."""

    @functools.cache
    def answer(sampling):
        name = "greedy" if sampling is None else "sampled"
        return generate_all(plain, PROMPTS, NEW, at_once=4, prefix=name, sampling=sampling)

    return answer


def scripts(right):
    """The scripts of the tests: always right, never, and every other time or so."""
    luck = np.random.default_rng(5).random(right.shape) < 0.5
    wrong = (right + 1) % CONFIG["vocab_size"]
    return {"right": right, "wrong": wrong, "mixed": np.where(luck, right, wrong)}


def use(node, script):
    """Draft by this script from now on, with the counts at zero."""
    wait_until(lambda: not node.state()["requests"], "the node is idle")
    node.runner.params[SCRIPT] = place(node.runner.mesh, script)
    node._steps.drafts |= {"proposed": 0, "accepted": 0}


def right_script(found, prompts=PROMPTS):
    pairs = [(p, g.tokens) for p, g in zip(prompts, found, strict=True)]
    return script_of(pairs, CONFIG["vocab_size"], POSITIONS)


def check_counts(node, script, found, prompts=PROMPTS, max_tokens=NEW):
    expected = [
        predicted(script, p, g.tokens, max_tokens) for p, g in zip(prompts, found, strict=True)
    ]
    proposed, accepted = np.sum(expected, axis=0).tolist()
    assert node.state()["drafts"] == {"proposed": proposed, "accepted": accepted}


def idle(node):
    wait_until(lambda: not node.state()["requests"], "the node is idle")
    check_pools(node)
    contexts = node.prefiller._contexts
    rows = set(range(1, node.runner.cache.context_rows))
    assert all(set(free) == rows and len(free) == len(rows) for free in contexts)


@pytest.mark.parametrize("kind", ["right", "wrong", "mixed"])
@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_are_those_without_drafts(node, answers, kind, sampling):
    expected = answers(sampling)
    script = scripts(right_script(expected))[kind]
    use(node, script)
    compiled = node.runner.compiles.count
    # More requests than seats: rows take the seats of others while those's last step still runs.
    found = generate_all(node, PROMPTS, NEW, at_once=9, prefix=kind, sampling=sampling)
    for a, b in zip(expected, found, strict=True):
        assert b.tokens == a.tokens
        assert b.finish_reason == "length"
        np.testing.assert_allclose(b.logprobs, a.logprobs, atol=1e-4)
    check_counts(node, script, expected)
    if kind == "right":
        assert node.state()["drafts"]["accepted"] >= 0.9 * node.state()["drafts"]["proposed"]
    idle(node)
    assert node.runner.compiles.count == compiled


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_short_answers_end_on_their_token(node, answers, max_tokens):
    expected = answers(None)
    script = right_script(expected)
    use(node, script)
    found = generate_all(node, PROMPTS, max_tokens, at_once=9, prefix="short")
    assert [g.tokens for g in found] == [g.tokens[:max_tokens] for g in expected]
    check_counts(node, script, found, max_tokens=max_tokens)
    idle(node)


@pytest.mark.parametrize("place_in_pair", ["first", "second"])
def test_a_stop_token_ends_the_answer_wherever_it_stands_in_a_step(node, answers, place_in_pair):
    expected, prompt = answers(None)[6], PROMPTS[6]
    # With drafts that are always right a step gives tokens 2k and 2k+1 of the answer. Both stop it,
    # so an answer that goes on behind its end ends twice.
    cut = next(
        i
        for i in range(4, NEW - 1)
        if i % 2 == (place_in_pair == "second")
        and not set(expected.tokens[:i]) & set(expected.tokens[i : i + 2])
    )
    script = right_script(answers(None))
    use(node, script)
    stops = tuple(expected.tokens[cut : cut + 2])
    request = GenerationRequest(f"stop-{place_in_pair}", tuple(prompt), NEW, stop_token_ids=stops)
    found = asyncio.run(generate(node, request))
    assert found.tokens == expected.tokens[:cut]
    assert found.finish_reason == "stop"
    proposed, accepted = predicted(script, prompt, expected.tokens[: cut + 1], NEW)
    assert node.state()["drafts"] == {"proposed": proposed, "accepted": accepted}
    idle(node)
    assert node.failure is None


def test_every_logprob_and_top_list_is_that_of_its_token(node, plain, answers):
    use(node, right_script(answers(None)))
    request = GenerationRequest("top", tuple(PROMPTS[5]), NEW, SamplingParams(logprobs=4))

    async def run(one):
        return [output async for output in one.generate(request)]

    for a, b in zip(asyncio.run(run(plain)), asyncio.run(run(node)), strict=True):
        assert (a.token, [i for i, _ in a.top]) == (b.token, [i for i, _ in b.top])
        np.testing.assert_allclose([v for _, v in a.top], [v for _, v in b.top], atol=1e-4)
    idle(node)


def test_clients_that_leave_and_answers_that_are_whole_lose_nothing(node, answers):
    expected = answers(None)
    use(node, scripts(right_script(expected))["mixed"])

    async def leave(i):
        stream = node.generate(GenerationRequest(f"leave-{i}", tuple(PROMPTS[i % 9]), 100))
        for _ in range(i % 5):
            await anext(stream)
        if i % 3 == 0:
            node.finish(f"leave-{i}")
        await stream.aclose()

    async def run():
        stay = [generate(node, GenerationRequest(f"stay-{i}", tuple(p), NEW))
                for i, p in enumerate(PROMPTS)]  # fmt: skip
        found, *_ = await asyncio.gather(asyncio.gather(*stay), *(leave(i) for i in range(18)))
        return found

    found = asyncio.run(run())
    assert [g.tokens for g in found] == [g.tokens for g in expected]
    idle(node)


def check_module_cache(cache, model, pages, tokens):
    """Row i of the module's cache holds the hidden state of token i, and token i+1."""
    rows = len(tokens) - 3  # the last step's own tokens may not have been run over it
    states = hidden_states(model, tokens[:rows])
    for rank in range(cache.mesh.size):
        kept = cache.read_pages(rank, model.config.num_layers, pages)
        heads = kept.shape[1]
        kept = kept.transpose(0, 3, 1, 2, 4).reshape(-1, heads, 2, 16)[:rows]
        np.testing.assert_array_equal(kept[:, 0, 1, 0], tokens[1 : rows + 1])
        np.testing.assert_array_equal(kept[:, 0, 1, 1], np.arange(rows))
        mine = states.reshape(rows, 4, 16)[:, rank * heads : (rank + 1) * heads]
        np.testing.assert_allclose(kept[:, :, 0], mine, atol=1e-3)


@pytest.mark.parametrize("kind", ["right", "mixed"])
def test_the_module_has_seen_every_hidden_state_once_and_in_its_place(folder, alone, answers, kind):
    expected = answers(None)
    use(alone, scripts(right_script(expected))[kind])
    leased = lent(alone)
    model = PagedModel(folder)
    for i, (prompt, answer) in enumerate(zip(PROMPTS, expected, strict=True)):
        generate_all(alone, [prompt], NEW, prefix=f"seen-{kind}-{i}")
        idle(alone)
        check_module_cache(alone.runner.cache, model, leased[i].pages, [*prompt, *answer.tokens])


@pytest.fixture(scope="module")
def pair(folder):
    with Pair(folder, tp=2, shuffle=True, load=load_with_drafts, **DRAFTING) as pair:
        yield pair


@pytest.mark.parametrize("kind", ["right", "mixed"])
def test_split_nodes_draft_as_a_mixed_one(folder, pair, answers, kind):
    """The module's layer and the hidden state at the prompt's end come from the prefill node."""
    expected = answers(None)
    script = scripts(right_script(expected))[kind]
    model = PagedModel(folder)
    node = pair.decode.node
    use(node, script)
    leased = lent(node)
    for i, prompt in enumerate(PROMPTS):
        (found,) = generate_all(node, [prompt], NEW, prefix=f"split-{kind}-{i}")
        assert found.tokens == expected[i].tokens
        pair.idle()
        check_module_cache(node.runner.cache, model, leased[i].pages, [*prompt, *found.tokens])
    check_counts(node, script, expected)


def hidden_states(model, tokens):
    """f32 [len(tokens), D] of one sequence by prefill steps of the tests' own little engine."""
    model.reset()
    found = []
    for start in range(0, len(tokens), 64):
        batch, where = model.batch({0: tokens[start : start + 64]}, "prefill")
        hidden, model.caches = step_of(model)(model.params, batch, model.caches)
        found.append(np.asarray(hidden)[where[0]])
    return np.concatenate(found)


@functools.cache
def step_of(model):
    return jax.jit(
        lambda params, batch, caches: model.family.forward(
            model.config, params, batch, caches,
            mesh=model.mesh, rules=model.rules, mode="prefill",
        ),
        donate_argnums=2,
    )  # fmt: skip


def test_a_row_writes_its_own_pages_alone(alone, answers):
    """With a lease that is full to its last slot, every other page but scratch stays as it was."""
    cache, expected = alone.runner.cache, answers(None)
    use(alone, right_script(expected))
    leased = lent(alone)
    everything = np.arange(1, cache.pages)
    layers = range(len(cache.layers))
    for i, length in enumerate(LENGTHS[:7]):
        # prompt + max_tokens - 1 rows are a whole number of pages
        max_tokens = -(-(length + NEW - 1) // PAGE) * PAGE - length + 1
        before = [cache.read_pages(0, layer, everything) for layer in layers]
        (found,) = generate_all(alone, [PROMPTS[i]], max_tokens, prefix=f"own-{i}")
        assert found.tokens[:NEW] == expected[i].tokens
        idle(alone)
        after = [cache.read_pages(0, layer, everything) for layer in layers]
        changed = {
            page
            for a, b in zip(before, after, strict=True)
            for page in everything[(a != b).reshape(len(everything), -1).any(1)].tolist()
        }
        assert changed == set(leased[i].pages.tolist())
