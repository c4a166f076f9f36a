"""A deployment of real processes: killed, stopped, restarted; and what its clients are told."""

import asyncio
import functools
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import local_http
import pytest
from nodes import node_config, wait_until
from ports import ports
from proc import allowed_cpus, wake_ups

from jaxdisagg.config import ServeConfig, Timeouts
from jaxdisagg.deployment import Deployment

PROMPT = [(5 * i) % 250 for i in range(200)]
TIMEOUTS = Timeouts(prefill=60.0, cancel_resend=0.2, cancel_fence=4.0, connect=3.0)


def deployment_of(folder, *roles, **more):
    nodes = [
        replace(node_config(role, folder, timeouts=TIMEOUTS, **ports(), **more), id=f"{role}-{i}")
        for i, role in enumerate(roles)
    ]
    return Deployment(ServeConfig(nodes=tuple(nodes), port=0))


@pytest.fixture(scope="module")
def split(serving_folder):
    """One deployment for all that mend what they break."""
    with deployment_of(serving_folder, "prefill", "decode") as deployment:
        yield deployment


@contextmanager
def stopped(node):
    """The node's process is not running, but it is there."""
    os.kill(node.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if node.process.poll() is None:
            os.kill(node.process.pid, signal.SIGCONT)


def complete(url, prompt=PROMPT, max_tokens=8, **more):
    body = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, **more}
    return local_http.post(f"{url}/v1/completions", body)


def text_of(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def state(node):
    return local_http.get(f"{node.url}/debug/state").json()


def answers_again(deployment):
    wait_until(lambda: local_http.healthy(deployment.url), "the router can answer")


def free_again(node):
    def free():
        pages = state(node)["pages"]
        return pages["leased"] == pages["ready"] == pages["revoking"] == 0

    wait_until(free, f"{node.config.id} holds no pages")


def test_killed_prefill_node_fails_its_requests_and_says_what_was_missing(split):
    prefill, decode = split.node("prefill-0"), split.node("decode-1")
    expected = text_of(complete(split.url))
    with ThreadPoolExecutor(8) as pool:
        with stopped(prefill):
            waiting = [pool.submit(complete, split.url) for _ in range(4)]
            wait_until(lambda: len(state(decode)["awaiting"]) == 4, "four requests await prefill")
            # A request that needs no prefill goes on unharmed.
            assert complete(split.url, prompt=[65]).status_code == 200
            prefill.process.kill()
        for future in waiting:
            answer = future.result(timeout=60)
            assert answer.status_code == 502, answer.text
            error = answer.json()["error"]
            assert error["code"] == "prefill_node_lost"
            assert "prefill-0" in error["message"]
            # 13 pages of 3 layers and the context
            assert "of 40 page-writes had arrived" in error["message"]
    free_again(decode)
    answer = complete(split.url)
    assert answer.status_code == 503
    assert "no prefill node is connected" in answer.json()["error"]["message"]
    split.restart("prefill-0")
    answers_again(split)
    assert text_of(complete(split.url)) == expected


def test_killed_decode_node_restarts_on_its_port_while_the_old_prefill_still_writes(split):
    prefill, decode = split.node("prefill-0"), split.node("decode-1")
    expected = text_of(complete(split.url))
    with ThreadPoolExecutor(4) as pool:
        with stopped(prefill):
            waiting = [pool.submit(complete, split.url) for _ in range(4)]
            wait_until(lambda: len(state(decode)["awaiting"]) == 4, "four requests await prefill")
            decode.process.kill()
            restarting = threading.Thread(target=split.restart, args=("decode-1",))
            restarting.start()
            # The old prefill node wakes up with four PREFILLs of a node that is gone.
            time.sleep(1.0)
        restarting.join(timeout=60)
        assert not restarting.is_alive()
        for future in waiting:
            assert future.result(timeout=60).status_code >= 500
    decode = split.node("decode-1")
    answers_again(split)
    assert [text_of(complete(split.url)) for _ in range(3)] == [expected] * 3
    fabric = state(decode)["fabric"]
    assert fabric["overshoots"] == 0
    free_again(decode)
    free_again(prefill)


def test_a_client_that_leaves_while_its_prefill_hangs_ends_by_the_fence(split):
    prefill, decode = split.node("prefill-0"), split.node("decode-1")
    expected = text_of(complete(split.url))

    async def leave():
        body = {"prompt": PROMPT, "max_tokens": 8}
        async with httpx.AsyncClient(timeout=60.0, verify=False, trust_env=False) as client:
            post = asyncio.create_task(client.post(f"{split.url}/v1/completions", json=body))
            waiting = functools.partial(
                wait_until, lambda: state(decode)["awaiting"], "its request awaits prefill"
            )
            await asyncio.to_thread(waiting)
            post.cancel()
            await asyncio.gather(post, return_exceptions=True)

    with stopped(prefill):
        asyncio.run(leave())
        wait_until(lambda: state(decode)["pages"]["revoking"] > 0, "its pages are revoking")
        free_again(decode)  # the hard fence, or the loss of the peer, comes in time
    answers_again(split)
    assert text_of(complete(split.url)) == expected
    free_again(prefill)


def test_two_decode_nodes_share_a_prefill_node_and_one_death_leaves_the_other(serving_folder):
    with deployment_of(serving_folder, "prefill", "decode", "decode") as deployment:
        with ThreadPoolExecutor(8) as pool:
            futures = [pool.submit(complete, deployment.url) for _ in range(16)]
            texts = {text_of(f.result(timeout=60)) for f in futures}
        assert len(texts) == 1
        served = [
            state(deployment.node(f"decode-{i}"))["outcomes"].get("finished", 0) for i in (1, 2)
        ]
        assert min(served) > 0, "the router used one node alone"
        deployment.node("decode-2").process.kill()
        deployment.node("decode-2").process.wait()
        answers = [complete(deployment.url) for _ in range(4)]
        assert [text_of(a) for a in answers] == [texts.pop()] * 4
        free_again(deployment.node("prefill-0"))


def test_processes_are_pinned_and_idle_ones_sleep(serving_folder):
    cpus = sorted(os.sched_getaffinity(0))[:2]
    nodes = tuple(
        replace(config, mesh=replace(config.mesh, cpus=(cpu,)))
        for config, cpu in zip(
            (node_config("prefill", serving_folder), node_config("decode", serving_folder)),
            (cpus[0], cpus[-1]),
            strict=True,
        )
    )
    with Deployment(ServeConfig(nodes=nodes, port=0)) as deployment:
        text_of(complete(deployment.url))
        for node in deployment.nodes:
            assert set(allowed_cpus(node.process.pid).values()) == {node.config.mesh.cpus}
        pids = [n.process.pid for n in deployment.nodes]
        before = {pid: (wake_ups(pid), cpu_seconds(pid)) for pid in pids}
        time.sleep(4.0)
        for pid in pids:
            woken, used = wake_ups(pid) - before[pid][0], cpu_seconds(pid) - before[pid][1]
            assert woken < 4 * 100, f"{woken / 4:.0f} wake-ups a second in an idle node"
            assert used < 4 * 0.25, f"an idle node uses {used / 4:.1%} of a core: a thread spins"


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_thousand_mixed_requests_compile_nothing(split):
    """Lengths, batch sizes and sampling as they come; all pages are back at the end."""

    def one(i: int) -> None:
        length = 1 + (37 * i) % 300
        more = {"temperature": 0.8, "top_p": 0.9, "seed": i} if i % 3 == 0 else {}
        answer = complete(split.url, prompt=[(i + j) % 250 for j in range(length)],
                          max_tokens=1 + i % 5, **more)  # fmt: skip
        assert answer.status_code == 200, answer.text

    before = state(split.node("decode-1"))["outcomes"]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(1000)))
    for node in split.nodes:
        assert state(node)["compiles_after_warm_up"] == 0
        free_again(node)
    after = state(split.node("decode-1"))["outcomes"]
    assert {k: after[k] - before.get(k, 0) for k in after} == {
        k: 1000 if k == "finished" else 0 for k in after
    }
