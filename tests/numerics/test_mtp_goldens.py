"""The MTP module against the reference of the published one: whole, in chunks, token by token."""

from collections.abc import Callable

import numpy as np
import pytest
from drafting_model import DraftingModel
from golden_cases import CASES, MTP_CASES, NEW_TOKENS
from golden_meshes import MESHES, Mesh, fits, label

LOGITS_BAR = 1e-3  # f32, largest difference of any logit

FAST = {
    "deepseek_yarn": [(1, 1, 1), (2, 2, 4)],
    "deepseek_tied": [(4, 1, 1)],
}
EVERY_MESH = [
    pytest.param(
        name,
        mesh,
        id=label(name, mesh),
        marks=[] if mesh in FAST[name] else [pytest.mark.slow],
    )
    for name in MTP_CASES
    for mesh in MESHES
    if fits(CASES[name][0], mesh)
]
every_mesh = pytest.mark.parametrize(("name", "mesh"), EVERY_MESH)


def check(model: DraftingModel, chunk: int | None, main, mtp) -> None:
    """Both models' logits along prompts and continuations, and what follows from them."""
    logits, drafts = model.follow(mtp.sequences, chunk)
    for i, prompt in enumerate(main.prompts):
        assert np.abs(logits[i][: len(prompt)] - main.logits[i]).max() < LOGITS_BAR
        assert drafts[i].shape == mtp.logits[i].shape
        assert np.abs(drafts[i] - mtp.logits[i]).max() < LOGITS_BAR, f"prompt {i}"
        # The greedy token after row r is r's own best; the draft for it is the best of row r - 1.
        rows = np.arange(len(prompt) - 1, len(prompt) - 1 + NEW_TOKENS)
        np.testing.assert_array_equal(logits[i][rows].argmax(-1), main.greedy[i])
        known = rows > 0
        np.testing.assert_array_equal(drafts[i][rows[known] - 1].argmax(-1), mtp.drafts[i][known])
        assert (mtp.drafts[i][~known] == -1).all()


@every_mesh
def test_drafts_of_whole_prompts(
    name: str, mesh: Mesh, drafting_model: Callable[..., DraftingModel], golden, mtp_golden
) -> None:
    check(drafting_model(name, *mesh), 128, golden(name), mtp_golden(name))


@every_mesh
def test_drafts_of_chunks(
    name: str, mesh: Mesh, drafting_model: Callable[..., DraftingModel], golden, mtp_golden
) -> None:
    for chunk in (7, 16, 33):
        check(drafting_model(name, *mesh), chunk, golden(name), mtp_golden(name))


@every_mesh
def test_drafts_token_by_token(
    name: str, mesh: Mesh, drafting_model: Callable[..., DraftingModel], golden, mtp_golden
) -> None:
    check(drafting_model(name, *mesh), None, golden(name), mtp_golden(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", MTP_CASES)
def test_drafts_at_every_chunk_size(
    name: str, drafting_model: Callable[..., DraftingModel], golden, mtp_golden
) -> None:
    for chunk in range(1, 42):
        check(drafting_model(name, 1, 1, 1), chunk, golden(name), mtp_golden(name))


def test_the_fast_cases_are_cases() -> None:
    assert sum(not p.marks for p in EVERY_MESH) == sum(map(len, FAST.values()))


def test_the_wrong_next_token_is_noticed(
    drafting_model: Callable[..., DraftingModel], mtp_golden
) -> None:
    """The comparison can fail: with a token's own embedding every draft is another one's."""
    model, mtp = drafting_model("deepseek_yarn", 1, 1, 1), mtp_golden("deepseek_yarn")
    model.reset()
    model.following = [ids[:-1] for ids in mtp.sequences]
    for i, both in enumerate(model.prefill(model.following, 128)):
        assert np.abs(model.drafts(both) - mtp.logits[i]).max(1).min() > LOGITS_BAR


def test_a_dropped_page_of_the_module_is_noticed(
    drafting_model: Callable[..., DraftingModel], mtp_golden
) -> None:
    """The module reads a cache layer of its own, and the main model does not."""
    model, mtp = drafting_model("deepseek_yarn", 1, 1, 1), mtp_golden("deepseek_yarn")
    main, _ = model.follow(mtp.sequences, 128)
    model.reset()
    model.prefill([ids[:-2] for ids in mtp.sequences], 128)
    for number in range(len(mtp.sequences)):
        model.drop_page(number, 0, first_layer=model.config.num_layers)
    last = model.teacher_forced([ids[-2:-1] for ids in mtp.sequences])
    for i, both in enumerate(last):
        assert np.abs(model.main(both)[0] - main[i][-1]).max() < LOGITS_BAR
        assert np.abs(model.drafts(both)[0] - mtp.logits[i][-1]).max() > LOGITS_BAR
