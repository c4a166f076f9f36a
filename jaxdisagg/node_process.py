"""One node as a process: `python -m jaxdisagg.node_process CONFIG_JSON`.

It prints one JSON object a line: {"progress": ..., "done": n, "total": n}, then {"ready": {...}} or
{"error": "..."}; the deployment that started it reads them. Logs go to stderr. SIGTERM ends it,
and so does the end of stdin, which the deployment holds open. The first of a node's several
processes says {"group": "host:port"}, where the others find it.
Nothing here imports jax before the process is pinned and its environment is set.
"""

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ffi_transport.errors import TransportError
from jaxdisagg.config import NodeConfig
from jaxdisagg.config_text import decode_node
from jaxdisagg.group.errors import GroupError
from jaxdisagg.process_setup import end_with_parent, pin, set_environment


def encode_config(node: NodeConfig) -> str:
    """The node's configuration as the process takes it."""
    return msgspec.json.encode(node, enc_hook=str).decode()


def read_config(arguments: Sequence[str]) -> NodeConfig:
    """The configuration in a process's arguments. Raises ValueError naming what does not fit."""
    if len(arguments) != 1:
        raise ValueError(
            f"{len(arguments)} arguments; expected one: the fields of NodeConfig as a JSON object"
        )
    try:
        values = msgspec.json.decode(arguments[0])
    except msgspec.DecodeError as error:
        raise ValueError(f"the node's configuration is not JSON: {error}") from None
    return decode_node(values)


def take_stdout() -> Callable[[dict[str, Any]], None]:
    """What tells the deployment something; all else that is printed goes to stderr from now on.

    gloo prints to stdout, in the middle of a line if it comes to that.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return lambda what: print(json.dumps(what), file=out, flush=True)


def main() -> None:
    """Run one node until it is told to stop. Ends with 2 on what a person can mend."""
    logging.basicConfig(
        level=os.environ.get("JAXDISAGG_LOG", "WARNING"),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log every heartbeat
    # Ctrl-C reaches the whole process group; the deployment decides when a node ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    say = take_stdout()
    try:
        node = read_config(sys.argv[1:])
        pin(node)
        end_with_parent()
        set_environment(node, _cache_folder())
        code = _run(node, say)
    except (ValueError, FileNotFoundError, TransportError, GroupError) as error:
        logging.getLogger(__name__).debug("the node did not start", exc_info=True)
        say({"error": str(error)})
        code = 2
    # Threads of jax and of a loop that did not end in time must not keep the process.
    sys.stdout.flush()
    os._exit(code)


def _run(node: NodeConfig, say: Callable[[dict[str, Any]], None]) -> int:
    if node.process:
        from jaxdisagg.group.follower import run_follower

        return run_follower(node, say)
    from jaxdisagg.node_runtime import run_node

    return asyncio.run(run_node(node, say))


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jaxdisagg" / "jax"


if __name__ == "__main__":
    main()
