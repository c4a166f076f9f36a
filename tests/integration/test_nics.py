"""Nodes with several NICs, in unequal numbers: equal tokens, and every NIC has its share.

The NICs are addresses of the loopback interface: each is a domain with endpoints, a thread and
registrations of its own. What is counted where is the provider's word, domain by domain.
"""

import struct
from dataclasses import replace
from typing import Any

import local_http
import numpy as np
import pytest
from nodes import Pair, generate_all, mixed, node_config, wait_until

from jaxdisagg.config import BatchConfig, ServeConfig
from jaxdisagg.config_text import parse_node
from jaxdisagg.deployment import Deployment
from jaxdisagg.hello import Region
from jaxdisagg.messages import decode_hello

LENGTHS = (17, 64, 130)
TOKENS = 8


def addresses(n: int) -> tuple[str, ...]:
    return tuple(f"127.0.0.{i + 1}" for i in range(n))


def prompts() -> list[list[int]]:
    random = np.random.default_rng(5)
    return [random.integers(0, 250, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(golden_folder) -> list[list[int]]:
    """The tokens of one process on one device, where nothing is transferred."""
    parts = mixed(golden_folder("qwen3_untied"))
    try:
        return [g.tokens for g in generate_all(parts.node, prompts(), TOKENS)]
    finally:
        parts.stop(10.0)


def announced(hello: bytes) -> list[set[tuple[int, ...]]]:
    """The domains that each device's buffers are registered with, as the other side reads it."""
    found = decode_hello(hello)
    return [
        {domains_of(region) for region in (*row, context.region)}
        for row, context in zip(found.regions, found.contexts, strict=True)
    ]


def domains_of(region: Region) -> tuple[int, ...]:
    """A descriptor is a length (u64) and a number (u32), then of each domain its index (u32)..."""
    (count,) = struct.unpack_from("<I", region.descriptor, 8)
    return tuple(struct.unpack_from("<I", region.descriptor, 12 + 20 * i)[0] for i in range(count))


def spread(counts: list[int]) -> int:
    return max(counts) - min(counts)


@pytest.mark.parametrize(
    ("prefill", "decode", "shares"),
    [
        # devices, NICs of each side; then the domains of each device, source and destination.
        ((1, 1), (1, 2), ([(0,)], [(0, 1)])),
        ((2, 2), (2, 3), ([(0,), (1,)], [(0, 1, 2)] * 2)),
        ((2, 4), (1, 2), ([(0, 2), (1, 3)], [(0, 1)])),
        pytest.param((1, 3), (1, 2), ([(0, 1, 2)], [(0, 1)]), marks=pytest.mark.slow),
        pytest.param((1, 1), (2, 2), ([(0,)], [(0,), (1,)]), marks=pytest.mark.slow),
    ],
)
def test_unequal_numbers_of_nics(golden_folder, expected, prefill, decode, shares):
    sides = {
        name: {"tp": tp, "nics": addresses(nics)}
        for name, (tp, nics) in (("prefill", prefill), ("decode", decode))
    }
    with Pair(golden_folder("qwen3_untied"), **sides) as pair:
        found = [g.tokens for g in generate_all(pair.decode.node, prompts(), TOKENS)]
        pair.idle()
        assert found == expected
        sent = pair.prefill.node.state()["fabric"]["domains"]
        got = pair.decode.node.state()["fabric"]["domains"]
        units = pair.decode.node.state()["page_writes"]
        assert [domain["name"] for domain in sent] == list(addresses(prefill[1]))
        assert [domain["name"] for domain in got] == list(addresses(decode[1]))
        # All bytes, over all NICs of both sides, none twice.
        assert sum(d["units_completed"] for d in sent) == units > 0
        assert sum(d["units_counted"] for d in got) == units
        assert all(d["bytes_posted"] == d["bytes_completed"] > 0 for d in sent)
        assert (
            sum(d["bytes_completed"] for d in sent)
            == pair.prefill.engine.counters()["bytes_completed"]
        )
        # Evenly: of each pair of devices, the NICs of a side differ by at most one unit.
        pairs = prefill[0] * decode[0]
        assert spread([d["units_completed"] for d in sent]) <= pairs
        assert spread([d["units_counted"] for d in got]) <= pairs
        hellos = (
            pair.decode.engine.peer_hello(pair.decode.messenger.peers.connected()[0].id),
            pair.prefill.engine.peer_hello(int(next(iter(pair.prefill.node.state()["peers"])))),
        )
        for hello, said in zip(hellos, shares, strict=True):
            assert announced(hello) == [{share} for share in said]


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("tp=2", "tp=1"),
        pytest.param("tp=2,processes=2", "tp=2,processes=2", marks=pytest.mark.slow),
    ],
)
def test_processes_with_two_and_three_nics(serving_folder, prefill, decode):
    """As the command line starts them; a mixed node beside them says what the answer must be."""
    base = node_config(
        "mixed", serving_folder, batch=BatchConfig(chunks=(16,), decode_rows=(2,), max_model_len=64)
    )
    nodes = [
        parse_node(text, replace(base, role=role, id=role))
        for role, text in (
            ("prefill", f"{prefill},nics=127.0.0.2+127.0.0.3"),
            ("decode", f"{decode},nics=127.0.0.4+127.0.0.5+127.0.0.6"),
            ("mixed", "tp=1"),
        )
    ]
    body = {"prompt": [(7 * i) % 250 for i in range(40)], "max_tokens": 8, "temperature": 0}
    with Deployment(ServeConfig(nodes=tuple(nodes), port=0)) as deployment:
        urls = {node.config.id: node.url for node in deployment.nodes}
        answers = [
            local_http.post(f"{urls[id]}/v1/completions", body) for id in ("decode", "mixed")
        ]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1

        def domains(id: str) -> list[dict[str, Any]]:
            return local_http.get(f"{urls[id]}/debug/state").json()["fabric"]["domains"]

        def settled() -> bool:  # what other processes count is told with a delay
            posted = sum(domain["units_completed"] for domain in domains("prefill"))
            return posted == sum(domain["units_counted"] for domain in domains("decode")) > 0

        wait_until(settled, "what was sent is what was counted")
        sent, got = domains("prefill"), domains("decode")
    processes = nodes[0].mesh.processes
    assert [domain["name"] for domain in sent] == ["127.0.0.2", "127.0.0.3"] * processes
    expected = ["127.0.0.4", "127.0.0.5", "127.0.0.6"] * processes
    assert [domain["name"] for domain in got] == expected
    assert all(domain["bytes_completed"] > 0 for domain in sent)
    assert all(domain["units_counted"] > 0 for domain in got)
