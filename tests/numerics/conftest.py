"""Models of the golden cases on their meshes, each kept for the session with its compiled steps."""

import functools
from collections.abc import Callable
from pathlib import Path

import golden_logits
import pytest
from drafting_model import DraftingModel
from golden_logits import Golden, MtpGolden
from paged_model import PagedModel


@pytest.fixture(scope="session")
def golden(golden_folder: Callable[[str], Path]) -> Callable[[str], Golden]:
    return functools.cache(lambda name: golden_logits.load(name, golden_folder(name)))


@pytest.fixture(scope="session")
def mtp_golden(golden_folder: Callable[[str], Path]) -> Callable[[str], MtpGolden]:
    return functools.cache(lambda name: golden_logits.load_mtp(name, golden_folder(name)))


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
