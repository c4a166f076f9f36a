"""Models of the golden cases on their meshes, each kept for the session with its compiled steps."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from golden_cases import NEW_TOKENS, PROMPT_LENGTHS
from paged_model import PagedModel

from models.checkpoint import weights_fingerprint

GOLDENS = Path(__file__).resolve().parent / "goldens"


@dataclass(frozen=True)
class Golden:
    """What transformers gives for each prompt; lists are parallel."""

    prompts: list[list[int]]
    logits: list[np.ndarray]  # f32 [L, V]
    greedy: np.ndarray  # [prompts, NEW_TOKENS]
    logprobs: np.ndarray  # f32 [prompts, NEW_TOKENS]


@pytest.fixture(scope="session")
def golden(golden_folder: Callable[[str], Path]) -> Callable[[str], Golden]:
    @functools.cache
    def load(name: str) -> Golden:
        with np.load(GOLDENS / f"{name}.npz") as data:
            made_with = str(data["fingerprint"])
            count = range(len(PROMPT_LENGTHS))
            result = Golden(
                [data[f"tokens_{i}"].tolist() for i in count],
                [data[f"logits_{i}"] for i in count],
                np.stack([data[f"greedy_{i}"] for i in count]),
                np.stack([data[f"logprobs_{i}"] for i in count]),
            )
        assert weights_fingerprint(golden_folder(name)) == made_with, "other weights: make goldens"
        assert result.greedy.shape == (len(PROMPT_LENGTHS), NEW_TOKENS)
        return result

    return load


@pytest.fixture(scope="session")
def paged_model(golden_folder: Callable[[str], Path]) -> Callable[..., PagedModel]:
    """A model by case, tp, dp and dtype, its cache emptied."""

    @functools.cache
    def build(name: str, tp: int, dp: int, dtype: str) -> PagedModel:
        return PagedModel(golden_folder(name), tp=tp, dp=dp, dtype=dtype)

    def fresh(name: str, tp: int = 1, dp: int = 1, dtype: str = "float32") -> PagedModel:
        model = build(name, tp, dp, dtype)
        model.reset()
        return model

    return fresh
