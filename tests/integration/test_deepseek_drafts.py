"""DeepSeek with its MTP module: transformers' tokens, and as many drafts right as its module has.

The reference's drafts are a golden; how many of them a step verifies is counted by hand from it.
"""

import golden_serving
import numpy as np
import pytest
from nodes import Pair, generate_all, mixed

from jaxdisagg.api import SamplingParams
from jaxdisagg.config import BatchConfig

NAME = "deepseek_serving"
TOLERANCE = 1e-3
BATCH = BatchConfig(chunks=(16, 64), decode_rows=(8,), max_model_len=256)


@pytest.fixture(scope="module")
def golden(golden_folder):
    golden = golden_serving.load(NAME, golden_folder(NAME))
    assert golden.gap > TOLERANCE, "a flip would prove nothing"
    return golden


def check(node, golden, at_once, prefix, count=None):
    """The tokens of all prompts, and the drafts that were verified meanwhile."""
    count = count or golden.tokens.shape[1]
    before = node.state()["drafts"]
    found = generate_all(node, golden.prompts, count, at_once=at_once, prefix=prefix)
    for i, generated in enumerate(found):
        assert generated.tokens == golden.tokens[i, :count].tolist(), f"prompt {i}"
        np.testing.assert_allclose(
            generated.logprobs, golden.logprobs[i, :count], atol=TOLERANCE, err_msg=f"{i}"
        )
    after = node.state()["drafts"]
    expected = np.sum([golden.accepted(i, count) for i in range(len(found))], axis=0).tolist()
    assert [after[key] - before[key] for key in ("proposed", "accepted")] == expected
    assert expected[1] > 0, "without a right draft the second token is never tried"


@pytest.fixture(scope="module")
def node(golden_folder):
    parts = mixed(golden_folder(NAME), tp=2, mtp=True, batch=BATCH)
    yield parts.node
    parts.stop(10.0)


def test_a_mixed_node(node, golden):
    check(node, golden, 8, "eight")
    check(node, golden, 1, "short", count=5)


@pytest.mark.slow  # test_family_pairs.py has some split nodes with drafts in every run
@pytest.mark.parametrize(
    ("tp", "dp", "ep"), [(1, 1, 1), (4, 1, 4), (1, 2, 2), (2, 2, 4), (2, 2, 1)]
)
def test_every_mesh(golden, golden_folder, tp, dp, ep):
    with Pair(
        golden_folder(NAME), shuffle=True, tp=tp, dp=dp, ep=ep, mtp=True, batch=BATCH
    ) as pair:
        check(pair.decode.node, golden, 16, "mesh")
        pair.idle()


def test_sampled_tokens_are_those_without_drafts(node, golden, golden_folder):
    how = SamplingParams(temperature=0.7, top_p=0.9, seed=3, logprobs=0)

    def tokens(one):
        found = generate_all(
            one, golden.prompts[::3], 24, at_once=6, prefix="sampled", sampling=how
        )
        return [g.tokens for g in found]

    before = node.state()["drafts"]["accepted"]
    drafted = tokens(node)
    assert node.state()["drafts"]["accepted"] > before
    parts = mixed(golden_folder(NAME), tp=2, batch=BATCH)
    try:
        assert drafted == tokens(parts.node)
    finally:
        parts.stop(10.0)
