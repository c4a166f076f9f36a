"""The transfer benchmark's two sides run where they are told to."""

import json
import os
import subprocess
import sys

import pytest

from ffi_transport.errors import TransportError
from jaxdisagg.bench.transfer import Bench, permutations
from jaxdisagg.bench.transfer_side import TransferSide, two_cores

BUFFER = 1 << 20
PAGE = 64 << 10


def test_each_side_has_a_core_of_its_own_and_the_caller_gets_its_cores_back():
    allowed = os.sched_getaffinity(0)
    cores = two_cores()
    if cores == (None, None):
        pytest.skip("one core only")
    sender, receiver = (TransferSide(core=core) for core in cores)
    with Bench(sender, receiver, BUFFER) as bench:
        source, destination = permutations(BUFFER, PAGE, 2 * BUFFER)
        assert bench.transfer(PAGE, source, destination) > 0
        assert os.sched_getaffinity(0) == {cores[0]}
        assert os.sched_getaffinity(bench.child.pid) == {cores[1]}
    assert os.sched_getaffinity(0) == allowed


def test_sides_meet_at_the_addresses_that_they_are_given():
    with Bench(
        TransferSide(bind="127.0.0.2"), TransferSide(bind="127.0.0.3"), BUFFER, streams=2
    ) as bench:
        assert bench.engine.control_address.startswith("127.0.0.2:")
        ends = [(s.getsockname()[0], s.getpeername()[0]) for s in bench.streams]
        assert ends == [("127.0.0.2", "127.0.0.3")] * 2
        source, destination = permutations(BUFFER, PAGE, BUFFER)
        assert bench.transfer(PAGE, source, destination) > 0
        assert bench.raw_tcp(PAGE, source, destination) > 0
        assert bench.engine.counters()["bytes_completed"] == BUFFER


def test_pages_are_shared_by_the_domains_of_both_sides():
    sender = TransferSide(domains=("127.0.0.2", "127.0.0.3"))
    receiver = TransferSide(bind="127.0.0.4", domains=("127.0.0.4", "127.0.0.5", "127.0.0.6"))
    with Bench(sender, receiver, BUFFER, streams=3) as bench:
        ends = [(s.getsockname()[0], s.getpeername()[0]) for s in bench.streams]
        assert ends == [(f"127.0.0.{2 + i % 2}", f"127.0.0.{4 + i}") for i in range(3)]
        source, destination = permutations(BUFFER, PAGE, 3 * BUFFER)
        assert bench.transfer(PAGE, source, destination) > 0
        assert [d["units_completed"] for d in bench.engine.domain_counters()] == [24, 24]
        assert bench.received_units == (16, 16, 16)


def test_what_the_receiving_process_cannot_have_is_said():
    with pytest.raises(TransportError, match=r"the receiving process: .* requested address"):
        Bench(TransferSide(), TransferSide(bind="203.0.113.1"), BUFFER)


def test_a_receiving_process_whose_sender_is_gone_ends_without_a_word():
    reading, writing = os.pipe()
    os.close(reading)
    side = json.dumps({"bind": "203.0.113.1"})
    with os.fdopen(writing, "wb") as nobody:
        done = subprocess.run(
            [sys.executable, "-m", "jaxdisagg.bench.transfer_side", side, str(BUFFER), "1"],
            stdout=nobody,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (2, "")
