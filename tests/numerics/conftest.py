"""Models of the golden cases on their meshes, each kept with its compiled steps while it is used.

A compiled model takes some 500 memory maps. Linux gives a process 65530, and XLA crashes when they
are used up: so the tests of a model run side by side, and the last few models alone are kept.
"""

import functools
import gc
from collections.abc import Callable
from pathlib import Path

import golden_logits
import pytest
from drafting_model import DraftingModel
from golden_logits import Golden, MtpGolden
from paged_model import PagedModel

HERE = Path(__file__).parent
KEPT_MODELS = 8


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of one model on one mesh side by side, where the first of them stands."""

    def model(item: pytest.Item) -> tuple[object, ...]:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        here = HERE in item.path.parents and "mesh" in params
        return (params["name"], params["mesh"]) if here else (item.nodeid,)

    first: dict[tuple[object, ...], int] = {}
    for i, item in enumerate(items):
        first.setdefault(model(item), i)
    items.sort(key=lambda item: first[model(item)])


@pytest.fixture(scope="session")
def golden(golden_folder: Callable[[str], Path]) -> Callable[[str], Golden]:
    return functools.cache(lambda name: golden_logits.load(name, golden_folder(name)))


@pytest.fixture(scope="session")
def mtp_golden(golden_folder: Callable[[str], Path]) -> Callable[[str], MtpGolden]:
    return functools.cache(lambda name: golden_logits.load_mtp(name, golden_folder(name)))


@pytest.fixture(scope="session")
def paged_model(golden_folder: Callable[[str], Path]) -> Callable[..., PagedModel]:
    """A model by case, tp, dp, ep and dtype, its cache emptied."""

    @functools.lru_cache(maxsize=KEPT_MODELS)
    def build(name: str, tp: int, dp: int, ep: int, dtype: str) -> PagedModel:
        gc.collect()  # a model that was dropped is a cycle
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

    @functools.lru_cache(maxsize=KEPT_MODELS)
    def build(name: str, tp: int, dp: int, ep: int) -> DraftingModel:
        gc.collect()
        return DraftingModel(golden_folder(name), tp=tp, dp=dp, ep=ep)

    return build
