"""Lets a test read and overwrite the cache of a node's process that it has not started itself.

Part of the sentinel model's distribution, so that it is in every process that loads the model,
whatever a node's processes are. It answers on a Unix socket named by the process's id, in the
folder SENTINEL_TAP; the cache is found among the interpreter's objects.
"""

import gc
import os
import threading
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

from leases import Lent, lent
from page_tap import POISON, memory_of

from jaxdisagg.cache import PagedCache
from jaxdisagg.decode_node import DecodeNode
from jaxdisagg.prefill_node import PrefillNode

FOLDER = "SENTINEL_TAP"
SECONDS = 60.0


def start() -> None:
    """Answer from now on, on a thread, if the environment names a folder."""
    if FOLDER in os.environ:
        path = str(Path(os.environ[FOLDER]) / str(os.getpid()))
        threading.Thread(target=_serve, args=(path,), daemon=True).start()


def ask(folder: Path, pid: int, op: str) -> Any:
    """Have a process do `poison` or `read`; TimeoutError if it does not answer."""
    with Client(str(folder / str(pid)), "AF_UNIX") as connection:
        connection.send(op)
        if not connection.poll(SECONDS):
            raise TimeoutError(f"process {pid} did not answer {op} within {SECONDS} s")
        return connection.recv()


def _serve(path: str) -> None:
    lists: list[list[Lent]] = []
    with Listener(path, "AF_UNIX") as listener:
        while True:
            with listener.accept() as connection:
                connection.send({"poison": _poison, "read": _read}[connection.recv()](lists))


def _poison(lists: list[list[Lent]]) -> None:
    """Overwrite the cache of the idle node; what it lends from now on is recorded."""
    lists[:] = lists or [lent(node) for node in _objects(DecodeNode, PrefillNode)]
    for record in lists:
        record.clear()
    for view in memory_of(*_objects(PagedCache)).values():
        view[:] = POISON


def _read(lists: list[list[Lent]]) -> tuple[dict, list[tuple[int, Any]]]:
    """Copies of `memory_of`, and the leases since `poison` as (dp rank, pages)."""
    memory = {key: view.copy() for key, view in memory_of(*_objects(PagedCache)).items()}
    return memory, [tuple(each) for record in lists for each in record]


def _objects(*kinds: type) -> list[Any]:
    return [each for each in gc.get_objects() if type(each) in kinds]
