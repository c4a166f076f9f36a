"""What a node's process takes as its configuration."""

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jaxdisagg.config import CacheConfig, MeshConfig, NodeConfig
from jaxdisagg.node_process import encode_config, read_config


def test_a_configuration_arrives_as_it_was():
    node = NodeConfig(
        "decode", Path("a/model"), id="d", mesh=MeshConfig(tp=2, cpus=(0, 1)), nics=("eth0",)
    )
    other = replace(node, cache=CacheConfig(pages=7), rules=Path("rules.toml"))
    assert [read_config([encode_config(n)]) for n in (node, other)] == [node, other]


def test_what_is_left_out_has_its_default():
    found = read_config(['{"role": "decode", "model": "m", "mesh": {"tp": 2}}'])
    assert found == NodeConfig("decode", Path("m"), mesh=MeshConfig(tp=2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "0 arguments; expected one: the fields of NodeConfig"),
        (["{}", "{}"], "2 arguments; expected one"),
        (['{"role": "decode"'], "the node's configuration is not JSON: "),
        (["[]"], "Expected `object`, got `array`"),
        (['{"role": "decode"}'], "missing required field `model`"),
        (['{"role": "decode", "model": "m", "mesh": {"tp": 0}}'], "tp=0 must be at least 1"),
        (['{"role": "decode", "model": "m", "tp": 2}'], "tp: unknown; a node has batch, cache, "),
        (
            ['{"role": "decode", "model": "m", "mesh": {"pp": 2}}'],
            "mesh.pp: unknown; mesh has cpus, dp, ep, gpus, processes, tp",
        ),
    ],
)
def test_what_does_not_fit_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        read_config(arguments)


def test_a_process_without_standard_input_says_why_it_ends():
    code = "import time, jaxdisagg.process_setup as s; s.end_with_parent(); time.sleep(60)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGTERM
    assert "its standard input has ended" in done.stderr
