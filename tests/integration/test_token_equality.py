"""f32: disaggregated tokens = mixed tokens = transformers' tokens, on every mesh.

bf16 is compared by teacher-forced logprobs elsewhere (tests/numerics) and by page checksums
(test_split_nodes.py): its argmax flips between meshes, which proves nothing either way.
"""

import golden_serving
import jax
import numpy as np
import pytest
from nodes import Pair, generate_all, mixed

from jaxdisagg.config import BatchConfig, CacheConfig

TOLERANCE = 1e-3


def check(found, golden, new_tokens):
    assert len(found) == len(golden.prompts)
    for i, generated in enumerate(found):
        assert generated.tokens == golden.tokens[i, :new_tokens].tolist(), f"prompt {i}"
        np.testing.assert_allclose(
            generated.logprobs, golden.logprobs[i, :new_tokens], atol=TOLERANCE, err_msg=f"{i}"
        )


@pytest.fixture(scope="module", params=[1, 2, 4], ids=lambda tp: f"tp{tp}")
def random_model(request, golden_folder):
    folder = golden_folder("qwen3_serving")
    golden = golden_serving.load("qwen3_serving", folder)
    assert golden.gap > TOLERANCE, "a flip would prove nothing"
    tp = request.param
    parts = mixed(folder, tp=tp)
    with Pair(folder, tp=tp, shuffle=True) as pair:
        yield pair, parts, golden
    parts.stop(10.0)


@pytest.mark.parametrize("at_once", [1, 8])
def test_random_qwen3(random_model, at_once):
    pair, parts, golden = random_model
    new = golden.tokens.shape[1]
    apart = generate_all(
        pair.decode.node, golden.prompts, new, at_once=at_once, prefix=f"p{at_once}"
    )
    check(apart, golden, new)
    together = generate_all(parts.node, golden.prompts, new, at_once=at_once, prefix=f"m{at_once}")
    check(together, golden, new)
    pair.idle()


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"tp": 2}, {"tp": 4}),
        pytest.param({"tp": 4}, {"tp": 1, "dp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_unequal_tp(golden_folder, prefill, decode):
    """Pages are split among more decode devices, or rebuilt from the parts of more prefill ones."""
    folder = golden_folder("qwen3_serving")
    golden = golden_serving.load("qwen3_serving", folder)
    new = golden.tokens.shape[1]
    with Pair(folder, prefill=prefill, decode=decode, shuffle=True) as pair:
        found = generate_all(pair.decode.node, golden.prompts, new, at_once=8)
        check(found, golden, new)
        pair.idle()


@pytest.mark.slow
def test_dp_two_on_both_sides(golden_folder):
    folder = golden_folder("qwen3_serving")
    golden = golden_serving.load("qwen3_serving", folder)
    new = golden.tokens.shape[1]
    with Pair(folder, tp=2, dp=2, shuffle=True) as pair:
        found = generate_all(pair.decode.node, golden.prompts, new, at_once=16)
        check(found, golden, new)
        pair.idle()


def test_a_damaged_page_is_seen(golden_folder):
    """The control: with one page of one layer zeroed before decode, tokens or logprobs differ."""
    folder = golden_folder("qwen3_serving")
    golden = golden_serving.load("qwen3_serving", folder)
    prompt = golden.prompts[-1]
    with Pair(folder) as pair:
        node = pair.decode.node
        original = node.prefilled

        def damage(active, now):
            page = int(active.lease.pages[3])
            cache = pair.decode.runner.cache
            layers = list(cache.layers)
            layers[1] = jax.jit(lambda c: c.at[page].set(0), donate_argnums=0)(layers[1])
            cache.layers = tuple(layers)
            original(active, now)

        node.prefilled = damage
        (found,) = generate_all(node, [prompt], golden.tokens.shape[1])
    with pytest.raises(AssertionError):
        check([found], golden_of(golden, len(golden.prompts) - 1), golden.tokens.shape[1])


def golden_of(golden, i):
    return golden_serving.ServingGolden(
        golden.prompts[i : i + 1],
        golden.tokens[i : i + 1],
        golden.logprobs[i : i + 1],
        golden.first_ids[i : i + 1],
        golden.first_logprobs[i : i + 1],
        golden.gap,
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("new", [8, pytest.param(32, marks=pytest.mark.slow)])
def test_smollm2(smollm2_folder, tp, new):
    golden = golden_serving.load("smollm2", smollm2_folder)
    sizes = {
        "batch": BatchConfig(chunks=(64,), decode_rows=(8,), max_model_len=512),
        "cache": CacheConfig(page_size=16, pages=300),
    }
    with Pair(smollm2_folder, tp=tp, shuffle=True, **sizes) as pair:
        found = generate_all(pair.decode.node, golden.prompts, new, at_once=8)
        check(found, golden, new)
        pair.idle()
    parts = mixed(smollm2_folder, tp=tp, **sizes)
    try:
        check(generate_all(parts.node, golden.prompts, new, at_once=8), golden, new)
    finally:
        parts.stop(10.0)
