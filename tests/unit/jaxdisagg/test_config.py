"""What the command line and TOML may say of nodes, and how a bad word is answered."""

from dataclasses import replace
from pathlib import Path

import pytest
from repository import REPOSITORY

from ffi_transport.types import MAX_DOMAINS
from jaxdisagg.config import (
    MAX_CPUS,
    MAX_NICS,
    BatchConfig,
    CacheConfig,
    MeshConfig,
    NodeConfig,
    ServeConfig,
    Timeouts,
)
from jaxdisagg.config_text import node_from_toml, parse_list, parse_node, serve_from_toml

BASE = NodeConfig(role="decode", model=Path("m"))


def apart(**decode) -> ServeConfig:
    return ServeConfig(
        nodes=(replace(BASE, role="prefill", id="p"), replace(BASE, **{"id": "d"} | decode))
    )


def test_a_node_from_the_command_line():
    node = parse_node("tp=2,dp=3,cpus=0+4-6,pages=77,page_size=32,http_port=81", BASE)
    assert node.mesh == MeshConfig(tp=2, dp=3, cpus=(0, 4, 5, 6))
    assert node.cache == CacheConfig(page_size=32, pages=77)
    assert (node.http_port, node.role) == (81, "decode")
    assert parse_node("", BASE) == BASE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp=0", "tp=0 must be at least 1"),
        ("tp=two", "tp='two': expected a whole number"),
        ("pp=2", "'pp=2': expected tp=, dp="),
        ("tp", "'tp': expected tp=, dp="),
        ("cpus=a", "cpus='a': expected numbers"),
        ("cpus=1-x", "cpus='1-x': expected numbers"),
        ("cpus=3-1", "cpus='3-1': expected numbers"),
        ("cpus=0-999999999999", "cpus=.*: the numbers must be below 4096"),
        ("tp=²", "tp='²': expected a whole number"),
        ("http_port=99999", r"http_port=99999 must be in 0\.\.65535"),
        ("pages=1", "pages=1 must be at least 2"),
        ("tp=4,processes=3", r"processes=3 must divide the dp\*tp=4 devices"),
        ("processes=2", r"processes=2 must divide the dp\*tp=1 devices"),
        ("page_size=1048577", "page_size=1048577 must be at most 1048576"),
        ("tp=2,processes=0", "processes=0 must be at least 1"),
        ("tp=2,dp=2,tp=4", "tp comes twice in 'tp=2,dp=2,tp=4'"),
        ("nics=eth0,nics=eth1", "nics comes twice"),
        ("cpus=0,cpus=1", "cpus comes twice"),
        ("page_size=8,page_size=8", "page_size comes twice"),
    ],
)
def test_a_bad_word_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        parse_node(text, BASE)


def test_a_node_of_several_processes():
    node = parse_node("tp=2,dp=3,processes=3,cpus=0-6", BASE)
    assert node.mesh.processes == 3
    assert [node.mesh.cpus_of(i) for i in range(3)] == [(0, 1), (2, 3), (4, 5, 6)]
    shared = replace(node.mesh, cpus=(4, 5))
    assert [shared.cpus_of(i) for i in range(3)] == [(4, 5)] * 3
    assert BASE.mesh.cpus_of(0) == ()
    follower = replace(node, process=2, group="10.0.0.1:7000")
    assert (follower.process, follower.group) == (2, "10.0.0.1:7000")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"process": 2, "group": "h:1"}, r"process=2 must be in 0\.\.1: processes=2"),
        ({"process": -1, "group": "h:1"}, r"process=-1 must be in 0\.\.1"),
        ({"process": 1}, "group: process 1 must know where process 0 listens"),
        ({"group": "7000"}, "group='7000' must be HOST:PORT"),
        ({"group": "h:port"}, "group='h:port' must be HOST:PORT"),
        ({"group": "h:70000"}, r"group=70000 must be in 0\.\.65535"),
    ],
)
def test_a_process_that_cannot_be_is_refused(values, message):
    node = parse_node("tp=2,processes=2", BASE)
    with pytest.raises(ValueError, match=message):
        replace(node, **values)


def test_a_deployment_starts_whole_nodes():
    mixed = replace(parse_node("tp=2,processes=2", BASE), role="mixed")
    ServeConfig(nodes=(mixed,))
    with pytest.raises(ValueError, match="process=1: decode-0 is started as a whole"):
        ServeConfig(nodes=(replace(mixed, id="decode-0", process=1, group="h:1"),))


def test_cpu_lists():
    assert parse_list("3", "cpus", MAX_CPUS) == (3,)
    assert parse_list("0-2+5", "cpus", MAX_CPUS) == (0, 1, 2, 5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BatchConfig(decode_rows=(1, 2)), "decode_rows=1 must be at least 2"),
        (lambda: BatchConfig(chunks=(64, 16)), "must ascend"),
        (lambda: BatchConfig(chunks=()), "at least one bucket"),
        (lambda: Timeouts(prefill=0), "prefill=0 must be in"),
        (lambda: Timeouts(queue=float("nan")), "queue=nan must be in"),
        (lambda: Timeouts(connect=float("inf")), "connect=inf must be in"),
        (lambda: Timeouts(member=1e-7), "member=1e-07 must be in"),
        (lambda: Timeouts(member=1e9), "member=1000000000.0 must be in"),
        (lambda: replace(BASE, group="h:1"), "group='h:1': a node of one process has no others"),
        (lambda: NodeConfig(role="decode", model=Path("m"), dtype="fp8"), "dtype='fp8' must be"),
        (lambda: ServeConfig(nodes=(BASE,)), "decode nodes need at least one prefill node"),
        (lambda: ServeConfig(nodes=()), "at least one decode or mixed node"),
        (lambda: apart(mtp=True), "mtp: False at p, True at d"),
        (lambda: apart(id="p"), "'p' names more than one node"),
        (lambda: replace(BASE, id=""), "id='' must be 1 to 256 printable ASCII"),
        (lambda: replace(BASE, id="a\nb"), r"id='a\\nb' must be 1 to 256 printable ASCII"),
        (lambda: replace(BASE, id="\u4e2d"), "id=.* must be 1 to 256 printable ASCII"),
        (lambda: replace(BASE, id="d" * 257), "id=.* must be 1 to 256 printable ASCII"),
        (lambda: replace(BASE, provider="loopback"), "provider='loopback' must be one of auto"),
        (lambda: ServeConfig(nodes=(replace(BASE, role="mixed"),), port=-1), "port=-1 must be"),
        (lambda: apart(dtype="bfloat16"), "dtype: float32 at p, bfloat16 at d"),
    ],
)
def test_what_cannot_work_is_refused_at_construction(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_deployment_from_toml(tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text(
        """
port = 9000
[[node]]
role = "prefill"
mesh = {tp = 2, cpus = [0]}
[[node]]
role = "decode"
mesh = {tp = 2}
batch = {chunks = [8, 16]}
timeouts = {prefill = 3.5}
"""
    )
    serve = serve_from_toml(file, BASE)
    assert serve.port == 9000
    assert [n.id for n in serve.nodes] == ["prefill-0", "decode-1"]
    assert serve.nodes[0].mesh == MeshConfig(tp=2, cpus=(0,))
    assert serve.nodes[1].batch.chunks == (8, 16)
    assert serve.nodes[1].timeouts.prefill == 3.5


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"--config: {tmp_path}/none cannot be read: No such file"):
        serve_from_toml(tmp_path / "none", BASE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port = ", "not valid TOML"),
        ("ports = 1", "ports: unknown"),
        ("[[node]]\nrole = 'mixed'\nspeed = 1", "speed: unknown; a node has"),
        ("[[node]]\nrole = 'mixed'\nmesh = {pp = 2}", r"mesh\.pp: unknown"),
        ("node = 3", r"node: expected \[\[node\]\] tables"),
        ("port = 'http'\n[[node]]\nrole = 'mixed'", "port='http': expected"),
        ("[[node]]\nrole = 'mixed'\nmesh = 2", r"got `int` - at `\$\.mesh`"),
        ("[[node]]\nrole = 'mixed'\nmesh = {tp = 'two'}", r"got `str` - at `\$\.mesh\.tp`"),
        ("[[node]]\nrole = 'mixed'\nmesh = {tp = 0}", "tp=0 must be at least 1"),
        ("[[node]]\nrole = 'both'", "role"),
        ("[[node]]\nrole = 'mixed'\nmodel = 3", "expected a path, got 3"),
        ("[[node]]\nrole = 'mixed'\nbatch = {chunks = ['a']}", r"\$\.batch\.chunks"),
    ],
)
def test_toml_that_says_something_else_is_named(tmp_path, text, message):
    file = tmp_path / "serve.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        serve_from_toml(file, BASE)


def test_a_node_may_name_as_many_nics_as_an_engine_opens():
    assert MAX_NICS == MAX_DOMAINS


def test_the_deployment_of_the_readme_is_one(tmp_path):
    file = tmp_path / "deployment.toml"
    file.write_text((REPOSITORY / "README.md").read_text().split("```toml")[1].split("```")[0])
    prefill, decode = serve_from_toml(file, BASE).nodes
    assert (prefill.role, prefill.nics) == ("prefill", ("127.0.0.1", "127.0.0.2"))
    assert (decode.mesh, decode.cache.page_size) == (MeshConfig(tp=4, processes=2), 64)


def test_numbers_of_a_file_have_the_words_limits():
    with pytest.raises(ValueError, match=r"gpus\[0\]=5000 must be in 0..1023"):
        node_from_toml({"mesh": {"gpus": [5000]}}, BASE)
    with pytest.raises(ValueError, match=r"cpus\[1\]=4096 must be in 0..4095"):
        node_from_toml({"mesh": {"cpus": [4095, 4096]}}, BASE)
    with pytest.raises(ValueError, match=r"gpus\[0\]=-1 must be in"):
        MeshConfig(gpus=(-1,))
