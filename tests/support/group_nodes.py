"""Nodes of several processes inside one: real engines over loopback, a channel of queues, no jax.

A `Side` is a node without a model: caches are NumPy arrays and "steps" fire their triggers by hand.
Its followers hear the leader in order, through the channel's own encoding, and may be made deaf or
dumb for a while.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from nodes import wait_until

from ffi_transport import _native
from ffi_transport.engine import TransferEngine
from ffi_transport.events import Event
from ffi_transport.types import EngineConfig
from jaxdisagg.cache import Shard
from jaxdisagg.cache_layout import CacheLayout
from jaxdisagg.event_pump import EventPump
from jaxdisagg.group import messages as channel
from jaxdisagg.group.decode_fabric import DecodeFabric
from jaxdisagg.group.fabric_messages import FileStep
from jaxdisagg.group.follower_fabric import FollowerFabric
from jaxdisagg.group.gathering import gather
from jaxdisagg.group.prefill_fabric import PrefillFabric
from jaxdisagg.hello import NodeHello
from jaxdisagg.process_shares import devices_of
from jaxdisagg.registration import register_cache
from jaxdisagg.step_plans import StepPlanner

PAGES = 16
ROWS = 4
CONTEXT_BYTES = 64
SECONDS = 60.0
ORDINALS = 2048
"""How far apart XLA numbers the CPUs of processes."""


class ArrayCache:
    """The shards of one process, as `PagedCache` shows them; `bytes[rank][layer]` is [pages, ...].

    The layer after the last is the context buffer. `on_gpus`: rank r's are said to be memory of
    CUDA device r, which the fake driver plays.
    """

    def __init__(
        self, layout: CacheLayout, ranks: range, process: int, *, on_gpus: bool = False
    ) -> None:
        self.on_gpus = on_gpus
        self.first_ordinal = process * ORDINALS
        self.layers = (None,) * layout.layers
        self.context_bytes = CONTEXT_BYTES
        self.context_rows = ROWS
        page = np.zeros((PAGES, layout.shard_bytes), np.uint8)
        row = np.zeros((ROWS, CONTEXT_BYTES), np.uint8)
        self.bytes = {r: [page.copy() for _ in self.layers] + [row.copy()] for r in ranks}
        devices = [
            SimpleNamespace(local_hardware_id=rank - ranks.start, platform="cpu")
            for rank in range(layout.devices)
        ]
        self.mesh = SimpleNamespace(devices=np.array(devices, dtype=object))

    def shards(self) -> list[Shard]:
        first = min(self.bytes)
        return [
            Shard(
                rank,
                self.first_ordinal + rank - first,
                layer,
                array.ctypes.data,
                array.nbytes,
                rank if self.on_gpus else None,
            )
            for rank, arrays in self.bytes.items()
            for layer, array in enumerate(arrays)
        ]


class QueueGroup:
    """`Group` over queues: one thread per follower takes what the leader says, in order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.followers: dict[int, FollowerFabric] = {}
        self.filed = dict.fromkeys(range(1, size), 0)
        self._said = dict.fromkeys(range(1, size), 0)
        self._heard = dict.fromkeys(range(1, size), 0)
        self.hearing = {process: threading.Event() for process in range(1, size)}
        self.speaking = {process: threading.Event() for process in range(1, size)}
        self._handlers: dict[type, Callable[[int, Any], None]] = {}
        self._kept: dict[type, dict[int, Any]] = {}
        self._queues = {process: queue.SimpleQueue() for process in range(1, size)}
        self._threads = [
            threading.Thread(target=self._hear, args=(process,), daemon=True)
            for process in self._queues
        ]
        for process in self._queues:
            self.hearing[process].set()
            self.speaking[process].set()

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def on(self, kind: type, handler: Callable[[int, Any], None]) -> None:
        self._handlers[kind] = handler

    def send(self, process: int, message: Any) -> None:
        self._said[process] += 1
        self._queues[process].put(channel.encode(message))

    def broadcast(self, message: Any) -> None:
        for process in self._queues:
            self.send(process, message)

    def collect(self, kind: type, timeout: float) -> dict[int, Any]:
        return self._kept.pop(kind, {})

    def say(self, process: int, message: Any) -> None:
        """A follower's word to the leader."""
        self.speaking[process].wait()
        message = channel.decode(channel.encode(message))
        handler = self._handlers.get(type(message))
        if handler is None:
            self._kept.setdefault(type(message), {})[process] = message
        else:
            handler(process, message)

    def _hear(self, process: int) -> None:
        while (data := self._queues[process].get()) is not None:
            self.hearing[process].wait()
            word = channel.decode(data)
            follower = self.followers[process]
            if isinstance(word, FileStep):
                follower.file(word)
                self.filed[process] = word.number
            else:
                follower.handle(word)
            self._heard[process] += 1

    def all_heard(self) -> bool:
        """Whether the followers have done all that they were told."""
        return self._heard == self._said

    def close(self) -> None:
        for process, words in self._queues.items():
            self.hearing[process].set()
            self.speaking[process].set()
            words.put(None)
        for thread in self._threads:
            thread.join(SECONDS)


class Side:
    """A node of `processes` processes. What is posted to its loop runs in `run_until`."""

    def __init__(
        self,
        role: str,
        layout: CacheLayout,
        processes: int = 1,
        *,
        provider: str = "loopback",
        hello: dict[str, Any] | None = None,
        engine: dict[str, Any] | None = None,
        on_gpus: bool = False,
        **fabric: Any,
    ) -> None:
        source = role == "prefill"
        self.layout, self.name = layout, f"{role}-0"
        self.calls: deque[Callable[[], None]] = deque()
        self.events: list[Event] = []
        self.on_event: Callable[[Event], None] = self.events.append
        self.group = QueueGroup(processes)
        config = EngineConfig(provider=provider, **(engine or {}))
        self.engines = [TransferEngine(config, hello=None) for _ in range(processes)]
        shares = [devices_of(p, layout.devices, processes) for p in range(processes)]
        self.caches = [
            ArrayCache(layout, share, p, on_gpus=on_gpus) for p, share in enumerate(shares)
        ]
        for process in range(1, processes):
            self.group.followers[process] = FollowerFabric(
                self.engines[process],
                self.caches[process],  # type: ignore[arg-type]
                layout,
                process=process,
                source=source,
                send=lambda word, process=process: self.group.say(process, word),
                fail=print,
            )
        own = register_cache(self.engines[0], self.caches[0], layout, source=source)  # type: ignore[arg-type]
        memory = gather(self.group, self.engines[0].control_address, own)
        values = {
            "role": role,
            "node": self.name,
            "epoch": self.engines[0].epoch,
            "model": "m",
            "dtype": "float32",
            "layout": layout,
            "num_pages": PAGES,
            "max_model_len": 512,
            "regions": memory.regions,
            "contexts": memory.contexts,
            "processes": memory.processes,
        }
        self.hello = NodeHello(**(values | (hello or {})))
        if source:
            planner = StepPlanner(layout, self.caches[0])  # type: ignore[arg-type]
            self.prefill = PrefillFabric(
                self.engines[0],
                self.group,
                planner,
                layout,
                name=self.name,
                modes=memory.modes,
                **fabric,
            )
        else:
            self.decode = DecodeFabric(
                self.engines[0],
                self.group,
                memory.landings,
                name=self.name,
                modes=memory.modes,
                **fabric,
            )
        self.fabric = self.prefill if source else self.decode
        self.fabric.attach(self.calls.append, lambda event: self.on_event(event))
        self._pump = EventPump(self.engines[0], self.fabric.on_events, print, "events")
        self.group.start()
        self._pump.start()
        self.fabric.introduce(self.hello)
        wait_until(self.group.all_heard, "followers know who they are", SECONDS)

    @property
    def address(self) -> str:
        return self.engines[0].control_address

    def bytes(self, rank: int, layer: int) -> np.ndarray:
        """A shard of any process: [pages, bytes]."""
        (cache,) = [cache for cache in self.caches if rank in cache.bytes]
        return cache.bytes[rank][layer]

    def fire(self, step: int, processes: Sequence[int] | None = None) -> None:
        """Fire the triggers of a step: every layer of every device of these processes."""
        every = range(len(self.engines))
        for process in every if processes is None else processes:
            for shard in self.caches[process].shards():
                _native.fire_trigger(
                    self.engines[process].index, step, shard.ordinal, shard.layer, shard.address
                )

    def run(self) -> None:
        while self.calls:
            self.calls.popleft()()

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def close(self) -> None:
        self.group.close()
        at_once([self._pump.stop, *(f.close for f in self.group.followers.values())])
        self.engines[0].close()


def at_once(calls: Sequence[Callable[[], None]]) -> None:
    """Each waits for its own threads; together they wait no longer than one of them."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)


def run_until(sides: Sequence[Side], condition: Callable[[], Any], what: str) -> None:
    """Run what is posted to the loops until it is true."""

    def step() -> Any:
        for side in sides:
            side.run()
        return condition()

    wait_until(step, what, SECONDS)
