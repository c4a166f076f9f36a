"""The models of the end-to-end tests against their goldens, so that a fault there is not theirs."""

from collections.abc import Callable
from pathlib import Path

import golden_serving
import numpy as np
import pytest
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


@pytest.mark.parametrize(("tp", "dp"), [(4, 2)])
def test_the_serving_model_continues_as_transformers_does(
    tp: int, dp: int, golden_folder: Callable[[str], Path]
) -> None:
    folder = golden_folder("qwen3_serving")
    golden = golden_serving.load("qwen3_serving", folder)
    assert len(golden.prompts) == 60
    assert golden.gap > 1e-3
    assert_generations(PagedModel(folder, tp=tp, dp=dp), golden, ROWS * dp)
