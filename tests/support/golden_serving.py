"""What transformers answers to the prompts of the end-to-end tests, for both serving models.

The folder of the random one comes from the fixture `golden_folder("qwen3_serving")`, that of
SmolLM2 from `smollm2_folder`. `numerics/make_goldens.py` has made the files.
"""

from dataclasses import dataclass
from pathlib import Path

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
    gap: float  # the smallest difference of the best two logits over all of `tokens`


def load(name: str, folder: Path) -> ServingGolden:
    """The golden `qwen3_serving` (60 prompts, 12 tokens, 5 best) or `smollm2` (20, 32, 20).

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
        )
