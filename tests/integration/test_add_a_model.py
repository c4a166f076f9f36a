"""docs/add-a-model.md, proven: Qwen2 as a distribution of its own, against transformers' Qwen2."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import local_http
import numpy as np
import plugin_site
import pytest
import qwen2_case
from nodes import Pair, generate_all, node_config
from paged_model import PagedModel
from random_checkpoint import write_checkpoint
from repository import REPOSITORY

from jaxdisagg.config import BatchConfig, ServeConfig
from jaxdisagg.deployment import Deployment
from jaxdisagg.http.formats import token_text
from jaxdisagg.tokenizer import Tokenizer
from models.checkpoint import weights_fingerprint
from models.registry import FAMILIES, family_of, load_config

BAR = 1e-3  # f32, largest difference of any logit and logprob
FEW = BatchConfig(chunks=(64,), decode_rows=(4,), max_model_len=128)
GUIDE = REPOSITORY / "docs" / "add-a-model.md"


class Golden:
    """What transformers gives; see numerics/make_toy_golden.py."""

    def __init__(self) -> None:
        file = REPOSITORY / "tests" / "numerics" / "goldens" / f"{qwen2_case.NAME}.npz"
        with np.load(file) as data:
            self.fingerprint = str(data["fingerprint"])
            count = range(len(qwen2_case.PROMPT_LENGTHS))
            self.prompts = [data[f"tokens_{i}"].tolist() for i in count]
            self.logits = [data[f"logits_{i}"] for i in count if f"logits_{i}" in data]
            self.tokens = np.stack([data[f"greedy_{i}"] for i in count])
            self.logprobs = np.stack([data[f"logprobs_{i}"] for i in count])
            self.gap = float(data["gap"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder on this process's and its children's path, the distribution in it."""
    folder = plugin_site.install(plugin_site.QWEN2, tmp_path_factory.mktemp("site"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield folder
    sys.modules.pop("jaxdisagg_qwen2", None)


@pytest.fixture(scope="module")
def folder(site: Path, tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """The golden's model beside the tiny tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen2"
    write_checkpoint(folder, qwen2_case.CONFIG, std=qwen2_case.STD, seed=qwen2_case.SEED)
    for file in tiny_folder.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


@pytest.fixture(scope="module")
def golden(folder: Path) -> Golden:
    golden = Golden()
    assert weights_fingerprint(folder) == golden.fingerprint, "other weights: make the golden"
    assert golden.gap > 2 * BAR, "a flip would prove nothing"
    return golden


def test_the_family_comes_from_the_distribution(folder: Path, site: Path):
    family, config = load_config(folder)
    assert family not in FAMILIES
    assert family_of(config) is family
    assert sys.modules[type(family).__module__].__file__ == str(site / "jaxdisagg_qwen2.py")


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (4, 2)])  # tp 4: two replicas of each KV head
def test_logits_and_tokens_equal_those_of_transformers(
    tp: int, dp: int, folder: Path, golden: Golden
):
    model = PagedModel(folder, tp=tp, dp=dp)
    logits = model.prefill(golden.prompts, chunk=33)
    for ours, theirs in zip(logits, golden.logits, strict=False):
        assert np.abs(ours - theirs).max() < BAR
    assert [len(x) for x in golden.logits] == [n for n in qwen2_case.PROMPT_LENGTHS if n <= 40]
    tokens, logprobs = model.continue_greedily([rows[-1] for rows in logits], 12)
    np.testing.assert_array_equal(tokens, golden.tokens)
    assert np.abs(logprobs - golden.logprobs).max() < BAR


@pytest.mark.parametrize("name", ["q_bias", "k_bias", "v_bias"])
def test_the_comparison_sees_each_bias(name: str, folder: Path, golden: Golden):
    model = PagedModel(folder)
    path = f"layers.1.attention.{name}"
    model.params = {**model.params, path: model.params[path] * 0}
    ours = model.prefill(golden.prompts[1:2], chunk=33)[0]
    assert np.abs(ours - golden.logits[1]).max() > 100 * BAR


def test_split_nodes_answer_with_transformers_tokens(folder: Path, golden: Golden):
    with Pair(folder, tp=2, shuffle=True, batch=FEW) as pair:
        found = generate_all(pair.decode.node, golden.prompts, 12, at_once=4)
        pair.idle()
    assert [g.tokens for g in found] == golden.tokens.tolist()
    ours = np.array([g.logprobs for g in found])
    assert np.abs(ours - golden.logprobs).max() < BAR


def test_processes_find_it_too(folder: Path, golden: Golden):
    nodes = tuple(node_config(role, folder, batch=FEW) for role in ("prefill", "decode"))
    tokenizer = Tokenizer.from_folder(folder)
    with Deployment(ServeConfig(nodes=nodes, port=0)) as deployment:
        body = {"prompt": golden.prompts[-1], "max_tokens": 12, "temperature": 0}
        body |= {"logprobs": 1, "ignore_eos": True}
        answer = local_http.post(f"{deployment.url}/v1/completions", body)
    assert answer.status_code == 200, answer.text
    found = answer.json()["choices"][0]["logprobs"]
    assert found["tokens"] == [token_text(tokenizer.token_bytes(t)) for t in golden.tokens[-1]]
    assert np.abs(np.array(found["token_logprobs"]) - golden.logprobs[-1]).max() < BAR


def test_the_guide_quotes_the_distribution():
    """Every block of code in the guide stands, line for line, in one of its files."""
    files = [file.read_text() for file in plugin_site.QWEN2.iterdir() if file.is_file()]
    blocks = re.findall(r"^```(python|toml)\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)
    assert len(blocks) > 5
    for _, block in blocks:
        assert any(block in f"\n{text}" for text in files), f"not in the distribution:\n{block}"


def test_the_guide_names_what_is_there():
    """Every file that it names exists."""
    folders = "models|jaxdisagg|tests|scripts"
    named = re.findall(rf"`((?:{folders})/[\w/.-]+)`", GUIDE.read_text())
    assert len(named) > 10
    for name in named:
        assert (REPOSITORY / name).exists(), name
