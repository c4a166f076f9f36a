"""Nodes of several processes, byte by byte: the memory of each against the sentinels' formula."""

import json
import os
import shutil
import sys
from itertools import chain

import local_http
import memory_server
import numpy as np
import plugin_site
import pytest
from mesh_cases import Mesh
from nodes import node_config
from page_tap import POISON, rows_of
from repository import REPOSITORY
from safetensors.numpy import save_file
from sentinel_values import LAYERS, Sentinels, answer, prompt

from jaxdisagg.config import BatchConfig, CacheConfig, MeshConfig, ServeConfig
from jaxdisagg.deployment import Deployment

NEW = 3
LENGTHS = (2, 17, 66, 130, 200)
FEW = BatchConfig(chunks=(64,), decode_rows=(8,), max_model_len=256)
MODULES = ("sentinel_values", "sentinel_model", "page_tap", "leases", "memory_server")
PLUGIN = """
import memory_server
from sentinel_model import SentinelFamily

memory_server.start()
FAMILY = SentinelFamily()
"""
CASES = [
    (8, Mesh(2), Mesh(4)),
    pytest.param(2, Mesh(4), Mesh(1, 2), marks=pytest.mark.slow),
    pytest.param(0, Mesh(2, 2), Mesh(4), marks=pytest.mark.slow),
]


@pytest.fixture
def tap(tmp_path, monkeypatch):
    """The sentinel model as a distribution that processes find, and where their memory answers."""
    site, tap = tmp_path / "site", tmp_path / "tap"
    site.mkdir()
    tap.mkdir()
    support = REPOSITORY / "tests" / "support"
    modules = {f"{name}.py": (support / f"{name}.py").read_text() for name in MODULES}
    modules["sentinel_plugin.py"] = PLUGIN
    entry = {"jaxdisagg.models": {"sentinel": "sentinel_plugin:FAMILY"}}
    plugin_site.write(site, "jaxdisagg-sentinel", "0.1", entry, modules)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    monkeypatch.setenv(memory_server.FOLDER, str(tap))
    yield tap
    sys.modules.pop("sentinel_plugin", None)


def model_folder(folder, heads, tokenizer):
    """A config for the family, its one tensor, and a tokenizer."""
    shutil.copytree(tokenizer, folder)
    config = {"architectures": ["SentinelForTests"], "num_key_value_heads": heads}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"nothing": np.zeros(1, np.float32)}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(("heads", "prefill", "decode"), CASES, ids=str)
def test_every_byte_is_where_it_belongs_in_each_process(
    tap, tmp_path, tiny_folder, heads, prefill, decode
):
    folder = model_folder(tmp_path / "sentinel", heads, tiny_folder)
    nodes = tuple(
        node_config(
            role,
            folder,
            mesh=MeshConfig(tp=mesh.tp, dp=mesh.dp, processes=2),
            batch=FEW,
            cache=CacheConfig(page_size=mesh.page, pages=40),
        )
        for role, mesh in (("prefill", prefill), ("decode", decode))
    )
    with Deployment(ServeConfig(nodes=nodes, port=0)) as deployment:
        pids = [[each.process.pid for each in (node, *node.followers)] for node in deployment.nodes]
        for number, length in enumerate(LENGTHS):
            for pid in chain(*pids):
                memory_server.ask(tap, pid, "poison")
            ids = prompt(length, number)
            body = {"prompt": ids, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
            found = local_http.post(f"{deployment.url}/v1/completions", body)
            assert found.status_code == 200, found.text
            assert found.json()["choices"][0]["text"] == bytes(answer(ids, NEW)).decode()
            for mesh, of_node in zip((prefill, decode), pids, strict=True):
                memories = [memory_server.ask(tap, pid, "read") for pid in of_node]
                check_node(Sentinels(heads), mesh, ids[:-1], memories)


def check_node(sentinels, mesh, known, memories):
    """Compare the memory of a node's processes with what its one request must have left there."""
    devices = mesh.tp * mesh.dp
    shares = [sorted({rank for rank, _ in memory}) for memory, _ in memories]
    half = devices // 2
    assert shares == [list(range(half)), list(range(half, devices))], "equal shares, in order"
    (((dp_rank, pages),), none) = (lent for _, lent in memories)
    assert none == [], "the leader alone lends pages"
    held = set(pages.tolist()) | {0}
    for memory, _ in memories:
        for (rank, layer), view in memory.items():
            if layer == LAYERS:
                continue
            where = f"device {rank} layer {layer}"
            changed = set(np.flatnonzero((view != POISON).any(axis=(1, 2, 3, 4))).tolist())
            if rank // mesh.tp != dp_rank:
                assert changed <= {0}, f"{where} is of another dp rank"
                continue
            assert changed <= held, f"{where}: pages that nobody held"
            expected = sentinels.page_values(known, rank % mesh.tp, mesh.tp)[layer]
            rows = rows_of(view, pages)[..., : len(known), :]
            np.testing.assert_array_equal(rows, expected, err_msg=where)
