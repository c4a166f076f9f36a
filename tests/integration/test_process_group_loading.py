"""Each process of a node loads what its devices hold, and no more, from both forms of a folder."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from convert_checkpoint import convert
from loading_member import digest
from ports import free_port
from random_checkpoint import write_checkpoint
from repository import REPOSITORY
from serving_model import CONFIG

from jaxdisagg.mesh import make_mesh
from models.checkpoint import load_params
from models.registry import load_config
from models.sharding import DEFAULT_RULES

SECONDS = 120.0
SIZES = {"hidden_size": 512, "vocab_size": 4096, "intermediate_size": 4096}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One model as safetensors, in the native form, and in that once more."""
    base = tmp_path_factory.mktemp("loading")
    write_checkpoint(base / "hf", CONFIG | SIZES, files=3)
    convert(base / "hf", base / "native")
    return [base / "hf", base / "native", base / "native"]


def load_in_two_processes(folders):
    """What each process said, [process][folder]."""
    coordinator = f"127.0.0.1:{free_port()}"
    script = REPOSITORY / "tests" / "support" / "loading_member.py"
    members = [
        subprocess.Popen(
            [sys.executable, str(script), str(process), coordinator, *map(str, folders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]

    def read(member):
        lines = (line for line in member.stdout if line.startswith("{"))  # gloo prints, too
        return [json.loads(line) for _, line in zip(folders, lines, strict=False)]

    with ThreadPoolExecutor(2) as pool:
        try:
            return list(pool.map(read, members, timeout=SECONDS))
        finally:
            for member in members:
                member.kill()
                member.communicate()


def test_each_process_loads_its_own_shards(folders):
    _, config = load_config(folders[0])
    mesh = make_mesh(tp=1, dp=1, kv_heads=config.num_kv_heads, devices=jax.devices()[:1])
    whole = load_params(folders[0], config, mesh, DEFAULT_RULES)
    found = load_in_two_processes(folders)
    assert [len(said) for said in found] == [3, 3], "a process ended early"
    total = sum(p.nbytes for p in whole.values())
    for said in (one for process in found for one in process):
        assert set(said["shards"]) == set(whole)
        for name, (index, sha) in said["shards"].items():
            part = np.asarray(whole[name])[tuple(slice(*ends) for ends in index)]
            assert digest(np.ascontiguousarray(part)) == sha, name
        assert said["device_bytes"] < 0.51 * total
    for of_hf, _, of_native in found:
        assert of_hf["shards"] == of_native["shards"]
        # Not of the first native one, in which orbax makes its thread pools.
        # Not half of what the process holds; allocators and threads add some MB of their own.
        peak = max(one["host_peak"] for one in (of_hf, of_native))
        assert peak < 2 * of_hf["largest_tensor"] < of_hf["device_bytes"] / 2
    assert found[0][0]["shards"] != found[1][0]["shards"]
