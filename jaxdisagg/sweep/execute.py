"""Running a sweep's pairs on this machine's devices: whole nodes, and libfabric between them.

All nodes live in this process, prefill nodes on its first devices, decode nodes on those after
them; each is built once. Of a pair, requests run one after the other; what both engines count
meanwhile stands beside what the plan says.
"""

import asyncio
import contextlib
import random
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax

from ffi_transport.engine import TransferEngine
from ffi_transport.errors import TransportError
from jaxdisagg.api import GenerationRequest, RequestError, RequestTiming
from jaxdisagg.assembly import DecodeParts, PrefillParts
from jaxdisagg.config import BatchConfig, NodeConfig, Role, Timeouts
from jaxdisagg.decode_node import DecodeNode
from jaxdisagg.fabric import open_fabric
from jaxdisagg.mesh import rank_devices
from jaxdisagg.model_loading import load_model
from jaxdisagg.sweep.domains import nic_rows
from jaxdisagg.sweep.predict import Load, Side, request_traffic

PATIENCE_SECONDS = 30.0
REQUEST_SECONDS = 120.0
STOP_SECONDS = 10.0
ANSWER_TOKENS = 2
HOST = "127.0.0.1"
COUNTED = {
    "page_writes": ("posted", "acknowledged", "counted"),
    "bytes": ("posted", "acknowledged"),
}
BATCH = BatchConfig(chunks=(16, 64), prefill_rows=2, decode_rows=(2,))  # few steps to compile
TIMEOUTS = Timeouts(queue=60.0, prefill=60.0)


class RunError(Exception):
    """A pair that could not be run; the text says what was waited for."""


def run_pairs(
    pairs: Sequence[tuple[Side, Side]], load: Load, advance: Callable[[str], None]
) -> Iterator[tuple[Side, Side, int, dict[str, Any] | str]]:
    """Yield (prefill side, decode side, tokens, what was measured or why it was not) of each pair.

    `advance` is called after each node and each length of a pair: `steps` times in all. Every node
    ends with the generator.
    """
    sources = {source.text: source for source, _ in pairs}
    targets = {target.text: target for _, target in pairs}
    first = max((source.node.mesh.devices for source in sources.values()), default=0)
    with contextlib.ExitStack() as decoders:
        decode: dict[str, DecodeParts | str] = {}
        for number, (text, target) in enumerate(targets.items()):
            config = _node(target, "decode", number, load)
            decode[text] = _started(decoders, DecodeParts, target, config, first)
            advance(f"decode {text}")
        for number, (text, source) in enumerate(sources.items()):
            with contextlib.ExitStack() as prefillers:
                config = _node(source, "prefill", number, load)
                prefill = _started(prefillers, PrefillParts, source, config, 0)
                advance(f"prefill {text}")
                for target in (target for of, target in pairs if of.text == text):
                    for tokens in load.tokens:
                        there = prefill, decode[target.text]
                        found = _measured(*there, source, target, tokens, load.requests)
                        advance(f"{text} -> {target.text}")
                        yield source, target, tokens, found


def steps(pairs: Sequence[tuple[Side, Side]], load: Load) -> int:
    """How often `run_pairs` calls `advance`."""
    nodes = {source.text for source, _ in pairs}, {target.text for _, target in pairs}
    return sum(map(len, nodes)) + len(pairs) * len(load.tokens)


def devices_of(pairs: Sequence[tuple[Side, Side]]) -> int:
    """How many devices `run_pairs` needs."""
    of_sources = max((source.node.mesh.devices for source, _ in pairs), default=0)
    return of_sources + max((target.node.mesh.devices for _, target in pairs), default=0)


def _started[P: (PrefillParts, DecodeParts)](
    stack: contextlib.ExitStack, kind: type[P], side: Side, node: NodeConfig, first_device: int
) -> P | str:
    """A node that runs until `stack` ends, or why there is none."""
    if node.mesh.processes > 1:
        return f"{side.text}: processes={node.mesh.processes}, a run keeps each node in one process"
    last = first_device + node.mesh.devices
    devices = jax.devices()
    if last > len(devices):
        return f"{side.text}: needs devices {first_device}..{last - 1}, {len(devices)} are there"
    try:
        model = load_model(node, devices[first_device:last])
        with contextlib.ExitStack() as opened:
            engine = opened.enter_context(open_fabric(node))
            parts = kind(node, model, engine, lambda _: None)
            opened.pop_all()  # now it is the node's to close
    except (ValueError, OSError, TransportError) as error:
        return f"{node.role} {side.text}: {error}"
    stack.callback(parts.stop, STOP_SECONDS)
    return parts


def _node(side: Side, role: Role, number: int, load: Load) -> NodeConfig:
    batch = replace(BATCH, max_model_len=max(load.tokens) + ANSWER_TOKENS)
    return replace(
        side.node, role=role, id=f"{role}-{number}", batch=batch, timeouts=TIMEOUTS, host=HOST
    )


def _measured(
    prefill: PrefillParts | str,
    decode: DecodeParts | str,
    source: Side,
    destination: Side,
    tokens: int,
    requests: int,
) -> dict[str, Any] | str:
    """What a pair's requests took, or why they could not be run."""
    if isinstance(prefill, str) or isinstance(decode, str):
        return prefill if isinstance(prefill, str) else str(decode)
    try:
        _connect(prefill.engine, decode)
        before = _counts(prefill.engine, decode.engine)
        there = (
            (source, prefill.engine, rank_devices(prefill.runner.mesh)),
            (destination, decode.engine, rank_devices(decode.runner.mesh)),
        )
        domains = [engine.domain_counters() for _, engine, _ in there]
        vocabulary = source.fit.config.vocab_size
        draw = random.Random(f"{source.text} {destination.text} {tokens}")
        timings = [
            _ask(decode.node, [draw.randrange(vocabulary) for _ in range(tokens)])
            for _ in range(requests)
        ]
        after = _counts(prefill.engine, decode.engine)
    except (RunError, RequestError, TimeoutError) as error:
        return str(error) or f"no answer within {REQUEST_SECONDS:.0f} s"
    moved = request_traffic(source, destination, tokens, seed=0)
    return {
        "requests": requests,
        "predicted": {
            "page_writes": requests * int(moved.units.sum()),
            "bytes": requests * int(moved.bytes.sum()),
        },
        **{name: after[name] - before[name] for name in after},
        "nics": nic_rows(
            (*there[0], domains[0]), (*there[1], domains[1]), tokens=tokens, requests=requests
        ),
        "provider": prefill.engine.provider,
        **{
            f"{term}_ms": statistics.median(getattr(t, term) for t in timings) * 1e3
            for term in ("ttft", "prefill", "exposed_transfer")
        },
    }


def agrees(measured: dict[str, Any]) -> bool:
    """Whether everything that was counted is what was predicted."""
    predicted = measured["predicted"]
    counted = (
        measured[f"{name}_{how}"] == value
        for name, value in predicted.items()
        for how in COUNTED[name]
    )
    by_nic = (
        row[name] == row[f"{name}_predicted"]
        for row in measured["nics"]
        for name in COUNTED
        if name in row
    )
    return all(counted) and all(by_nic)


def _counts(prefill: TransferEngine, decode: TransferEngine) -> dict[str, int]:
    """What the engines have counted so far."""
    sent, received = prefill.counters(), decode.counters()
    return {
        "page_writes_posted": sent["units_posted"],
        "page_writes_acknowledged": sent["units_completed"],
        "page_writes_counted": received["units_received"] - received["stale_immediates"],
        "bytes_posted": sent["bytes_posted"],
        "bytes_acknowledged": sent["bytes_completed"],
    }


def _connect(engine: TransferEngine, decode: DecodeParts) -> None:
    """Have a decode node know this prefill node and no other. Raises RunError in time."""
    address = engine.control_address
    peers = decode.messenger.peers
    peers.refresh([(address, 0)])
    deadline = time.monotonic() + PATIENCE_SECONDS
    while [peer.address for peer in peers.connected()] != [address]:
        if time.monotonic() > deadline:
            raise RunError(f"not connected within {PATIENCE_SECONDS:.0f} s: {peers.missing()}")
        time.sleep(0.01)


def _ask(node: DecodeNode, prompt: Sequence[int]) -> RequestTiming:
    """Run one request to its end; returns its account."""
    request = GenerationRequest(secrets.token_hex(8), tuple(prompt), ANSWER_TOKENS)

    async def answer() -> None:
        async with asyncio.timeout(REQUEST_SECONDS):
            async for _ in node.generate(request):
                pass

    asyncio.run(answer())
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (timing := node.timing(request.id)) is None:  # the prefill node's report comes apart
        if time.monotonic() > deadline:
            raise RunError(f"no report of the prefill within {PATIENCE_SECONDS:.0f} s")
        time.sleep(0.005)
    return timing
