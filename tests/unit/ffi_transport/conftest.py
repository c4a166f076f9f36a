import contextlib
import functools
from collections.abc import Iterator

import numpy as np
import pytest

from ffi_transport.engine import TransferEngine
from ffi_transport.errors import FabricUnavailable
from ffi_transport.types import EngineConfig, MemoryRegion

SOFTWARE = ("tcp", "net", "tcp;ofi_rxm")


@functools.cache
def offered() -> tuple[str, ...]:
    """The software providers of this machine's libfabric; all of them if it has none at all.

    Then the tests that use them fail, and say what is missing.
    """
    names = []
    for name in SOFTWARE:
        with contextlib.suppress(FabricUnavailable):
            TransferEngine(EngineConfig(provider=name)).close()
            names.append(name)
    return tuple(names) or SOFTWARE


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with a `provider` runs over each that is offered."""
    if "provider" in metafunc.fixturenames:
        metafunc.parametrize("provider", offered())


class Node:
    """An engine in the test's own process with a registered buffer."""

    def __init__(self, engine: TransferEngine, buffer_bytes: int) -> None:
        self.engine = engine
        self.memory = np.zeros(buffer_bytes, np.uint8)
        self.region: MemoryRegion = engine.register_memory(
            self.memory.ctypes.data, self.memory.nbytes
        )


@pytest.fixture
def make_node() -> Iterator:
    """make_node(provider, buffer_bytes=, hello=, **config) -> Node; all are closed at the end."""
    engines: list[TransferEngine] = []

    def make(
        provider: str, buffer_bytes: int = 1 << 20, hello: bytes | None = b"", **config: object
    ) -> Node:
        engine = TransferEngine(EngineConfig(provider=provider, **config), hello)  # type: ignore[arg-type]
        engines.append(engine)
        return Node(engine, buffer_bytes)

    yield make
    for engine in engines:
        engine.close()
