"""scripts/serve.py as a user runs it: bad input is answered in a line, Ctrl-C leaves nothing."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import local_http
import pytest
from nodes import wait_until
from ports import free_port
from proc import children, running
from repository import REPOSITORY

SMALL = ("--max-model-len", "256", "--chunks", "16", "--batch", "2", "--pages", "64")


def serve(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(REPOSITORY / "scripts" / "serve.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | environment | {"COLUMNS": "300"},
        start_new_session=True,
    )


def refused(*arguments: str, **environment: str) -> str:
    process = serve(*arguments, **environment)
    try:
        output, _ = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 2, output
    assert "Traceback" not in output
    return " ".join(output.split())


def test_a_missing_model_folder(tmp_path):
    assert f"{tmp_path}/none" in refused("--model", f"{tmp_path}/none")


def test_an_unsupported_architecture(tmp_path, serving_folder):
    config = json.loads((serving_folder / "config.json").read_text())
    config["architectures"] = ["MambaForCausalLM"]
    for file in serving_folder.iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").write_text(json.dumps(config))
    output = refused("--model", str(tmp_path), "--mixed", "")
    assert "architectures: MambaForCausalLM is not supported" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mixed", "tp=3"), "tp=3 does not fit 4 KV heads"),
        (("--mixed", "tp=two"), "tp='two': expected a whole number"),
        (("--mixed", "cpus=4095"), "cpus=4095 is not among the allowed ones"),
        (("--decode", "tp=1"), "decode nodes need at least one prefill node"),
        (("--mixed", "tp=1", "--dtype", "fp4"), "dtype='fp4' must be one of"),
        (("--mixed", "tp=1", "--max-model-len", "100000"), "max_model_len=100000 exceeds"),
        (("--mixed", "tp=1", "--chunks", "1"), "chunks=1 must be at least 2"),
        (("--prefill", "tp=1", "--decode", "tp=1", "--provider", "warp"), "warp"),
        (("--prefill", "nics=lo+lo", "--decode", ""), "nics: 'lo' is named twice"),
        (("--prefill", "nics=nic9", "--decode", ""), "prefill-0: nics=nic9: provider"),
    ],
)
def test_options_that_cannot_work(serving_folder, arguments, message):
    assert message in refused("--model", str(serving_folder), "--port", "0", *arguments)


def test_ports_in_use(serving_folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        model = ("--model", str(serving_folder))
        assert f"port {port}: it is in use" in refused(*model, "--port", str(port), "--mixed", "")
        assert f"port {port}: it is in use" in refused(
            *model, "--port", "0", "--mixed", f"http_port={port}"
        )
        output = refused(*model, "--port", "0", "--prefill", f"fabric_port={port}", "--decode", "")
        assert str(port) in output
        assert "in use" in output


def test_no_libfabric(serving_folder):
    output = refused(
        "--model", str(serving_folder), "--port", "0", "--prefill", "", "--decode", "",
        JAXDISAGG_LIBFABRIC="/nonexistent/libfabric.so",
    )  # fmt: skip
    assert "libfabric" in output
    assert "install" in output


@pytest.mark.parametrize(
    "how", [signal.SIGINT, signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_ending_it_leaves_no_process(serving_folder, how):
    port = free_port()
    process = serve("--model", str(serving_folder), "--port", str(port), *SMALL,
                    "--prefill", "tp=1", "--decode", "tp=1")  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"

        def serves() -> bool:
            assert process.poll() is None, process.communicate()[0]
            return local_http.healthy(url)

        wait_until(serves, "the deployment serves")
        nodes = children(process.pid)
        assert len(nodes) == 2
        if how == signal.SIGINT:  # as a terminal does: the whole foreground group
            os.killpg(process.pid, how)
        else:
            os.kill(process.pid, how)
        output, _ = process.communicate(timeout=60)
        assert "Traceback" not in output
        wait_until(lambda: not any(map(running, nodes)), "no node is left")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_dead_node_is_reported_and_the_last_one_ends_it(serving_folder):
    process = serve("--model", str(serving_folder), "--port", "0", *SMALL, "--mixed", "tp=1")
    try:
        wait_until(lambda: len(children(process.pid)) == 1, "the node's process is there")
        (node,) = children(process.pid)
        time.sleep(1.0)
        os.kill(node, signal.SIGKILL)
        output, _ = process.communicate(timeout=60)
        assert process.returncode in (1, 2)
        assert "mixed-0 ended with code -9" in output
        assert "Traceback" not in output
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
