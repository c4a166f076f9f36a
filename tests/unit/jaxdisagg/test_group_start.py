"""Which differences between the processes of a node matter, their key, and steps as messages."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdisagg.config import BatchConfig, CacheConfig, MeshConfig, NodeConfig
from jaxdisagg.group.key import KEY_VARIABLE, group_key
from jaxdisagg.group.lockstep import meet, pack, place, unpack
from jaxdisagg.group.messages import decode, encode
from jaxdisagg.group.start import comparable, differences
from jaxdisagg.mesh import make_mesh, node_devices
from jaxdisagg.step import empty_decode, empty_prefill

NODE = NodeConfig(role="prefill", model=Path("a"), mesh=MeshConfig(tp=2, processes=2))


@pytest.mark.parametrize(
    "other",
    [
        {"process": 1, "group": "h:1"},
        {"host": "10.0.0.1", "http_port": 5, "fabric_port": 6},
        {"model": Path("b"), "rules": Path("c"), "router": "http://r"},
        {"mesh": MeshConfig(tp=2, processes=2, cpus=(1,)), "nics": ("eth0",)},
    ],
)
def test_what_may_differ_between_machines(other):
    assert differences(comparable(replace(NODE, **other)), comparable(NODE)) is None


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"role": "decode"}, "role: decode here, prefill at process 0"),
        ({"mesh": MeshConfig(tp=4, processes=2)}, "mesh.tp: 4 here, 2 at process 0"),
        ({"cache": CacheConfig(pages=7)}, "cache.pages: 7 here, 513 at process 0"),
        ({"batch": BatchConfig(chunks=(8,))}, r"batch.chunks: [8] here, [64, 256] at process 0"),
        ({"max_requests": 5}, "max_requests: 5 here, 256 at process 0"),
        ({"mtp": True}, "mtp: True here, False at process 0; they must be the same"),
    ],
)
def test_what_must_be_the_same_is_named(other, message):
    found = differences(comparable(replace(NODE, **other)), comparable(NODE))
    assert found is not None
    assert found.startswith(message)


def test_the_key_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "0123456789abcdef")
    assert group_key() == b"0123456789abcdef"
    monkeypatch.setenv(KEY_VARIABLE, "0123456789abcde")
    with pytest.raises(ValueError, match=KEY_VARIABLE):
        group_key()
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(ValueError, match="need a common secret of 16 characters or more"):
        group_key()


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_step_comes_back_as_it_was(kind):
    padding = empty_prefill(2, 8, 3, 5) if kind == "prefill" else empty_decode(2, 8, 5, 9)
    rng = np.random.default_rng(3)
    inputs = jax.tree.map(lambda a: rng.integers(-9, 99, a.shape).astype(a.dtype), padding)
    number = (1 << 40) + 3
    step = decode(encode(pack(kind, number, 8, inputs)))
    assert (step.kind, step.number, step.bucket) == (kind, number, 8)
    found = unpack(step, padding)
    assert type(found) is type(inputs)
    jax.tree.map(np.testing.assert_array_equal, found, inputs)


def test_a_step_of_another_size_is_refused():
    step = pack("prefill", 1, 8, empty_prefill(2, 8, 3, 5))
    with pytest.raises(ValueError, match="page_table: 120 bytes came for a prefill step of 8, 144"):
        unpack(step, empty_prefill(2, 8, 3, 6))


@pytest.mark.parametrize("shape", [(4, 1), (2, 2), (1, 1)])
def test_every_group_of_devices_meets(shape):
    tp, dp = shape
    meet(make_mesh(tp=tp, dp=dp, kv_heads=2))


def test_place_puts_each_rank_its_part():
    mesh = make_mesh(tp=2, dp=2, kv_heads=2)
    array = np.arange(8, dtype=np.int32)
    placed = place({"a": array}, NamedSharding(mesh, P("dp")))["a"]
    assert [np.asarray(s.data).tolist() for s in placed.addressable_shards] == [
        [0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7],
    ]  # fmt: skip


def test_a_node_of_one_process_uses_its_own_devices():
    assert node_devices(2, 1) == jax.local_devices()
    with pytest.raises(ValueError, match="processes=2, but jax knows 1"):
        node_devices(2, 2)
