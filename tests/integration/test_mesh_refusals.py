"""Nodes that cannot work together, or not at all: the field is named, and nobody waits for ever."""

import os
import signal

import pytest
from mesh_cases import Mesh, Model
from mesh_models import write_models
from nodes import wait_until
from sentinel_values import LAYERS, prompt
from side_process import SideError, SideProcess

SOON = {"connect": 1.0, "queue": 2.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_models(tmp_path_factory.mktemp("refusals"))["qwen3-2"].folder)


@pytest.fixture
def build(sides):
    """Build nodes, by role and name, that are stopped after the test."""
    built = []

    def build(role, name, **how):
        answer = sides[role].ask("build", name=name, role=role, **how)
        built.append((role, name))
        return answer["fabric"]

    yield build
    for role, name in built:
        sides[role].ask("close", names=[name])


def refused(sides, build, prefill, decode):
    """What the decode node says of the prefill node, and to a client who asks nevertheless."""
    address = build("prefill", "p", **prefill)
    build("decode", "d", timeouts=SOON, **decode)
    problem = sides["decode"].ask("connect", name="d", fabric=[address])[address]["problem"]
    assert problem.startswith("refused: ")
    order = {"name": "d", "prompts": [prompt(40, 1)], "max_tokens": 2}
    ((answer,),) = sides["decode"].ask("generate", orders=[order])
    assert answer["status"] == 503
    assert problem in answer["error"], "the client is told the same"
    problems = problem.removeprefix("refused: ").split("; ")

    def logged():
        log = sides["prefill"].stderr().rpartition("refused decode node d: ")[2]
        return all(each.partition(":")[0] in log for each in problems)

    wait_until(logged, "the other node's log says so, too")
    return problems


def test_two_dtypes(sides, build, folder):
    problems = refused(
        sides, build, {"model": folder, "tp": 2}, {"model": folder, "dtype": "bfloat16"}
    )
    assert "dtype: bfloat16 at d, float32 at p" in problems
    assert "itemsize: 2 at d, 4 at p" in problems


def test_two_numbers_of_heads(sides, build):
    problems = refused(sides, build, {"sentinel": 8, "tp": 2}, {"sentinel": 2, "tp": 4})
    assert "model: sentinel-2 at d, sentinel-8 at p" in problems
    assert "kv heads: 2 at d, 8 at p" in problems


def test_heads_and_a_latent(sides, build):
    problems = refused(sides, build, {"sentinel": 1, "tp": 4}, {"sentinel": 0})
    assert "kind: mla at d, gqa at p" in problems
    assert "head dim: 24 at d, 8 at p" in problems


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (
            {"sentinel": 8, "tp": 3},
            "tp=3 does not fit 8 KV heads: it must divide or be a multiple of them",
        ),
        ({"sentinel": 2, "tp": 5}, "tp=5 does not fit 2 KV heads"),
        ({"sentinel": 0, "tp": 4, "dp": 4}, "tp=4 dp=4 needs 16 devices, 8 are there"),
        ({"sentinel": 0, "dp": 0}, "dp=0 must be at least 1"),
        ({"sentinel": 0, "page_size": 0}, "page_size=0 must be at least 1"),
    ],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_mesh_that_cannot_be(build, role, how, text):
    with pytest.raises(SideError, match=text) as caught:
        build(role, "n", **how)
    assert caught.value.kind == "ValueError"


def test_a_mesh_that_does_not_divide_the_model(build, folder):
    """Four ranks fit its two KV heads, three do not, and six fit them and not its query heads."""
    with pytest.raises(SideError, match="tp=3 does not fit 2 KV heads"):
        build("prefill", "n", model=folder, tp=3)
    with pytest.raises(SideError, match="num_attention_heads 8 does not divide into 6 shards"):
        build("prefill", "n", model=folder, tp=6)


def test_a_prompt_that_the_other_node_cannot_take(sides, build):
    address = build("prefill", "p", sentinel=8, tp=4, batch={"max_model_len": 64})
    build("decode", "d", sentinel=8)
    sides["decode"].ask("connect", name="d", fabric=[address])
    order = {"name": "d", "prompts": [prompt(100, 1), prompt(50, 2)], "max_tokens": 2}
    ((longer, fits),) = sides["decode"].ask("generate", orders=[order])
    assert longer["status"] == 400
    assert "a prompt of at most 64 tokens at p" in longer["error"]
    assert len(fits["tokens"]) == 2


def test_a_prefill_node_that_dies_ends_its_requests_by_the_count(sides, build, tmp_path):
    """Stopped before it writes, then killed: the client is told what had come, and of how much."""
    model, length = Model("gqa8", 8, LAYERS), 100
    expected = model.page_writes(length, Mesh(4), Mesh(2))
    assert expected == 7 * LAYERS * 4 + 2, "each of two ranks gets two parts of each page"
    build("decode", "d", sentinel=8, tp=2)
    with SideProcess("doomed", tmp_path) as doomed:
        address = doomed.ask("build", name="p", role="prefill", sentinel=8, tp=4)["fabric"]
        sides["decode"].ask("connect", name="d", fabric=[address])
        os.kill(doomed.pid, signal.SIGSTOP)
        order = {"name": "d", "prompts": [prompt(length, 1)], "max_tokens": 2}
        ((answer,),) = sides["decode"].ask("generate", orders=[order], kill=doomed.pid)
    assert answer["status"] == 502, answer
    assert "the prefill node p was lost" in answer["error"]
    assert f"0 of {expected} page-writes had arrived" in answer["error"]
    state = sides["decode"].ask("state", name="d")
    assert state["pages"]["revoking"] == 0
