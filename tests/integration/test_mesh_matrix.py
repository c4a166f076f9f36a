"""Any mesh to any mesh with real models: the tokens of one process, and pages by their checksums.

GQA with 8, 2 and 1 KV heads and MLA; prefill and decode of tp 1, 2 and 4 and dp 1 and 2, in any
pair, in processes of their own. In f32, where tokens do not depend on the mesh.
"""

from dataclasses import replace

import numpy as np
import pytest
from mesh_cases import Mesh, every_pair
from mesh_matrix import Matrices
from mesh_models import write_models

NEW = 6
TOLERANCE = 1e-3
LENGTHS = (1, 2, 16, 17, 18, 64, 65, 66, 130, 220)

ALL = [Mesh(tp, dp) for tp in (1, 2, 4) for dp in (1, 2)]
MODELS = ("qwen3-8", "qwen3-2", "qwen3-1", "deepseek")
CORE = {
    "qwen3-8": [(Mesh(4), Mesh(2, 2)), (Mesh(1), Mesh(4))],
    # Two heads: each of four ranks shares its head with a neighbour.
    "qwen3-2": [(Mesh(4), Mesh(1)), (Mesh(2, 2), Mesh(4)), (Mesh(4), Mesh(4))],
    "qwen3-1": [(Mesh(4), Mesh(2, 2)), (Mesh(1), Mesh(4))],
    "deepseek": [(Mesh(2, 2), Mesh(4)), (Mesh(4), Mesh(1)), (Mesh(1, 1, 32), Mesh(4))],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("mesh-models"))


@pytest.fixture(scope="module")
def matrices(sides):
    with Matrices(sides) as matrices:
        yield matrices


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(5)
    return [rng.integers(0, 256, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(matrices, models, prompts):
    """From a model's name to what it answers on one device, prefill and decode in one process."""
    known = {}

    def of(name):
        if name not in known:
            known[name] = matrices.of(models[name]).mixed(prompts, NEW)
            gaps = [answer["gap"] for answer in known[name]]
            assert min(gaps) > 2 * TOLERANCE, "a flip would prove nothing"
            first = {answer["tokens"][0] for answer in known[name]}
            assert len(first) > 3, "answers that do not depend on the prompt prove nothing"
        return known[name]

    return of


# Pages of two sizes, with the models.
SIZES = {
    "qwen3-2": [(Mesh(4), Mesh(1, 1, 24))],
    "deepseek": [(Mesh(1, 1, 32), Mesh(4))],
}


def cases():
    for name in MODELS:
        for prefill, decode in [*every_pair(ALL), *SIZES.get(name, [])]:
            marks = () if (prefill, decode) in CORE[name] else pytest.mark.slow
            label = f"{name}-{prefill}-to-{decode}"
            yield pytest.param(name, prefill, decode, marks=marks, id=label)


@pytest.mark.parametrize(("name", "prefill", "decode"), list(cases()))
def test_tokens_and_pages_of_a_pair(matrices, models, expected, prompts, name, prefill, decode):
    model = models[name]
    answers = expected(name)
    pair = matrices.pair(model, prefill, decode)
    before = pair.page_writes()
    served = pair.serve(prompts, NEW)
    for one, answer in zip(served, answers, strict=True):
        where = f"prompt of {len(one.prompt)}"
        assert one.answer["tokens"] == answer["tokens"], where
        np.testing.assert_allclose(
            one.answer["logprobs"], answer["logprobs"], atol=TOLERANCE, err_msg=where
        )
        pair.check_checksums(one)
    counted = [b - a for a, b in zip(before, pair.page_writes(), strict=True)]
    assert counted == [sum(model.page_writes(n, prefill, decode) for n in LENGTHS)] * 2


def test_pages_in_another_order_give_the_same_tokens_and_other_checksums(
    matrices, models, expected, prompts
):
    """The control of both: attention does not see which of two full pages comes first."""
    pair = matrices.pair(models["qwen3-2"], Mesh(4), Mesh(4))
    index = LENGTHS.index(130)  # chunks of four, four and one page, the last not full
    with pair.damaged("swapped_pages"):
        (one,) = pair.serve([prompts[index]], NEW)
    assert one.answer["tokens"] == expected("qwen3-2")[index]["tokens"]
    with pytest.raises(AssertionError, match="the pages of layer 0 head 0 differ at"):
        pair.check_checksums(one)


def test_heads_in_another_order_give_other_tokens(matrices, models, expected, prompts):
    """And what attention does see, the tokens show."""
    pair = matrices.pair(models["qwen3-2"], Mesh(1), Mesh(4))
    with pair.damaged("swapped_heads"):
        (one,) = pair.serve([prompts[-1]], NEW)
    assert one.answer["tokens"] != expected("qwen3-2")[-1]["tokens"]
    with pytest.raises(AssertionError, match="the pages of layer 0 head 0 differ at"):
        pair.check_checksums(one)


def test_pages_of_bfloat16_arrive_as_they_were_sent(matrices, models, prompts):
    """Its tokens depend on the mesh, so that pages alone are compared."""
    model = replace(models["qwen3-2"], name="qwen3-2-bf16", dtype="bfloat16")
    pair = matrices.pair(model, Mesh(4), Mesh(2, 2))
    before = pair.page_writes()
    for one in pair.serve(prompts, NEW):
        pair.check_checksums(one)
    expected = sum(model.page_writes(n, Mesh(4), Mesh(2, 2)) for n in LENGTHS)
    assert [b - a for a, b in zip(before, pair.page_writes(), strict=True)] == [expected] * 2
