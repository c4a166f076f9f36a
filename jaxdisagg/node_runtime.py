"""What a node's process does once jax may be imported: load, warm up, serve, announce, stop."""

import asyncio
import concurrent.futures
import contextlib
import functools
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

from ffi_transport.engine import TransferEngine
from jaxdisagg.announce import Announcer, NodeInfo
from jaxdisagg.assembly import DecodeParts, MixedParts, PrefillParts
from jaxdisagg.config import START_SECONDS, NodeConfig
from jaxdisagg.fabric import open_fabric
from jaxdisagg.group.errors import GroupError
from jaxdisagg.group.key import group_key
from jaxdisagg.group.leader import LeaderGroup
from jaxdisagg.group.messages import Loaded
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

    What can fail without a warm-up (ports, the fabric, files) is tried first. Of a node of several
    processes this is the leader; `follower.run_follower` is the others. Raises ValueError,
    FileNotFoundError, TransportError or GroupError with a message for a person.
    """
    node = resolve_limits(node)
    listener = bind(node.host, node.http_port)
    engine = None if node.role == "mixed" else open_fabric(node)
    tokenizer = None if node.role == "prefill" else Tokenizer.from_folder(node.model)
    group = None
    if node.mesh.processes > 1:
        group = LeaderGroup(node, group_key())
        say({"group": group.address})
    try:
        return await _serve(node, say, listener, engine, tokenizer, group)
    except BaseException as error:
        if group is not None:
            await asyncio.to_thread(group.stop, f"process 0: {error}")
        raise


async def _serve(
    node: NodeConfig,
    say: Say,
    listener: socket.socket,
    engine: TransferEngine | None,
    tokenizer: Tokenizer | None,
    group: LeaderGroup | None,
) -> int:
    parts = await _start(node, say, engine, group)
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
    announcer = _announcer(node, node.model.resolve().name, parts, url, fabric)
    if announcer is not None:
        announcer.start()
    say({"ready": {"id": node.id, "role": node.role, "url": url, "fabric": fabric}})
    failure = await _until_told(parts)
    if announcer is not None:
        await announcer.stop()
    await server.stop()
    await asyncio.to_thread(parts.stop, STOP_SECONDS)
    if group is not None:
        await asyncio.to_thread(group.stop, "" if failure is None else failure)
    return 0 if failure is None else 1


async def _start(
    node: NodeConfig, say: Say, engine: TransferEngine | None, group: LeaderGroup | None
) -> Parts:
    """Load and warm up. When a follower is lost this ends at once, whatever hangs for it."""
    parts: concurrent.futures.Future[Parts] = concurrent.futures.Future()

    def assemble() -> None:
        try:
            made = _assemble(node, say, engine, group)
        except BaseException as error:
            # A broken collective is noticed before the channel says whose fault it is.
            reason = group.explain("") if group is not None else ""
            _settle(parts, GroupError(reason) if reason else error)
        else:
            _settle(parts, made)

    if group is not None:
        group.when_lost(lambda reason: _settle(parts, GroupError(reason)))
    # No thread of the event loop's, which would be waited for.
    threading.Thread(target=assemble, name="start", daemon=True).start()
    return await asyncio.wrap_future(parts)


def _settle(parts: concurrent.futures.Future[Parts], found: Parts | BaseException) -> None:
    """The first call decides."""
    with contextlib.suppress(concurrent.futures.InvalidStateError):
        if isinstance(found, BaseException):
            parts.set_exception(found)
        else:
            parts.set_result(found)


def _assemble(
    node: NodeConfig, say: Say, engine: TransferEngine | None, group: LeaderGroup | None
) -> Parts:
    if group is not None:
        say({"progress": "waiting for its other processes"})
        group.begin(START_SECONDS)
    say({"progress": f"loading {node.model.name}"})
    model = load_model(node)
    if group is not None:
        _check_loaded(model, group.collect(Loaded, START_SECONDS))
    progress = _progress(node, say)
    if engine is None:
        return MixedParts(node, model, progress, group)
    if node.role == "prefill":
        return PrefillParts(node, model, engine, progress, group)
    return DecodeParts(node, model, engine, progress, group)


def _check_loaded(model: LoadedModel, loaded: dict[int, Loaded]) -> None:
    """Raises GroupError if a process has loaded other weights, or sharded them otherwise."""
    for process, theirs in loaded.items():
        for what, mine, other in (
            ("weights", model.fingerprint, theirs.fingerprint),
            ("rules", str(model.rules), theirs.rules),
        ):
            if mine != other:
                raise GroupError(f"{what}: {mine} at process 0, {other} at process {process}")


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
