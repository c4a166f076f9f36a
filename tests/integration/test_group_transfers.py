"""Prefill and decode nodes of several processes each, over HTTP: tokens, counts, and what is left.

Each process is one of jax.distributed with devices, a transfer engine and a counter of its own.
"""

import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import golden_serving
import httpx
import local_http
import pytest
from nodes import PAGE, node_config, wait_until
from ports import ports

from jaxdisagg.config import BatchConfig, MeshConfig, ServeConfig, Timeouts
from jaxdisagg.deployment import Deployment

FEW = BatchConfig(chunks=(64,), decode_rows=(8,), max_model_len=256)
# `connect`, in which a process must arm, is well below the 5 s after which a stopped one is lost.
TIMEOUTS = Timeouts(prefill=60.0, cancel_resend=0.2, cancel_fence=20.0, connect=2.5)
LONG = [(5 * i) % 250 for i in range(240)]


@dataclass(frozen=True)
class Case:
    """A pair of nodes. `units` are those of a page of a layer on each decode process."""

    model: str
    layers: int
    prefill: MeshConfig
    decode: MeshConfig
    units: tuple[int, ...]
    mtp: bool = False

    def expected(self, prompts):
        """Page-writes that each decode process counts, as docs/protocol.md says it."""
        pages = sum(-(-(len(p) - 1) // PAGE) for p in prompts)
        contexts = sum(len(p) > 1 for p in prompts)
        ranks = self.decode.tp // self.decode.processes
        return [pages * self.layers * units + contexts * ranks for units in self.units]


QWEN, DEEPSEEK = ("qwen3_serving", 3), ("deepseek_serving", 4)
CORE = Case(*QWEN, MeshConfig(tp=2, processes=2), MeshConfig(tp=4, processes=2), (2, 2))
CASES = {
    "gqa 4 to 2": Case(*QWEN, MeshConfig(tp=4, processes=2), MeshConfig(tp=2, processes=2), (2, 2)),
    "gqa, 2 processes to 1": Case(*QWEN, MeshConfig(tp=2, processes=2), MeshConfig(tp=2), (2,)),
    "gqa, 1 process to 2": Case(*QWEN, MeshConfig(tp=2), MeshConfig(tp=2, processes=2), (1, 1)),
    "latent with drafts": Case(
        *DEEPSEEK, MeshConfig(tp=2, processes=2), MeshConfig(tp=2, processes=2), (1, 1), mtp=True
    ),
    "dp over processes": Case(
        *QWEN, MeshConfig(tp=1, dp=2, processes=2), MeshConfig(tp=1, dp=2, processes=2), ()
    ),
}


def folder_of(case, golden_folder, tiny_folder, tmp_path_factory):
    """The golden's weights beside a tokenizer."""
    folder = tmp_path_factory.mktemp("group") / case.model
    shutil.copytree(golden_folder(case.model), folder)
    for file in tiny_folder.iterdir():
        shutil.copy(file, folder / file.name)
    return folder


def deployment_of(case, folder):
    more = {"batch": FEW, "timeouts": TIMEOUTS, "mtp": case.mtp}
    nodes = (
        replace(node_config("prefill", folder, **more, **ports()), mesh=case.prefill),
        replace(node_config("decode", folder, **more, **ports()), mesh=case.decode),
    )
    return Deployment(ServeConfig(nodes=nodes, port=0))


@pytest.fixture(scope="module")
def core(golden_folder, tiny_folder, tmp_path_factory):
    """One deployment for all that leaves it whole, or mends it."""
    folder = folder_of(CORE, golden_folder, tiny_folder, tmp_path_factory)
    with deployment_of(CORE, folder) as deployment:
        yield deployment, folder


def complete(url, prompt, max_tokens=8, **more):
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 0}
    return local_http.post(f"{url}/v1/completions", body, **more)


def state(deployment, node):
    return local_http.get(f"{deployment.node(node).url}/debug/state").json()


def free_again(deployment, *nodes):
    def free(node):
        pages = state(deployment, node)["pages"]
        return pages["leased"] == pages["ready"] == pages["revoking"] == 0

    for node in nodes:
        wait_until(lambda node=node: free(node), f"{node} holds no pages")


def answers_as_golden(deployment, case, folder):
    """Every prompt's tokens and logprobs are those of transformers; returns the prompts."""
    golden = golden_serving.load(case.model, folder)
    new = golden.tokens.shape[1]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda p: complete(deployment.url, p, new), golden.prompts))
    golden_serving.check_completions(answers, golden)
    return golden.prompts


def counted(deployment, case):
    """Units that each process of the decode node received."""
    fabric = state(deployment, "decode-0")["fabric"]
    if case.decode.processes == 1:
        return [fabric["units_received"]]
    each = fabric["processes"]
    return [each[str(i)]["units_received"] for i in range(case.decode.processes)]


def all_is_well(deployment, case, expected):
    """Counts on both sides are `expected`; nothing was stale, too much, compiled or kept."""
    if case.units:
        wait_until(lambda: counted(deployment, case) == expected, f"each counts {expected}")
    total = sum(expected)
    wait_until(
        lambda: state(deployment, "prefill-0")["fabric"]["units_completed"] == total,
        f"{total} page-writes were acknowledged",
    )
    prefill, decode = state(deployment, "prefill-0"), state(deployment, "decode-0")
    assert decode["page_writes"] == prefill["page_writes"] == total
    assert decode["fabric"]["units_received"] == total
    for node in (prefill, decode):
        fabric = node["fabric"]
        for name in ("overshoots", "stale_immediates", "trigger_faults", "ring_overflows"):
            assert fabric[name] == 0, name
        assert node["compiles_after_warm_up"] == 0
        for process in node.get("processes", {}).values():
            assert process["compiles_after_warm_up"] == 0
    free_again(deployment, "prefill-0", "decode-0")


def test_tokens_are_those_of_one_process_and_every_process_counts_its_own(core):
    deployment, folder = core
    prompts = answers_as_golden(deployment, CORE, folder)
    all_is_well(deployment, CORE, CORE.expected(prompts))
    posted = state(deployment, "prefill-0")["fabric"]["processes"]
    assert [posted[p]["units_posted"] > 0 for p in ("0", "1")] == [True, True]


def test_clients_that_leave_at_any_moment_lose_no_page_in_any_process(core):
    deployment, _ = core

    def leave(i):
        try:
            complete(deployment.url, LONG, 16, read_s=0.05 + 0.03 * i)
        except httpx.ReadTimeout:
            return True
        return False

    with ThreadPoolExecutor(6) as pool:
        left = list(pool.map(leave, range(18)))
    assert any(left)
    free_again(deployment, "prefill-0", "decode-0")
    assert state(deployment, "decode-0")["fabric"]["overshoots"] == 0
    first, again = (complete(deployment.url, LONG) for _ in range(2))
    assert first.status_code == again.status_code == 200
    assert first.json()["choices"][0]["text"] == again.json()["choices"][0]["text"]


def test_a_request_that_waits_shows_what_each_process_expects_and_has(core):
    """One process of the prefill node stands still, so nothing more is computed or written."""
    deployment, _ = core
    (follower,) = deployment.node("prefill-0").followers
    with ThreadPoolExecutor(1) as pool:
        os.kill(follower.process.pid, signal.SIGSTOP)
        try:
            waiting = pool.submit(complete, deployment.url, LONG)
            wait_until(
                lambda: state(deployment, "decode-0")["awaiting"], "a request awaits prefill"
            )
            (awaiting,) = state(deployment, "decode-0")["awaiting"]
            expected = CORE.expected([LONG])
            assert awaiting["expected"] == expected
            assert len(awaiting["seen"]) == 2
        finally:
            os.kill(follower.process.pid, signal.SIGCONT)
        assert waiting.result(timeout=60).status_code == 200
    free_again(deployment, "prefill-0", "decode-0")


def test_a_process_that_does_not_arm_fails_the_request_by_name(core):
    """PREFILL never went out, so the node serves on when the process goes on."""
    deployment, _ = core
    (follower,) = deployment.node("decode-0").followers
    before = state(deployment, "prefill-0")["outcomes"]
    os.kill(follower.process.pid, signal.SIGSTOP)
    try:
        answer = complete(deployment.url, LONG)
    finally:
        os.kill(follower.process.pid, signal.SIGCONT)
    assert answer.status_code == 504, answer.text
    text = f"process 1 of decode-0 did not arm its counter within {TIMEOUTS.connect:g} s"
    assert text in answer.json()["error"]["message"]
    assert state(deployment, "prefill-0")["outcomes"] == before
    wait_until(lambda: complete(deployment.url, LONG).status_code == 200, "the node serves on")
    free_again(deployment, "prefill-0", "decode-0")


def killed(deployment, node):
    """Kill a node's second process while requests await prefill; returns what those are told."""
    (follower,) = deployment.node("prefill-0").followers
    (victim,) = deployment.node(node).followers
    with ThreadPoolExecutor(3) as pool:
        os.kill(follower.process.pid, signal.SIGSTOP)
        waiting = [pool.submit(complete, deployment.url, LONG) for _ in range(3)]
        wait_until(
            lambda: len(state(deployment, "decode-0")["awaiting"]) == 3, "requests await prefill"
        )
        victim.process.kill()
        if victim is not follower:
            os.kill(follower.process.pid, signal.SIGCONT)
        answers = [future.result(timeout=60) for future in waiting]
    assert deployment.node(node).process.wait(timeout=60) != 0, "the node has ended as a whole"
    assert min(answer.status_code for answer in answers) >= 500
    return [answer.json()["error"]["message"] for answer in answers]


def test_the_death_of_one_process_ends_a_prefill_node_which_comes_back(core):
    deployment, _ = core
    before = complete(deployment.url, LONG)
    assert before.status_code == 200, before.text
    told = killed(deployment, "prefill-0")
    assert all("the prefill node prefill-0 was lost" in text for text in told), told
    assert all("page-writes had arrived, 0 of" in text for text in told), "by process"
    free_again(deployment, "decode-0")
    deployment.restart("prefill-0")
    wait_until(lambda: local_http.healthy(deployment.url), "the router can answer")
    answer = complete(deployment.url, LONG)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == before.json()["choices"][0]["text"]
    free_again(deployment, "prefill-0", "decode-0")


def test_the_death_of_one_process_ends_a_decode_node_and_frees_the_prefill_nodes_pages(core):
    """The last test of `core`, whose decode node it ends."""
    deployment, _ = core
    told = killed(deployment, "decode-0")
    assert all("process 1" in text for text in told), told
    free_again(deployment, "prefill-0")
    assert state(deployment, "prefill-0")["failure"] is None


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_other_pairs_of_nodes(case, golden_folder, tiny_folder, tmp_path_factory):
    folder = folder_of(case, golden_folder, tiny_folder, tmp_path_factory)
    with deployment_of(case, folder) as deployment:
        prompts = answers_as_golden(deployment, case, folder)
        # With dp the ranks, and so the processes, are chosen by load.
        flat = replace(case, units=(1,), decode=replace(case.decode, processes=1))
        all_is_well(deployment, case, (case if case.units else flat).expected(prompts))
        if case.mtp:
            drafts = state(deployment, "decode-0")["drafts"]
            golden = golden_serving.load(case.model, folder)
            assert drafts["proposed"] >= sum(golden.accepted(i)[0] for i in range(len(prompts)))
