"""Mixed nodes of several processes over HTTP: answers of transformers, and what a loss does."""

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import golden_serving
import local_http
import numpy as np
import pytest
from nodes import CHUNK, node_config, wait_until
from ports import free_port
from proc import allowed_cpus

from jaxdisagg.config import BatchConfig, MeshConfig, ServeConfig, Timeouts
from jaxdisagg.deployment import Deployment, DeploymentError
from jaxdisagg.group.key import KEY_VARIABLE
from jaxdisagg.node_process import encode_config

TOLERANCE = 1e-3
MEMBER_SECONDS = 8.0
FEW = BatchConfig(chunks=(CHUNK,), decode_rows=(8,), max_model_len=256)


@pytest.fixture(scope="module")
def folder(golden_folder, tiny_folder, tmp_path_factory):
    """From a golden's name to its weights beside a tokenizer whose own tokens are never drawn."""

    def make(name):
        folder = tmp_path_factory.mktemp("group") / name
        shutil.copytree(golden_folder(name), folder)
        for file in tiny_folder.iterdir():
            shutil.copy(file, folder / file.name)
        return folder

    return make


def deployment_of(folder, mesh, **more):
    node = node_config(
        "mixed",
        folder,
        batch=FEW,
        timeouts=Timeouts(member=MEMBER_SECONDS),
        http_port=free_port(),
        **more,
    )
    return Deployment(ServeConfig(nodes=(replace(node, mesh=mesh),), port=0))


def complete(url, prompt, max_tokens, **more):
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 0, **more}
    return local_http.post(f"{url}/v1/completions", body)


def state(deployment):
    return local_http.get(f"{deployment.nodes[0].url}/debug/state").json()


def check_golden(deployment, golden):
    """Text and logprobs of every prompt, twice as many at once as the node has rows."""
    assert golden.gap > TOLERANCE, "a flip would prove nothing"
    new = golden.tokens.shape[1]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda p: complete(deployment.url, p, new), golden.prompts))
    golden_serving.check_completions(answers, golden, TOLERANCE)


def check_processes(deployment, devices):
    """Each process shows its devices, has run the same steps, and compiled nothing since."""
    pids = [p.process.pid for node in deployment.nodes for p in (node, *node.followers)]

    def found():
        return [state(deployment)["processes"][str(i)] for i in range(len(pids))]

    wait_until(lambda: len({p["steps"] for p in found()}) == 1, "as many steps in all processes")
    for process, pid, expected in zip(found(), pids, devices, strict=True):
        assert process["steps"] > len(FEW.chunks) + len(FEW.decode_rows)
        assert process["pid"] == pid
        assert process["devices"] == expected
        assert process["compiles_after_warm_up"] == 0


def ended(processes, seconds):
    """Their exit codes, once they have ended by themselves."""
    wait_until(
        lambda: all(p.process.poll() is not None for p in processes), "processes ended", seconds
    )
    return [p.process.returncode for p in processes]


@pytest.fixture(scope="module")
def qwen(folder):
    """Two processes of one rank and one CPU each; tests that break it mend it."""
    made = folder("qwen3_serving")
    cpus = tuple(sorted(os.sched_getaffinity(0))[:2])
    with deployment_of(made, MeshConfig(tp=2, processes=2, cpus=cpus)) as deployment:
        yield deployment, golden_serving.load("qwen3_serving", made)


def restart(deployment):
    deployment.restart("mixed-0")
    wait_until(lambda: local_http.healthy(deployment.url), "the router can answer")


def test_two_processes_answer_as_transformers_does(qwen):
    deployment, golden = qwen
    check_golden(deployment, golden)
    check_processes(deployment, [[0, 0], [1, 1]])
    (node,) = deployment.nodes
    for i, process in enumerate((node, *node.followers)):
        cpus = allowed_cpus(process.process.pid)
        assert set(cpus.values()) == {node.config.mesh.cpus_of(i)}
    metrics = local_http.get(f"{deployment.nodes[0].url}/metrics").text
    assert 'jaxdisagg_engine_state{name="processes.1.compiles_after_warm_up"} 0.0' in metrics


def test_a_killed_follower_fails_the_node_which_names_it(qwen):
    deployment, golden = qwen
    (node,) = deployment.nodes
    (follower,) = node.followers
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(complete, deployment.url, [65], 200) for _ in range(4)]
        wait_until(lambda: state(deployment)["requests"].get("decoding") == 4, "four decode")
        follower.process.kill()
        for future in waiting:
            answer = future.result(timeout=60)
            assert answer.status_code == 503, answer.text
            error = answer.json()["error"]
            assert error["code"] == "node_failed"
            assert "process 1 closed its connection" in error["message"]
    assert ended([node], 60.0) == [1]
    restart(deployment)
    check_golden(deployment, golden)


def test_a_hung_follower_is_noticed_in_time(qwen):
    """The leader's step hangs in a collective for as long as the follower does."""
    deployment, golden = qwen
    (node,) = deployment.nodes
    (follower,) = node.followers
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(complete, deployment.url, [65], 200)
        wait_until(lambda: state(deployment)["requests"].get("decoding") == 1, "one decodes")
        os.kill(follower.process.pid, signal.SIGSTOP)
        answer = waiting.result(timeout=MEMBER_SECONDS + 30.0)
    assert answer.status_code == 503, answer.text
    assert f"process 1 said nothing for {MEMBER_SECONDS:g} s" in answer.json()["error"]["message"]
    assert ended([node], 60.0) == [1]
    assert follower.process.poll() is None, "it cannot end: it is stopped"
    restart(deployment)  # which ends what is left of the old node
    assert follower.process.poll() == -signal.SIGKILL
    check_golden(deployment, golden)


def test_a_node_whose_processes_are_all_told_to_end_stops_in_order(qwen):
    """As a service manager does it; the follower hears first."""
    deployment, _ = qwen
    (node,) = deployment.nodes
    processes = [*node.followers, node]
    processes[0].process.terminate()
    time.sleep(1.0)  # as long as a leader's look at what has failed may take
    processes[1].process.terminate()
    assert ended(processes, 60.0) == [0, 0]
    restart(deployment)
    (node,) = deployment.nodes
    node.followers[0].process.terminate()  # without it there is no node
    assert ended([node], 60.0) == [1]
    restart(deployment)


def test_followers_of_a_killed_leader_end_and_a_stop_is_clean(qwen):
    deployment, _ = qwen
    (node,) = deployment.nodes
    node.process.kill()
    (code,) = ended(node.followers, 60.0)
    assert code != 0
    restart(deployment)
    processes = [deployment.nodes[0], *deployment.nodes[0].followers]
    deployment.stop()
    assert ended(processes, 1.0) == [0, 0]


def test_a_process_that_cannot_start_is_named(serving_folder):
    cpu = min(os.sched_getaffinity(0))
    mesh = MeshConfig(tp=2, processes=2, cpus=(cpu, 4095))
    with (
        pytest.raises(DeploymentError, match=r"^mixed-0 process 1: cpus=4095 is not among"),
        deployment_of(serving_folder, mesh),
    ):
        pass


@contextmanager
def started_by_hand(node, key):
    """A process of a node as somebody starts it; its words, each a dict, in a queue."""
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxdisagg.node_process", encode_config(node)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {KEY_VARIABLE: key},
    )
    words = queue.SimpleQueue()

    def read():
        for line in process.stdout:
            words.put(json.loads(line))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield words
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdin.close()
        process.stdout.close()


def error_of(words):
    while "error" not in (word := words.get(timeout=60.0)):
        pass
    return word["error"]


def test_processes_started_by_hand_must_agree(serving_folder):
    node = replace(node_config("mixed", serving_folder), mesh=MeshConfig(tp=2, processes=2))
    key = "a key of many characters"
    with started_by_hand(node, key) as leader:
        address = leader.get(timeout=60.0)["group"]
        follower = replace(node, process=1, group=address)
        with started_by_hand(follower, "another key, as long") as stranger:
            assert f"the leader at {address} did not let process 1 join" in error_of(stranger)
        with started_by_hand(replace(follower, max_requests=5), key) as other:
            reason = "max_requests: 5 here, 256 at process 0; they must be the same"
            assert error_of(other) == reason
            assert error_of(leader) == f"process 1: {reason}"


def check_drafts(deployment, golden):
    before = state(deployment)["drafts"]
    check_golden(deployment, golden)
    after = state(deployment)["drafts"]
    expected = np.sum([golden.accepted(i) for i in range(len(golden.prompts))], axis=0).tolist()
    assert [after[key] - before[key] for key in ("proposed", "accepted")] == expected
    assert expected[1] > 0, "without a right draft the second token is never tried"


def test_dp_ranks_in_processes_of_their_own_draft_as_one(folder):
    made = folder("deepseek_serving")
    with deployment_of(made, MeshConfig(dp=2, ep=2, processes=2), mtp=True) as deployment:
        check_drafts(deployment, golden_serving.load("deepseek_serving", made))
        check_processes(deployment, [[0, 0], [1, 1]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("qwen3_serving", MeshConfig(tp=4, processes=2)),
        ("qwen3_serving", MeshConfig(tp=2, dp=2, processes=2)),
        ("qwen3_serving", MeshConfig(tp=4, processes=4)),
        ("qwen3_moe_serving", MeshConfig(tp=2, dp=2, ep=4, processes=2)),
        ("deepseek_serving", MeshConfig(tp=4, ep=4, processes=2)),
        ("deepseek_serving", MeshConfig(tp=2, dp=2, ep=2, processes=4)),
    ],
    ids=str,
)
def test_other_meshes(folder, name, mesh):
    made = folder(name)
    drafts = name == "deepseek_serving"
    with deployment_of(made, mesh, mtp=drafts) as deployment:
        golden = golden_serving.load(name, made)
        (check_drafts if drafts else check_golden)(deployment, golden)
        share = mesh.devices // mesh.processes
        expected = [[i * share, (i + 1) * share - 1] for i in range(mesh.processes)]
        check_processes(deployment, expected)
