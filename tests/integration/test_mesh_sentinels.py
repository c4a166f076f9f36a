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


def label(value):
    return getattr(value, "name", str(value))


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
    """Compare both nodes' pages of a request with the formula."""
    if len(one.prompt) == 1:
        assert one.target is None
        return
    sizes = (pair.prefill.page, pair.decode.page)
    check_taken(pair, "source", one.prompt, one.source, len(one.prompt) - 1)
    # A last page that is not full is sent whole, up to where a page ends on either side.
    sent = min(-(-(len(one.prompt) - 1) // size) * size for size in sizes)
    check_taken(pair, "target", one.prompt, one.target, sent)


def check_taken(pair: Pair, side: str, prompt: list[int], taken: dict, sent: int) -> None:
    """Compare what one node held of a prompt, on each tp rank, with the formula.

    Beyond the first `sent` rows all is as it was, but in pages that another request had before.
    """
    mesh = pair.prefill if side == "source" else pair.decode
    sentinels, known = Sentinels(pair.matrix.model.kv_heads), prompt[:-1]
    with np.load(taken["file"]) as memory:
        rows, contexts = memory["rows"], memory["contexts"]
    assert len(rows) == len(contexts) == mesh.tp
    untouched = np.repeat(taken["fresh"], mesh.page) & (np.arange(rows.shape[-2]) >= sent)
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


GQA6, GQA3 = Model("gqa6", 6, LAYERS), Model("gqa3", 3, LAYERS)
RATIOS = [
    # Two heads on each of three ranks and three on each of two: neither is made of whole others.
    (GQA6, Mesh(3), Mesh(2)),
    (GQA6, Mesh(2), Mesh(3)),
    (GQA6, Mesh(6), Mesh(2)),
    (GQA6, Mesh(1, 2), Mesh(6)),
    # Copies of a head on the one side alone.
    (GQA3, Mesh(6), Mesh(1)),
    (GQA3, Mesh(3), Mesh(6)),
]


@pytest.mark.parametrize(("model", "prefill", "decode"), RATIOS, ids=label)
def test_ratios_that_are_no_powers_of_two(matrices, model, prefill, decode, tmp_path):
    check_pair(matrices.pair(model, prefill, decode), tmp_path)


@pytest.mark.parametrize("model", [GQA8, MLA], ids=label)
def test_clients_that_leave_never_hurt_what_others_hold(matrices, model, tmp_path):
    """Few pages, soon lent again, and a prefill node that writes long after it was told to.

    The other one is fast: what came late into pages that a request of its got would be seen.
    """
    decode = Mesh(2, 2, pages=32)
    pairs = [matrices.pair(model, prefill, decode) for prefill in (Mesh(4), Mesh(1, 2))]
    for pair in pairs:
        pair.poison()
    pairs[0].ask("prefill", "slow", seconds=0.04)
    new, prompts = 20, [prompt(17 + 37 * i % 180, i) for i in range(48)]
    leave = [0.01 * (i + 1) if i % 3 else None for i in range(48)]
    order = pairs[0].order(prompts, new, leave) | {"via": None}
    (answers,) = matrices.sides["decode"].ask("generate", orders=[order])
    assert any("left" in found for found in answers), "nobody left"
    # Those of all that became ready, whether or not anyone waited for them.
    taken = {t["request"]: t for t in pairs[0].ask("decode", "taken", folder=str(tmp_path))}
    for ids, found in zip(prompts, answers, strict=True):
        if "left" not in found:
            assert found["tokens"] == answer(ids, new)
            assert found["id"] in taken
        if found["id"] in taken:
            known = -(-(len(ids) - 1) // decode.page) * decode.page
            check_taken(pairs[0], "target", ids, taken[found["id"]], known)
    for pair in pairs:
        assert pair.strays() == []
        assert pair.ask("prefill", "state")["page_writes"], "a prefill node that nothing used"
    assert pairs[0].ask("decode", "state")["fabric"]["overshoots"] == 0


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


@pytest.mark.parametrize(("model", "prefill", "decode", "how"), DAMAGED, ids=label)
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
