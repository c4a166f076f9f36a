"""One node as a process: `python -m jaxdisagg.node_process CONFIG_JSON`.

It prints one JSON object a line: {"progress": ..., "done": n, "total": n}, then {"ready": {...}} or
{"error": "..."}; the deployment that started it reads them. Logs go to stderr. SIGTERM ends it.
"""

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from jaxdisagg.config import NodeConfig
from jaxdisagg.process_setup import die_with_parent, pin, set_environment

if TYPE_CHECKING:
    from jaxdisagg.assembly import DecodeParts, MixedParts, PrefillParts

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0


def encode_config(node: NodeConfig) -> str:
    """The node's configuration as the process takes it."""
    return msgspec.json.encode(node, enc_hook=str).decode()


def decode_config(text: str) -> NodeConfig:
    """The configuration in `text`. Raises ValueError naming what does not fit."""

    def hook(kind: type, value: Any) -> Any:
        if kind is Path:
            return Path(value)
        raise NotImplementedError(f"{kind} in a node's configuration")

    return msgspec.json.decode(text, type=NodeConfig, dec_hook=hook)


def say(**what: Any) -> None:
    """Tell the deployment something."""
    print(json.dumps(what), flush=True)


def main() -> None:
    """Run one node until it is told to stop. Ends with 2 on what a person can mend."""
    logging.basicConfig(
        level=os.environ.get("JAXDISAGG_LOG", "WARNING"),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    # Ctrl-C reaches the whole process group; the deployment decides when a node ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        node = decode_config(sys.argv[1])
        die_with_parent()
        pin(node)
        set_environment(node, _cache_folder())
        code = asyncio.run(_run(node))
    except _expected_errors() as error:
        say(error=str(error))
        raise SystemExit(2) from None
    # jax's and uvicorn's own threads have nothing left to do that matters.
    sys.stdout.flush()
    os._exit(code)


def _expected_errors() -> tuple[type[Exception], ...]:
    from ffi_transport.errors import TransportError

    return (ValueError, FileNotFoundError, TransportError)


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jaxdisagg" / "jax"


async def _run(node: NodeConfig) -> int:
    """Everything from here on imports jax."""
    from jaxdisagg import assembly
    from jaxdisagg.model_loading import load_model
    from jaxdisagg.server import HttpServer, bind, create_app, create_status_app
    from jaxdisagg.tokenizer import Tokenizer

    listener = bind(node.host, node.http_port)
    engine = None if node.role == "mixed" else assembly.open_fabric(node)
    say(progress=f"loading {node.model.name}", done=0, total=1)
    tokenizer = None if node.role == "prefill" else Tokenizer.from_folder(node.model)
    model = await asyncio.to_thread(load_model, node)
    progress = _progress(node)
    parts: PrefillParts | DecodeParts | MixedParts
    if engine is None:
        parts = await asyncio.to_thread(assembly.MixedParts, node, model, progress)
    elif node.role == "prefill":
        parts = await asyncio.to_thread(assembly.PrefillParts, node, model, engine, progress)
    else:
        parts = await asyncio.to_thread(assembly.DecodeParts, node, model, engine, progress)
    if tokenizer is None:
        app = create_status_app(parts.node.state, _readiness(parts))
    else:
        app = create_app(parts.node, tokenizer)
    server = HttpServer(app, listener)
    await server.start()
    host, port = server.address
    address = engine.control_address if engine else None
    announcer = await _announce(node, model.name, parts, f"http://{host}:{port}", address)
    say(ready={"id": node.id, "role": node.role, "url": f"http://{host}:{port}", "fabric": address,
               "provider": engine.provider if engine else None, "pid": os.getpid()})  # fmt: skip
    failure = await _until_told(parts)
    if announcer is not None:
        await announcer.stop()
    await server.stop()
    await asyncio.to_thread(parts.stop, STOP_SECONDS)
    return 0 if failure is None else 1


def _progress(node: NodeConfig) -> Callable[[str], None]:
    batch = node.batch
    total = (len(batch.chunks) if node.role != "decode" else 0) + (
        len(batch.decode_rows) if node.role != "prefill" else 0
    )
    done = 0

    def advance(what: str) -> None:
        nonlocal done
        done += 1
        say(progress=f"compiled {what}", done=done, total=total)

    say(progress="compiling", done=0, total=total)
    return advance


def _readiness(parts: Any) -> Callable[[], tuple[bool, str]]:
    return lambda: (parts.node.failure is None, parts.node.failure or "")


async def _announce(
    node: NodeConfig, model: str, parts: Any, url: str, fabric_address: str | None
) -> Any:
    from jaxdisagg.announce import Announcement, Announcer

    if node.router is None:
        return None

    def now() -> Announcement:
        return Announcement(
            id=node.id,
            role=node.role,
            url=url,
            fabric_address=fabric_address,
            model=model,
            load=parts.node.outstanding_tokens(),
        )

    def learn(members: Any) -> None:
        if node.role == "decode":
            parts.messenger.peers.refresh(
                (m.fabric_address, m.load) for m in members if m.role == "prefill"
            )

    announcer = Announcer(node.router, now, learn)
    await announcer.start()
    return announcer


async def _until_told(parts: Any) -> str | None:
    """Wait for SIGTERM, or for the node's loop to fail; returns the failure."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    while not stop.is_set() and parts.node.failure is None:
        try:
            await asyncio.wait_for(stop.wait(), timeout=1.0)
        except TimeoutError:
            continue
    return parts.node.failure


if __name__ == "__main__":
    main()
