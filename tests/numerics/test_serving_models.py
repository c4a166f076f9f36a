"""The models of the end-to-end tests against their goldens, so that a fault there is not theirs."""

from collections.abc import Callable
from pathlib import Path

import golden_serving
import numpy as np
import pytest
from drafting_model import DraftingModel
from golden_cases import SERVING
from golden_serving import ServingGolden
from paged_model import ROWS, PagedModel, log_softmax


def assert_generations(model: PagedModel, golden: ServingGolden, most: int) -> None:
    for start in range(0, len(golden.prompts), most):
        part = slice(start, start + most)
        model.reset()
        last = [rows[-1] for rows in model.prefill(golden.prompts[part], chunk=64)]
        first = np.take_along_axis(log_softmax(np.stack(last)), golden.first_ids[part], axis=1)
        assert np.abs(first - golden.first_logprobs[part]).max() < 1e-3
        tokens, logprobs = model.continue_greedily(last, golden.tokens.shape[1])
        np.testing.assert_array_equal(tokens, golden.tokens[part])
        assert np.abs(logprobs - golden.logprobs[part]).max() < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 3])
def test_smollm2_continues_as_transformers_does(tp: int, smollm2_folder: Path) -> None:
    golden = golden_serving.load("smollm2", smollm2_folder)
    assert len(golden.prompts) == 20
    assert_generations(PagedModel(smollm2_folder, tp=tp), golden, ROWS)


@pytest.mark.parametrize(
    ("name", "tp", "dp", "ep"),
    [
        ("qwen3_serving", 4, 2, 1),
        ("qwen3_moe_serving", 2, 1, 1),
        pytest.param("qwen3_moe_serving", 4, 2, 8, marks=pytest.mark.slow),
        pytest.param("deepseek_serving", 1, 1, 1, marks=pytest.mark.slow),
        pytest.param("deepseek_serving", 4, 2, 8, marks=pytest.mark.slow),
    ],
)
def test_the_serving_models_continue_as_transformers_does(
    name: str, tp: int, dp: int, ep: int, golden_folder: Callable[[str], Path]
) -> None:
    folder = golden_folder(name)
    golden = golden_serving.load(name, folder)
    lengths, each = SERVING[name]
    assert [len(prompt) for prompt in golden.prompts] == np.repeat(lengths, each).tolist()
    assert golden.gap > 1e-3
    assert_generations(PagedModel(folder, tp=tp, dp=dp, ep=ep), golden, ROWS * dp)


@pytest.mark.parametrize(("tp", "dp", "ep"), [(2, 1, 1)])
def test_the_serving_model_drafts_as_the_reference_does(
    tp: int, dp: int, ep: int, golden_folder: Callable[[str], Path]
) -> None:
    folder = golden_folder("deepseek_serving")
    golden = golden_serving.load("deepseek_serving", folder)
    assert golden.drafts is not None
    model = DraftingModel(folder, tp=tp, dp=dp, ep=ep)
    for start in range(0, len(golden.prompts), ROWS * dp):
        numbers = range(start, min(start + ROWS * dp, len(golden.prompts)))
        every = [[*golden.prompts[i], *golden.tokens[i].tolist()] for i in numbers]
        main, drafts = model.follow(every, chunk=64)
        for number, logits, drafted in zip(numbers, main, drafts, strict=True):
            new = slice(len(golden.prompts[number]) - 1, None)
            np.testing.assert_array_equal(logits[new].argmax(-1), golden.tokens[number])
            # Row i of the module is about token i + 2: there is none about token 1.
            said = np.array([-1, *drafted.argmax(-1)])[new][: len(golden.tokens[number])]
            np.testing.assert_array_equal(said, golden.drafts[number])


def test_some_drafts_are_right_and_some_wrong(golden_folder: Callable[[str], Path]) -> None:
    """So that both ends of a verification are met; counted along the steps that would run."""
    golden = golden_serving.load("deepseek_serving", golden_folder("deepseek_serving"))
    verified, right = np.sum([golden.accepted(i) for i in range(len(golden.prompts))], axis=0)
    assert verified > 200
    assert 30 < right < verified - 30
