"""Any mesh to any mesh, byte by byte: pages whose every value says where it belongs.

The model of these nodes fills its cache with a formula of layer, head, K/V plane, position, token
and dimension (support/sentinel_values.py), and the memory of both nodes is read at its addresses.
Its tokens do not depend on the cache at all: whatever is found here, no token would have shown.
"""

from pathlib import Path

import numpy as np
import pytest
from mesh_cases import Mesh, Model, every_pair
from mesh_matrix import Matrices, Pair, Served, serve_at_once
from page_tap import POISON
from sentinel_values import LAYERS, Sentinels, answer, prompt

NEW = 3
# Rows 1, 15, 16, 17, 31 .. : both sides of the edges of pages (16) and chunks (64).
LENGTHS = (2, 16, 17, 18, 33, 64, 65, 66, 129, 200, 1)
PROMPTS = [prompt(length, number) for number, length in enumerate(LENGTHS)]

CORE = [Mesh(1), Mesh(4), Mesh(2, 2)]
ALL = [Mesh(tp, dp) for tp in (1, 2, 4) for dp in (1, 2)]
MODELS = [Model("gqa8", 8, LAYERS), Model("gqa2", 2, LAYERS), Model("gqa1", 1, LAYERS)]
MODELS.append(Model("mla", 0, LAYERS))


@pytest.fixture(scope="module")
def matrices(sides):
    with Matrices(sides) as matrices:
        yield matrices


def cases():
    core = list(every_pair(CORE))
    for model in MODELS:
        for prefill, decode in every_pair(ALL):
            marks = () if (prefill, decode) in core else pytest.mark.slow
            label = f"{model.name}-{prefill}-to-{decode}"
            yield pytest.param(model, prefill, decode, marks=marks, id=label)


@pytest.mark.parametrize(("model", "prefill", "decode"), list(cases()))
def test_every_byte_is_where_it_belongs(matrices, model, prefill, decode, tmp_path):
    check_pair(matrices.pair(model, prefill, decode), tmp_path)


def check_pair(pair: Pair, folder: Path) -> None:
    """Serve all prompts at once and account for every byte and every count."""
    model, prefill, decode = pair.matrix.model, pair.prefill, pair.decode
    pair.poison()
    before = pair.page_writes()
    served = pair.serve(PROMPTS, NEW, folder)
    for one in served:
        assert one.answer["tokens"] == answer(one.prompt, NEW)
        check_memory(pair, one)
    assert pair.strays() == []
    expected = sum(model.page_writes(length, prefill, decode) for length in LENGTHS)
    after = pair.page_writes()
    assert [b - a for a, b in zip(before, after, strict=True)] == [expected, expected]
    for of_side, mesh in (("source", prefill), ("target", decode)):
        taken = [getattr(one, of_side) for one in served if len(one.prompt) > 1]
        assert {t["dp_rank"] for t in taken} == set(range(mesh.dp)), "a dp rank that nothing used"
    longest = max(served, key=lambda one: len(one.prompt))
    for taken in (longest.source, longest.target):
        assert np.any(np.diff(taken["pages"]) != 1), "pages in order prove less"


def check_memory(pair: Pair, one: Served) -> None:
    """Compare both nodes' pages of a request, on each tp rank, with the formula."""
    if len(one.prompt) == 1:
        assert one.target is None
        return
    sides = (("source", one.source, pair.prefill), ("target", one.target, pair.decode))
    for side, taken, mesh in sides:
        sentinels, known = Sentinels(pair.matrix.model.kv_heads), one.prompt[:-1]
        with np.load(taken["file"]) as memory:
            rows, contexts = memory["rows"], memory["contexts"]
        assert len(rows) == len(contexts) == mesh.tp
        # A last page that is not full is sent whole, up to where a page ends on either side.
        pages = (pair.prefill.page, pair.decode.page)
        filled = min(-(-len(known) // page) * page for page in pages)
        if side == "source":
            filled = len(known)
        # What comes after it is as it was, but in pages that another request has had before.
        untouched = np.repeat(taken["fresh"], mesh.page) & (np.arange(rows.shape[-2]) >= filled)
        for rank in range(mesh.tp):
            where = f"{side} rank {rank}, {len(known)} tokens"
            expected = sentinels.page_values(known, rank, mesh.tp)
            wrong = np.argwhere(rows[rank][..., : len(known), :] != expected)
            assert not len(wrong), (
                f"{where}: {len(wrong)} of {expected.size} values are wrong, the first at "
                f"(layer, head, plane, token, dimension) {tuple(wrong[0].tolist())}"
            )
            np.testing.assert_array_equal(
                contexts[rank], sentinels.context_values(known), err_msg=where
            )
            assert (rows[rank][..., untouched, :] == POISON).all(), f"{where}: more than was sent"


GQA8, GQA2, GQA1, MLA = MODELS


@pytest.mark.parametrize(
    ("model", "prefill", "decode"),
    [
        pytest.param(model, prefill, decode, marks=marks, id=f"{model.name}-{prefill}-to-{decode}")
        for model, prefill, decode, *marks in (
            (GQA8, Mesh(1, 1, 32), Mesh(4)),
            (GQA2, Mesh(4), Mesh(1, 1, 24)),
            (MLA, Mesh(2, 2, 24), Mesh(4)),
            (GQA8, Mesh(4, 2), Mesh(2, 2, 64), pytest.mark.slow),
            (GQA2, Mesh(1, 2, 8), Mesh(4, 1, 24), pytest.mark.slow),
            (GQA1, Mesh(4, 1, 48), Mesh(4, 2), pytest.mark.slow),
            (MLA, Mesh(4), Mesh(1, 2, 32), pytest.mark.slow),
        )
    ],
)
def test_pages_of_two_sizes(matrices, model, prefill, decode, tmp_path):
    check_pair(matrices.pair(model, prefill, decode), tmp_path)


@pytest.mark.parametrize("model", [GQA2, MLA], ids=lambda model: model.name)
def test_one_prefill_node_feeds_nodes_of_three_meshes_at_once(matrices, model, tmp_path):
    """Its steps hold chunks for all of them, each by a plan of its own."""
    pairs = [matrices.pair(model, Mesh(4), decode) for decode in (Mesh(1), Mesh(4), Mesh(2, 2))]
    for pair in pairs:
        pair.poison()
    before = pairs[0].page_writes()[0]
    for pair, served in zip(pairs, serve_at_once(pairs, PROMPTS, NEW, tmp_path), strict=True):
        for one in served:
            assert one.answer["tokens"] == answer(one.prompt, NEW)
            check_memory(pair, one)
        assert pair.strays() == []
    expected = sum(model.page_writes(n, Mesh(4), p.decode) for n in LENGTHS for p in pairs)
    assert pairs[0].page_writes()[0] - before == expected


DAMAGED = [
    (GQA8, Mesh(1), Mesh(4), "swapped_pages"),
    (GQA8, Mesh(4), Mesh(2, 2), "swapped_ranks"),
    (GQA2, Mesh(1), Mesh(4), "swapped_heads"),
    (GQA2, Mesh(4), Mesh(1), "swapped_layers"),
    (GQA1, Mesh(4), Mesh(4), "doubled_page"),
    (MLA, Mesh(1), Mesh(4), "swapped_pages"),
    (MLA, Mesh(2, 2), Mesh(4), "strayed_page"),
    (MLA, Mesh(2, 2, 24), Mesh(4), "swapped_pages"),
]


@pytest.mark.parametrize(
    ("model", "prefill", "decode", "how"), DAMAGED, ids=lambda v: getattr(v, "name", str(v))
)
def test_a_wrong_plan_is_seen_here_and_nowhere_else(
    matrices, model, prefill, decode, how, tmp_path
):
    """The control: counts and tokens are right, the bytes are not."""
    pair = matrices.pair(model, prefill, decode)
    pair.poison()
    before = pair.page_writes()
    with pair.damaged(how):
        (one,) = pair.serve([prompt(100, 3)], NEW, tmp_path)
    assert one.answer["tokens"] == answer(one.prompt, NEW)
    expected = model.page_writes(100, prefill, decode)
    assert [b - a for a, b in zip(before, pair.page_writes(), strict=True)] == [expected] * 2
    with pytest.raises(AssertionError, match=r"target rank \d, 99 tokens: \d+ of \d+ values"):
        check_memory(pair, one)
    strays = pair.strays()
    assert bool(strays) == (how == "strayed_page"), strays
    with pytest.raises(AssertionError, match="the pages of layer"):
        pair.check_checksums(one)
