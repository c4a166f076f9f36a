"""The Python face of the engine: configuration, errors, argument checks, events."""

import contextlib
import select
import socket
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest
from fabric_peer import wait_for
from nodes import wait_until

from ffi_transport import _native
from ffi_transport.engine import LIBFABRIC_VARIABLE, TransferEngine
from ffi_transport.errors import (
    FabricUnavailable,
    PeerLost,
    ProtocolError,
    RegistrationFailed,
    TransferTimeout,
    TransportError,
    from_native,
)
from ffi_transport.events import (
    CounterOvershoot,
    CounterReached,
    MessageReceived,
    PeerConnected,
    PeerLostEvent,
    TransferEnded,
)
from ffi_transport.types import EngineConfig, PageUnit, PlanWrite, RemoteRegion

UNIT = PageUnit(1024, 0, 1024, 0, 1024)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"provider": "udp"}, "provider: 'udp' is none of auto, efa"),
        ({"bind": "0.0.0.0"}, "bind: 0.0.0.0"),
        ({"bind": "localhost"}, "bind: 'localhost' is not an IPv4 address"),
        ({"control_port": 65536}, "control_port: 65536"),
        ({"slot_bits": 21}, "slot_bits: 21"),
        ({"bytes_in_flight": -1}, "bytes_in_flight: -1"),
        ({"posts_in_flight": 0}, "posts_in_flight: 0"),
        ({"peer_timeout_ms": 250}, "peer_timeout_ms: 250 must exceed"),
        ({"spin_us": -1}, "spin_us: -1"),
    ],
)
def test_config_names_the_bad_field(fields, words):
    with pytest.raises(ValueError, match=words):
        EngineConfig(**fields)


def test_missing_libfabric_says_what_to_install(monkeypatch):
    for config in (EngineConfig(libfabric_path="/nowhere/libfabric.so.1"), EngineConfig()):
        monkeypatch.setenv(LIBFABRIC_VARIABLE, "/nowhere/libfabric.so.1")
        with pytest.raises(FabricUnavailable, match="apt-get install libfabric1") as caught:
            TransferEngine(config)
        assert caught.value.missing == "libfabric"
    # What needs no libfabric works without it.
    TransferEngine(EngineConfig(provider="loopback")).close()


def test_library_that_is_no_libfabric():
    with pytest.raises(FabricUnavailable, match="is not a libfabric"):
        TransferEngine(EngineConfig(libfabric_path="libc.so.6"))


def test_import_loads_no_libfabric():
    code = (
        "import ffi_transport.engine, ffi_transport.trigger\n"
        "assert 'libfabric' not in open('/proc/self/maps').read()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_hardware_provider_without_hardware():
    with pytest.raises(FabricUnavailable, match=r"no provider 'efa'.*it offers: ") as caught:
        TransferEngine(EngineConfig(provider="efa"))
    assert caught.value.missing == "efa"


def test_unknown_domain(provider):
    with pytest.raises(FabricUnavailable, match=r"no domain 'mlx5_0'; it has: .*lo"):
        TransferEngine(EngineConfig(provider=provider, domains=("mlx5_0",)))


def test_port_in_use(provider):
    with TransferEngine(EngineConfig(provider=provider)) as engine:
        port = int(engine.control_address.rpartition(":")[2])
        with pytest.raises(FabricUnavailable, match=f"port {port}.*in use"):
            TransferEngine(EngineConfig(provider=provider, control_port=port))
    TransferEngine(EngineConfig(provider=provider, control_port=port)).close()  # free again


def test_garbage_on_the_control_port_does_no_harm(provider, make_node):
    node, other = make_node(provider), make_node(provider)
    host, _, port = node.engine.control_address.rpartition(":")
    random = np.random.default_rng(0)
    for length in (1, 64, 5000, 100000):
        with (
            contextlib.suppress(OSError),  # the engine may hang up
            socket.create_connection((host, int(port)), timeout=10) as stranger,
        ):
            stranger.sendall(random.bytes(length))
    peer = other.engine.connect(node.engine.control_address, 30)
    other.engine.send(peer, b"hello")
    assert wait_for(node.engine, MessageReceived, []).payload == b"hello"


def test_connect_failures(provider, make_node):
    node = make_node(provider)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(TransferTimeout, match=f"no answer to HELLO from {address}") as caught:
        node.engine.connect(address, 0.3)
    assert caught.value.missing == "HELLO_ACK"
    assert caught.value.elapsed_s is not None
    assert caught.value.elapsed_s >= 0.3
    with pytest.raises(ValueError, match="is not an address"):
        node.engine.connect("nonsense", 1)
    with pytest.raises(FabricUnavailable, match="is not known"):
        node.engine.connect("no-such-host.invalid:1", 1)


def test_refusal_names_the_field(make_node):
    node, other = make_node("loopback"), make_node("loopback", slot_bits=10)
    with pytest.raises(ProtocolError, match="slot_bits: this node uses 10, the peer 20"):
        node.engine.connect(other.engine.control_address, 30)


def test_hello_can_come_later(make_node):
    early, late = make_node("loopback", hello=b"early"), make_node("loopback", hello=None)
    with pytest.raises(ValueError, match="set_hello"):
        late.engine.connect(early.engine.control_address, 1)
    timer = threading.Timer(0.1, late.engine.set_hello, [b"late"])
    timer.start()
    peer = early.engine.connect(late.engine.control_address, 30)
    timer.join()
    assert early.engine.peer_hello(peer) == b"late"
    connected = wait_for(late.engine, PeerConnected, [])
    assert connected == PeerConnected(1, early.engine.control_address, b"early")


def test_event_descriptor_follows_the_queue(make_node):
    node, other = make_node("loopback"), make_node("loopback")
    assert select.select([node.engine.event_fd], [], [], 0)[0] == []
    assert node.engine.poll(0) == []
    peer = other.engine.connect(node.engine.control_address, 30)
    assert select.select([node.engine.event_fd], [], [], 30)[0]
    assert isinstance(node.engine.poll(0)[0], PeerConnected)
    assert select.select([node.engine.event_fd], [], [], 0)[0] == []
    other.engine.send(peer, b"")
    assert select.select([node.engine.event_fd], [], [], 30)[0]
    assert node.engine.poll(0) == [MessageReceived(1, b"")]


def test_poll_releases_the_gil_and_ends_with_the_engine(make_node):
    node = make_node("loopback")
    results = []
    waiting = threading.Thread(target=lambda: results.append(node.engine.poll(1000)))
    waiting.start()
    node.engine.close()  # runs while the other thread waits, so that one holds no GIL
    waiting.join(30)
    assert results == [[]]
    node.engine.close()


def test_closed_engine_refuses(make_node):
    node = make_node("loopback")
    node.engine.close()
    for call in (
        lambda: node.engine.connect("loopback:1", 1),
        lambda: node.engine.open_transfer(1, 1),
        lambda: node.engine.register_memory(4096, 1),
        lambda: node.engine.set_hello(b""),
    ):
        with pytest.raises(TransportError, match="the engine is closed"):
            call()


def connected(make_node):
    sender, receiver = make_node("loopback"), make_node("loopback")
    return sender, receiver, sender.engine.connect(receiver.engine.control_address, 30)


def test_write_arguments_are_checked(make_node):
    sender, receiver, peer = connected(make_node)
    engine, target = sender.engine, receiver.region.remote()
    transfer = engine.open_transfer(peer, 1)

    def paged(source, destination, unit=UNIT):
        engine.write_paged(transfer, sender.region, target, source, destination, unit)

    with pytest.raises(ValueError, match="source page 1024"):
        paged([1024], [0])
    with pytest.raises(ValueError, match="source_pages has 2 pages, destination_pages 1"):
        paged([0, 1], [0])
    with pytest.raises(ValueError, match=r"not in 0\.\.2"):
        paged([-1], [0])
    with pytest.raises(ValueError, match="integers, not float64"):
        paged([0.5], [0])
    with pytest.raises(ValueError, match="one dimension"):
        paged([[0]], [[0]])
    with pytest.raises(ValueError, match="negative"):
        paged([0], [0], PageUnit(1024, -1, 1024, 0, 1))
    with pytest.raises(ValueError, match="several units"):
        paged([0], [0], PageUnit(1 << 21, 0, 1 << 21, 0, 1 << 21))
    with pytest.raises(ValueError, match="no region descriptor"):
        RemoteRegion(b"nonsense", 5)
    with pytest.raises(ValueError, match="length: 5, the descriptor says 1048576"):
        RemoteRegion(target.descriptor, 5)
    with pytest.raises(ValueError, match="no transfer 99"):
        engine.seal(99)
    with pytest.raises(ValueError, match="no peer 99"):
        engine.open_transfer(99, 1)
    with pytest.raises(ValueError, match=r"slot 1048576 is not in 0\.\.1048575"):
        engine.open_transfer(peer, 1 << 20)
    with pytest.raises(ValueError, match="2 remotes for 1 layers"):
        engine.add_plan(1, 1, 1, [PlanWrite(transfer, 0, 0, 1, [0], [0], UNIT, (target, target))])
    with pytest.raises(ValueError, match="no source region was set for ordinal 0, layer 0"):
        engine.add_plan(1, 1, 1, [PlanWrite(transfer, 0, 0, 1, [0], [0], UNIT, (target,))])
    engine.set_source_region(2048 + 3, 0, sender.region)  # a later process's need not begin at 0
    for far in (2048 + 3 + 64, 2048 + 3 - 64):
        with pytest.raises(ValueError, match=f"ordinal {far} is not within 64"):
            engine.set_source_region(far, 0, sender.region)
    with pytest.raises(ValueError, match="none may be negative"):
        engine.set_source_region(-1, 0, sender.region)
    assert engine.counters()["writes_posted"] == 0
    paged([], [])  # nothing to do
    engine.seal(transfer)
    assert wait_for(engine, TransferEnded, []).units_planned == 0


def test_counters_and_overshoot(make_node):
    sender, receiver, peer = connected(make_node)
    receiver.engine.arm(3, 2)
    with pytest.raises(ValueError, match="slot 3 is already armed"):
        receiver.engine.arm(3, 2)
    transfer = sender.engine.open_transfer(peer, 3)
    sender.engine.write(transfer, sender.region, 0, receiver.region.remote(), 0, 100, units=2)
    seen = []
    assert wait_for(receiver.engine, CounterReached, seen) == CounterReached(3, 2)
    sender.engine.write(transfer, sender.region, 0, receiver.region.remote(), 0, 100)
    assert wait_for(receiver.engine, CounterOvershoot, seen) == CounterOvershoot(3, 2, 3)
    receiver.engine.disarm(3)
    sender.engine.write(transfer, sender.region, 0, receiver.region.remote(), 0, 100)
    sender.engine.seal(transfer)
    wait_for(sender.engine, TransferEnded, [])
    wait_until(lambda: receiver.engine.counters()["stale_immediates"], "the receiver's own thread")
    assert receiver.engine.counters()["stale_immediates"] == 1
    receiver.engine.arm(3, 1, adopt_early=True)
    assert wait_for(receiver.engine, CounterReached, seen[2:]) == CounterReached(3, 1)


def test_deregister(make_node):
    node = make_node("loopback")
    node.engine.deregister(node.region)
    with pytest.raises(ValueError, match="is not registered"):
        node.engine.deregister(node.region)


def test_disconnect_is_silent_here_and_told_there(make_node):
    sender, receiver, peer = connected(make_node)
    sender.engine.disconnect(peer)
    lost = wait_for(receiver.engine, PeerLostEvent, [])
    assert lost.reason == "the peer disconnected"
    with pytest.raises(PeerLost, match="this node disconnected"):
        sender.engine.send(peer, b"x")
    sender.engine.disconnect(peer)
    sender.engine.fence(peer)
    assert not [e for e in sender.engine.poll(0) if isinstance(e, PeerLostEvent)]


def test_native_codes_become_their_classes():
    for code, kind in (
        (3, FabricUnavailable),
        (4, PeerLost),
        (5, TransferTimeout),
        (6, RegistrationFailed),
        (7, ProtocolError),
        (8, TransportError),
    ):
        error = from_native(code, "text", 4, -1, 0.5, "a word")
        assert type(error) is kind
        assert isinstance(error, TransportError)
        assert (error.peer, error.id, error.elapsed_s, error.missing) == (4, None, 0.5, "a word")
    assert type(from_native(2, "text", -1, -1, -1, "")) is ValueError


def test_fifth_step_waits_for_a_free_place(make_node):
    node = make_node("loopback")
    for step in range(4):
        node.engine.add_plan(step, 1, 1, [])
    with pytest.raises(TransferTimeout, match=r"step 2 waits for 1 triggers: .ordinal 0, layer 0"):
        node.engine.add_plan(4, 1, 1, [], timeout_s=0.05)
    timer = threading.Timer(0.1, _native.fire_trigger, [node.engine.index, 1, 0, 0, 0])
    timer.start()
    node.engine.add_plan(4, [0], 1, [])  # waits without the GIL, else the timer could not run
    timer.join()
    assert node.engine.counters()["steps_live"] == 4


def hello_packet(address: bytes) -> bytes:
    """A HELLO as docs/protocol.md describes it, of a sender that calls itself `address`."""

    def string(value: bytes) -> bytes:
        return struct.pack("<I", len(value)) + value

    payload = string(b"\x01\x00") + string(address) + string(b"loopback")
    payload += struct.pack("<II", 20, 1) + string(b"\x02\x00") + string(b"application")
    header = struct.pack("<IHBB5QIII4x", 0x4744584A, 2, 1, 3, 11, 0, 22, 0, 0, 1, len(payload),
                         len(payload))  # fmt: skip
    assert len(header) == 64
    return header + payload


def test_text_of_a_peer_need_not_be_utf8(make_node):
    node = make_node("loopback")
    packet = hello_packet("größe".encode()[:3] + b"\xff:1")
    _native.send_raw_packet(node.engine.control_address, packet)
    connected = wait_for(node.engine, PeerConnected, [])
    assert connected == PeerConnected(1, "gr\ufffd\ufffd:1", b"application")
    node.engine.fence(1)
    with pytest.raises(PeerLost, match="gr\ufffd\ufffd:1"):
        node.engine.send(1, b"x")
