"""What transformers answers to the prompts of the end-to-end tests, for the serving models.

The folders of the random ones come from the fixture `golden_folder`, that of SmolLM2 from
`smollm2_folder`. `numerics/make_goldens.py` has made the files.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.checkpoint import weights_fingerprint

GOLDENS = Path(__file__).resolve().parents[1] / "numerics" / "goldens"


@dataclass(frozen=True)
class ServingGolden:
    """Greedy continuations in f32; lists and first axes run over the prompts."""

    prompts: list[list[int]]
    tokens: np.ndarray  # int32 [prompts, new tokens]; goes on after an end-of-text token
    logprobs: np.ndarray  # f32 [prompts, new tokens], of those tokens
    first_ids: np.ndarray  # int32 [prompts, n] the best first tokens, best first
    first_logprobs: np.ndarray  # f32 [prompts, n]
    gap: float  # the smallest difference of the best two logits over all of `tokens` and `drafts`
    # int32 [prompts, new tokens] what the MTP module drafts for each token, having seen all before
    # it; -1 for the first new token of a prompt of one, which it cannot. None without a module.
    drafts: np.ndarray | None = None

    def accepted(self, prompt: int, count: int | None = None) -> tuple[int, int]:
        """(drafts verified, drafts that are right) when a step verifies one draft, if it has one.

        For the first `count` new tokens. A step that emits the last of them has no use for a draft
        beyond it.
        """
        assert self.drafts is not None
        count = self.tokens.shape[1] if count is None else count
        at = verified = right = 0
        while at < count:
            # The step runs the token before `at` and, where it has one, the draft of `at`.
            draft = self.drafts[prompt, at]
            at += 1
            if draft < 0 or at >= count:
                continue
            verified += 1
            if draft == self.tokens[prompt, at - 1]:
                right, at = right + 1, at + 1
        return verified, right


def check_completions(answers: list[Any], golden: ServingGolden, tolerance: float = 1e-3) -> None:
    """Each prompt's answer of /v1/completions has the golden's text and logprobs."""
    for i, answer in enumerate(answers):
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        assert choice["text"] == bytes(golden.tokens[i].tolist()).decode(errors="replace")
        found = choice["logprobs"]["token_logprobs"]
        np.testing.assert_allclose(found, golden.logprobs[i], atol=tolerance, err_msg=f"prompt {i}")


def load(name: str, folder: Path) -> ServingGolden:
    """The golden of a model of golden_cases.SERVING, or of `smollm2` (20 prompts, 32 tokens).

    Raises AssertionError when the weights in `folder` are not those that it was made with.
    """
    with np.load(GOLDENS / f"{name}.npz") as data:
        assert weights_fingerprint(folder) == str(data["fingerprint"]), "other weights than golden"
        count = range(sum(key.startswith("tokens_") for key in data))

        def stack(key: str) -> np.ndarray:
            return np.stack([data[f"{key}_{i}"] for i in count])

        return ServingGolden(
            [data[f"tokens_{i}"].tolist() for i in count],
            stack("greedy"),
            stack("logprobs"),
            stack("first_ids"),
            stack("first_logprobs"),
            float(data["gap"]),
            stack("drafts") if "drafts_0" in data else None,
        )
