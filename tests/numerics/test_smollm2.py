"""The real small model against transformers: 20 prompts, f32, whole and on three tensor ranks."""

from pathlib import Path

import numpy as np
import pytest
from paged_model import ROWS, PagedModel, log_softmax

from models.checkpoint import weights_fingerprint

GOLDEN = Path(__file__).resolve().parent / "goldens" / "smollm2.npz"
PROMPTS, NEW_TOKENS = 20, 32


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 3])
def test_smollm2_continues_as_transformers_does(tp: int, smollm2_folder: Path) -> None:
    with np.load(GOLDEN) as golden:
        assert weights_fingerprint(smollm2_folder) == str(golden["fingerprint"])
        prompts = [golden[f"tokens_{i}"].tolist() for i in range(PROMPTS)]
        greedy = np.stack([golden[f"greedy_{i}"] for i in range(PROMPTS)])
        first_ids = np.stack([golden[f"first_ids_{i}"] for i in range(PROMPTS)])
        first_logprobs = np.stack([golden[f"first_logprobs_{i}"] for i in range(PROMPTS)])
    model = PagedModel(smollm2_folder, tp=tp)
    for start in range(0, PROMPTS, ROWS):
        part = slice(start, start + ROWS)
        model.reset()
        last = [rows[-1] for rows in model.prefill(prompts[part], chunk=33)]
        logprobs = np.take_along_axis(log_softmax(np.stack(last)), first_ids[part], axis=1)
        assert np.abs(logprobs - first_logprobs[part]).max() < 1e-3
        tokens, _ = model.continue_greedily(last, NEW_TOKENS)
        np.testing.assert_array_equal(tokens, greedy[part])
