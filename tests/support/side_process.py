"""The test's end of a mesh_side.py process: every order has a deadline, and names what it was."""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self

from repository import REPOSITORY

SCRIPT = REPOSITORY / "tests" / "support" / "mesh_side.py"
ORDER_SECONDS = 180.0
END_SECONDS = 30.0
SHOWN = 3000  # characters of stderr
# Compiling many small programs is most of what such a process does: the shared cache takes those
# that compile in a moment, too, and LLVM spends no time on code that runs for another moment.
CACHE_ALL = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
UNOPTIMISED = "--xla_backend_optimization_level=0"


class SideError(Exception):
    """An order that was answered with an error; `kind` is the name of its type."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class SideProcess:
    """A process of nodes; a context manager. `ask` calls a method of mesh_side.MeshSide."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._stderr = folder / f"{name}.stderr"
        flags = f"{os.environ.get('XLA_FLAGS', '')} {UNOPTIMISED}".strip()
        with self._stderr.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | CACHE_ALL | {"XLA_FLAGS": flags},
            )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def send(self, op: str, **how: Any) -> None:
        """Give an order whose answer is fetched by `answer`, so that two sides work at once."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **how}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise AssertionError(f"{self.name} is gone before {op}: {self.stderr()}") from None

    def answer(self, what: str, seconds: float = ORDER_SECONDS) -> Any:
        """The answer to the oldest open order. Kills the process if it does not come in time."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            self._process.kill()
            raise AssertionError(
                f"{self.name} did not answer {what} within {seconds} s: {self.stderr()}"
            ) from None
        if line is None:
            raise AssertionError(f"{self.name} ended during {what}: {self.stderr()}")
        said = json.loads(line)
        if "error" in said:
            raise SideError(said["error"]["kind"], said["error"]["text"])
        return said["ok"]

    def ask(self, op: str, *, order_seconds: float = ORDER_SECONDS, **how: Any) -> Any:
        """Give an order and wait for its answer; SideError if that is an error."""
        self.send(op, **how)
        return self.answer(f"{op} {how.get('name', '')}", order_seconds)

    def stderr(self) -> str:
        """The last that it wrote there."""
        return self._stderr.read_text()[-SHOWN:]

    def close(self) -> None:
        """End the process, by force if it does not end by itself."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_SECONDS)
        self._reader.join(END_SECONDS)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
