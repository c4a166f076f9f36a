"""The models against transformers: whole prompts, chunks, and paged decode, on several meshes."""

from collections.abc import Callable

import numpy as np
import pytest
from golden_cases import CASES, NEW_TOKENS
from paged_model import PagedModel, log_softmax

LOGITS_BAR = 1e-3  # f32, largest difference of any logit

MESHES = [(1, 1), (2, 1), (4, 1), (1, 2)]  # (tp, dp)
# Every mesh for one case, and for the others the one that shards most; the rest is for test-all.
FAST = [("qwen3_untied", *mesh) for mesh in MESHES] + [
    (name, 4, 1) for name in CASES if name != "qwen3_untied"
]
ALL = [(name, *mesh) for name in CASES for mesh in [*MESHES, (4, 2)]]
MATRIX = [
    pytest.param(*case, id="{}-tp{}-dp{}".format(*case), marks=[] if case in FAST else [slow])
    for slow in [pytest.mark.slow]
    for case in ALL
]

every_mesh = pytest.mark.parametrize(("name", "tp", "dp"), MATRIX)


def assert_logits(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.shape == b.shape
        worst = np.abs(a - b).max()
        assert worst < LOGITS_BAR, f"prompt {i}: logits differ by {worst}"


def assert_continuation(model: PagedModel, last: list[np.ndarray], golden) -> None:
    tokens, logprobs = model.continue_greedily(last, NEW_TOKENS)
    np.testing.assert_array_equal(tokens, golden.greedy)
    assert np.abs(logprobs - golden.logprobs).max() < LOGITS_BAR


@every_mesh
def test_whole_prompts_and_greedy_decode(
    name: str, tp: int, dp: int, paged_model: Callable[..., PagedModel], golden
) -> None:
    expected, model = golden(name), paged_model(name, tp, dp)
    logits = model.prefill(expected.prompts, chunk=128)
    assert_logits(logits, expected.logits)
    assert_continuation(model, [rows[-1] for rows in logits], expected)


@every_mesh
def test_chunked_prefill(
    name: str, tp: int, dp: int, paged_model: Callable[..., PagedModel], golden
) -> None:
    expected = golden(name)
    for chunk in (7, 16, 33):
        model = paged_model(name, tp, dp)
        logits = model.prefill(expected.prompts, chunk)
        assert_logits(logits, expected.logits)
    assert_continuation(model, [rows[-1] for rows in logits], expected)


@every_mesh
def test_prompts_token_by_token(
    name: str, tp: int, dp: int, paged_model: Callable[..., PagedModel], golden
) -> None:
    expected, model = golden(name), paged_model(name, tp, dp)
    assert_logits(model.teacher_forced(expected.prompts), expected.logits)


def test_a_dropped_page_is_noticed(paged_model: Callable[..., PagedModel], golden) -> None:
    """The comparison itself can fail: one page of zeros changes tokens and logprobs."""
    expected, model = golden("qwen3_untied"), paged_model("qwen3_untied", 2)
    logits = model.prefill(expected.prompts, chunk=128)
    for number, prompt in enumerate(expected.prompts):
        model.drop_page(number, (len(prompt) - 1) // 16)
    tokens, logprobs = model.continue_greedily([rows[-1] for rows in logits], NEW_TOKENS)
    assert ((tokens != expected.greedy).any(1)).all()
    # The first token comes from the undamaged prefill; the second has seen the hole.
    assert (np.abs(logprobs - expected.logprobs)[:, 1] > LOGITS_BAR).all()


# bf16 keeps 8 bits, so tokens are not compared: the golden's tokens are forced and their logprobs
# compared. Measured for both models on tp 1 and 4: mean up to 0.048, largest 0.170; the bars are
# twice that.
BF16_MEAN, BF16_MAX = 0.1, 0.35


@pytest.mark.parametrize(
    ("name", "tp", "dp"), [("qwen3_untied", 4, 1), ("llama_rope_llama3", 1, 1)]
)
def test_bfloat16_logprobs_stay_close(
    name: str, tp: int, dp: int, paged_model: Callable[..., PagedModel], golden
) -> None:
    expected, model = golden(name), paged_model(name, tp, dp, dtype="bfloat16")
    first = model.prefill(expected.prompts, chunk=33)
    forced = [tokens[:-1].tolist() for tokens in expected.greedy]
    later = model.teacher_forced(forced)
    errors = []
    for i, tokens in enumerate(expected.greedy):
        logits = np.concatenate([first[i][-1:], later[i]])
        ours = log_softmax(logits)[np.arange(NEW_TOKENS), tokens]
        errors.append(np.abs(ours - expected.logprobs[i]))
    assert np.mean(errors) < BF16_MEAN
    assert np.max(errors) < BF16_MAX
