"""Models of the golden cases on their meshes, each kept for the session with its compiled steps."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from drafting_model import DraftingModel
from golden_cases import NEW_TOKENS, PROMPT_LENGTHS
from paged_model import PagedModel

from models.checkpoint import weights_fingerprint

GOLDENS = Path(__file__).resolve().parent / "goldens"
MARGIN = 1e-3  # choices of experts closer than this are not in the goldens


@dataclass(frozen=True)
class Golden:
    """What transformers gives for each prompt; lists are parallel."""

    prompts: list[list[int]]
    logits: list[np.ndarray]  # f32 [L, V]
    greedy: np.ndarray  # [prompts, NEW_TOKENS]
    logprobs: np.ndarray  # f32 [prompts, NEW_TOKENS]


@dataclass(frozen=True)
class MtpGolden:
    """What the reference of the MTP module gives; lists are parallel."""

    sequences: list[list[int]]  # the prompts, each with its greedy continuation
    logits: list[np.ndarray]  # f32 [rows, V], row i for token i + 2 of the sequence
    drafts: np.ndarray  # [prompts, NEW_TOKENS] for each greedy token, -1 where there is none


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
            assert data.get("margin", np.inf) >= MARGIN, "a choice of experts is a close call"
        assert weights_fingerprint(golden_folder(name)) == made_with, "other weights: make goldens"
        assert result.greedy.shape == (len(PROMPT_LENGTHS), NEW_TOKENS)
        return result

    return load


@pytest.fixture(scope="session")
def mtp_golden(golden: Callable[[str], Golden]) -> Callable[[str], MtpGolden]:
    def load(name: str) -> MtpGolden:
        main = golden(name)
        count = range(len(main.prompts))
        with np.load(GOLDENS / f"{name}.npz") as data, np.load(GOLDENS / f"{name}_mtp.npz") as mtp:
            assert str(data["fingerprint"]) == str(mtp["fingerprint"])
            return MtpGolden(
                [[*main.prompts[i], *main.greedy[i].tolist()] for i in count],
                [mtp[f"mtp_{i}"] for i in count],
                np.stack([data[f"drafts_{i}"] for i in count]),
            )

    return load


@pytest.fixture(scope="session")
def paged_model(golden_folder: Callable[[str], Path]) -> Callable[..., PagedModel]:
    """A model by case, tp, dp, ep and dtype, its cache emptied."""

    @functools.cache
    def build(name: str, tp: int, dp: int, ep: int, dtype: str) -> PagedModel:
        return PagedModel(golden_folder(name), tp=tp, dp=dp, ep=ep, dtype=dtype)

    def fresh(
        name: str, tp: int = 1, dp: int = 1, ep: int = 1, dtype: str = "float32"
    ) -> PagedModel:
        model = build(name, tp, dp, ep, dtype)
        model.reset()
        return model

    return fresh


@pytest.fixture(scope="session")
def drafting_model(golden_folder: Callable[[str], Path]) -> Callable[..., DraftingModel]:
    """The same with the MTP module, in f32; `follow` and `reset` empty its cache."""

    @functools.cache
    def build(name: str, tp: int, dp: int, ep: int) -> DraftingModel:
        return DraftingModel(golden_folder(name), tp=tp, dp=dp, ep=ep)

    return build
