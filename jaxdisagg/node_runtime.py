"""What a node's process does once jax may be imported: load, warm up, serve, announce, stop."""

import asyncio
import functools
import signal
from collections.abc import Callable
from typing import Any

from ffi_transport.engine import TransferEngine
from jaxdisagg.announce import Announcer, NodeInfo
from jaxdisagg.assembly import DecodeParts, MixedParts, PrefillParts, open_fabric
from jaxdisagg.config import NodeConfig
from jaxdisagg.model_loading import LoadedModel, load_model, resolve_limits
from jaxdisagg.runner import warm_up_steps
from jaxdisagg.server import HttpServer, bind, create_app, create_status_app
from jaxdisagg.tokenizer import Tokenizer

Parts = PrefillParts | DecodeParts | MixedParts
Say = Callable[[dict[str, Any]], None]

STOP_SECONDS = 5.0
MISSING_CHARACTERS = 1000


async def run_node(node: NodeConfig, say: Say) -> int:
    """Serve until SIGTERM or a failure; returns the exit status.

    What can fail without a warm-up (ports, the fabric, files) is tried first. Raises ValueError,
    FileNotFoundError or TransportError with a message for a person.
    """
    node = resolve_limits(node)
    listener = bind(node.host, node.http_port)
    engine = None if node.role == "mixed" else open_fabric(node)
    say({"progress": f"loading {node.model.name}"})
    tokenizer = None if node.role == "prefill" else Tokenizer.from_folder(node.model)
    model = await asyncio.to_thread(load_model, node)
    parts = await asyncio.to_thread(_assemble, node, model, engine, _progress(node, say))
    if isinstance(parts, PrefillParts):
        app = create_status_app(parts.node.state, parts.node.ready)
    else:
        assert tokenizer is not None
        app = create_app(parts.node, tokenizer)
    server = HttpServer(app, listener)
    await server.start()
    host, port = server.address
    url = f"http://{host}:{port}"
    fabric = engine.control_address if engine else None
    announcer = _announcer(node, model.name, parts, url, fabric)
    if announcer is not None:
        announcer.start()
    say({"ready": {"id": node.id, "role": node.role, "url": url, "fabric": fabric}})
    failure = await _until_told(parts)
    if announcer is not None:
        await announcer.stop()
    await server.stop()
    await asyncio.to_thread(parts.stop, STOP_SECONDS)
    return 0 if failure is None else 1


def _assemble(
    node: NodeConfig,
    model: LoadedModel,
    engine: TransferEngine | None,
    progress: Callable[[str], None],
) -> Parts:
    if engine is None:
        return MixedParts(node, model, progress)
    if node.role == "prefill":
        return PrefillParts(node, model, engine, progress)
    return DecodeParts(node, model, engine, progress)


def _progress(node: NodeConfig, say: Say) -> Callable[[str], None]:
    total = warm_up_steps(node)
    done = 0

    def advance(what: str) -> None:
        nonlocal done
        done += 1
        say({"progress": f"compiled {what}", "done": done, "total": total})

    return advance


def _announcer(
    node: NodeConfig, model: str, parts: Parts, url: str, fabric: str | None
) -> Announcer | None:
    """Heartbeats to the router; a decode node learns from the answers where prefill nodes are."""
    if node.router is None:
        return None

    def describe() -> NodeInfo:
        ready, missing = parts.node.ready()
        return NodeInfo(
            id=node.id,
            role=node.role,
            model=model,
            url=url,
            fabric_address=fabric,
            load=parts.node.outstanding_tokens(),
            ready=ready,
            missing=missing[:MISSING_CHARACTERS],
        )

    def learn(members: tuple[NodeInfo, ...]) -> None:
        if isinstance(parts, DecodeParts):
            parts.messenger.peers.refresh(
                (m.fabric_address, m.load)
                for m in members
                if m.fabric_address and m.role == "prefill"
            )

    announcer = Announcer(node.router, describe, on_members=learn)
    if isinstance(parts, DecodeParts):
        loop = asyncio.get_running_loop()
        parts.messenger.peers.on_change = functools.partial(
            loop.call_soon_threadsafe, announcer.changed
        )
    return announcer


async def _until_told(parts: Parts) -> str | None:
    """Wait for SIGTERM, or for the node's loop to fail; returns the failure."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    while not stop.is_set() and parts.node.failure is None:
        try:
            await asyncio.wait_for(stop.wait(), timeout=1.0)
        except TimeoutError:
            continue
    return parts.node.failure
