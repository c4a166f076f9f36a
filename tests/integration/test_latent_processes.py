"""DeepSeek-V3 served by real processes over HTTP, from two tp ranks to one."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import golden_serving
import local_http
import numpy as np
import pytest
from nodes import CHUNK, PAGE, node_config, wait_until

from jaxdisagg.config import BatchConfig, MeshConfig, ServeConfig
from jaxdisagg.deployment import Deployment

LAYERS = 3
FEW = BatchConfig(chunks=(CHUNK,), decode_rows=(8,), max_model_len=256)


@pytest.fixture(scope="module")
def folder(golden_folder, tiny_folder, tmp_path_factory):
    """The golden's weights beside a tokenizer, whose own tokens (256 and on) are never drawn."""
    folder = tmp_path_factory.mktemp("latent") / "deepseek"
    shutil.copytree(golden_folder("deepseek_serving"), folder)
    for file in tiny_folder.iterdir():
        shutil.copy(file, folder / file.name)
    return folder


@pytest.fixture(scope="module")
def deployment(folder):
    nodes = (
        node_config("prefill", folder, tp=2, batch=FEW),
        node_config("decode", folder, tp=1, batch=FEW),
    )
    with Deployment(ServeConfig(nodes=nodes, port=0)) as deployment:
        yield deployment


def state(deployment, node):
    return local_http.get(f"{deployment.node(node).url}/debug/state").json()


def test_answers_are_those_of_transformers_and_every_write_is_counted(deployment, folder):
    golden = golden_serving.load("deepseek_serving", folder)
    new = golden.tokens.shape[1]

    def complete(prompt):
        body = {"prompt": prompt, "max_tokens": new, "temperature": 0, "logprobs": 0}
        answer = local_http.post(f"{deployment.url}/v1/completions", body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]

    with ThreadPoolExecutor(8) as pool:
        choices = list(pool.map(complete, golden.prompts))
    for i, choice in enumerate(choices):
        assert choice["text"] == bytes(golden.tokens[i].tolist()).decode(errors="replace")
        found = choice["logprobs"]["token_logprobs"]
        np.testing.assert_allclose(found, golden.logprobs[i], atol=1e-3, err_msg=f"prompt {i}")
    # One rank decodes: each page of each layer once, and the context, if there is a prefill at all.
    expected = sum(-(-(len(p) - 1) // PAGE) * LAYERS + 1 for p in golden.prompts if len(p) > 1)
    assert state(deployment, "decode-0")["page_writes"] == expected
    wait_until(
        lambda: state(deployment, "prefill-0")["page_writes"] == expected,
        "as many were acknowledged to the prefill node",
    )
    for node in ("prefill-0", "decode-0"):
        now = state(deployment, node)
        assert now["compiles_after_warm_up"] == 0
        assert now["pages"]["leased"] == now["pages"]["revoking"] == 0


@pytest.mark.slow
def test_a_prefill_node_of_another_tp_takes_over(deployment, folder):
    """What goes away is a node of tp 2; what comes back has tp 4."""
    golden = golden_serving.load("deepseek_serving", folder)
    prefill = deployment.node("prefill-0")
    prefill.process.kill()
    prefill.process.wait()
    prefill.config = replace(prefill.config, mesh=MeshConfig(tp=4))
    deployment.restart("prefill-0")
    wait_until(lambda: local_http.healthy(deployment.url), "the router can answer")
    body = {"prompt": golden.prompts[-1], "max_tokens": 12, "temperature": 0, "logprobs": 0}
    answer = local_http.post(f"{deployment.url}/v1/completions", body)
    found = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
    np.testing.assert_allclose(found, golden.logprobs[-1], atol=1e-3)
