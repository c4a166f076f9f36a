"""One side of many pairs as a process: `python mesh_side.py`, driven by JSON lines on stdin.

It has eight host devices and builds any number of nodes on them, each on a mesh of its own, which
live until they are closed; so one process serves a whole matrix. A line {"op": NAME, ...} calls the
method `NAME` of `MeshSide` and is answered by one line, {"ok": ...} or {"error": {...}}. The end of
stdin ends it. side_process.py is the other end.
"""

import asyncio
import contextlib
import functools
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # read when jax is first imported, below

import jax
import plan_damage
import sentinel_model
from nodes import check_pools, engine_for, node_config, wait_until
from page_tap import PageTap
from side_answers import answer_to, described

from jaxdisagg.api import GenerationRequest, SamplingParams
from jaxdisagg.assembly import DecodeParts, MixedParts, PrefillParts
from jaxdisagg.config import BatchConfig, CacheConfig, MeshConfig, Timeouts
from jaxdisagg.model_loading import load_model
from jaxdisagg.page_pool import PagePool
from jaxdisagg.prefill_node import PrefillNode
from jaxdisagg.process_setup import set_host_devices

Parts = PrefillParts | DecodeParts | MixedParts

DEVICES = 8
BATCH = {"chunks": (64,), "decode_rows": (8,), "max_model_len": 256}
TIMEOUTS = {"prefill": 120.0, "connect": 10.0, "queue": 120.0, "cancel_fence": 20.0}


class MeshSide:
    """The nodes of this process, by name."""

    def __init__(self) -> None:
        self._nodes: dict[str, Parts] = {}
        self._taps: dict[str, PageTap] = {}
        self._via: dict[str, str | None] = {}
        self._damage = contextlib.ExitStack()

    def build(
        self,
        name: str,
        role: str,
        model: str = ".",
        sentinel: int | None = None,
        first_device: int = 0,
        seed: int | None = None,
        tp: int = 1,
        dp: int = 1,
        page_size: int = 16,
        pages: int = 256,
        batch: dict[str, Any] | None = None,
        timeouts: dict[str, float] | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """Start a node on devices from `first_device` on.

        `sentinel` puts the sentinel model with so many KV heads (0: a latent cache) in place of the
        folder's; `seed` shuffles its page ids. Answers with its fabric address.
        """
        config = node_config(
            role,
            Path(model),
            id=name,
            mesh=MeshConfig(tp=tp, dp=dp),
            cache=CacheConfig(page_size=page_size, pages=pages),
            batch=BatchConfig(**{**BATCH, **{k: _tuple(v) for k, v in (batch or {}).items()}}),
            timeouts=Timeouts(**{**TIMEOUTS, **(timeouts or {})}),
            **more,
        )
        devices = jax.devices()[first_device : first_device + config.mesh.devices]
        load = load_model
        if sentinel is not None:
            load = functools.partial(sentinel_model.load, kv_heads=sentinel)
        loaded = load(config, devices)
        if role == "mixed":
            self._nodes[name] = MixedParts(config, loaded, lambda _: None)
            return {}
        make = PrefillParts if role == "prefill" else DecodeParts
        parts = make(config, loaded, engine_for(config), lambda _: None)
        if seed is not None:
            parts.node.pools[:] = [
                PagePool(pool.num_pages, pool.page_size, seed=seed + rank)
                for rank, pool in enumerate(parts.node.pools)
            ]
        self._nodes[name] = parts
        self._taps[name] = PageTap(parts.node)
        if isinstance(parts, DecodeParts):
            self._choose_by_name(name, parts)
        return {"fabric": parts.engine.control_address}

    def _choose_by_name(self, name: str, decode: DecodeParts) -> None:
        """Let the node send its prompts to the prefill node of `_via`, if it names one."""
        peers = decode.messenger.peers
        original = peers.choose
        self._via[name] = None

        def choose(prompt_length: int, now: float) -> Any:
            via = self._via[name]
            if via is None:
                return original(prompt_length, now)
            return next((peer for peer in peers.connected() if peer.name == via), None)

        peers.choose = choose

    def connect(self, name: str, fabric: Sequence[str], seconds: float = 60.0) -> dict[str, Any]:
        """Tell a decode node of prefill nodes; answers when each is connected or was refused.

        The answer is what the node knows about each address.
        """
        peers = self._decode(name).messenger.peers
        peers.refresh([(address, 0) for address in fabric])

        def settled() -> bool:
            state = peers.state()
            return all(
                "node" in state.get(address, {})
                or "refused" in state.get(address, {}).get("problem", "")
                for address in fabric
            )

        wait_until(settled, f"{name} is connected to {', '.join(fabric)}", seconds)
        return peers.state()

    def generate(
        self, orders: list[dict[str, Any]], kill: int | None = None, seconds: float = 120.0
    ) -> list[Any]:
        """Serve the prompts of several orders, all at once: an answer per prompt of each order.

        An order names the node, `prompts`, `max_tokens`, the `prefix` of its requests' ids and
        perhaps the prefill node, as `via`, and after how many seconds each client leaves (`leave`).
        An answer has the request's id, its tokens, their logprobs, and by how much the least
        certain one was the likeliest; or the id, the status and the text of its error; or the id
        and that the client has `left`. Process `kill` is killed when all requests await prefill.
        """

        async def run() -> list[Any]:
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as tasks:
                if kill is not None:
                    tasks.create_task(self._kill_when_awaiting(kill, orders))
                served = [tasks.create_task(self._serve(**order)) for order in orders]
            return [each.result() for each in served]

        return asyncio.run(run())

    async def _kill_when_awaiting(self, process: int, orders: list[dict[str, Any]]) -> None:
        def awaiting() -> bool:
            nodes = [(self._decode(o["name"]).messenger, len(o["prompts"])) for o in orders]
            return all(len(node.state()["awaiting"]) == count for node, count in nodes)

        await asyncio.to_thread(wait_until, awaiting, "all requests await prefill")
        os.kill(process, signal.SIGKILL)

    async def _serve(
        self,
        name: str,
        prompts: list[list[int]],
        max_tokens: int,
        via: str | None = None,
        prefix: str = "r",
        leave: Sequence[float | None] = (),
    ) -> list[dict[str, Any]]:
        node = self._nodes[name].node
        assert not isinstance(node, PrefillNode), f"{name} is a prefill node"
        self._via[name] = via
        orders = [
            GenerationRequest(
                f"{prefix}-{i}", tuple(prompt), max_tokens, SamplingParams(logprobs=2)
            )
            for i, prompt in enumerate(prompts)
        ]
        seconds = leave or [None] * len(orders)
        return await asyncio.gather(*map(functools.partial(answer_to, node), orders, seconds))

    def taken(
        self,
        name: str,
        attempts: list[str] | None = None,
        folder: str | None = None,
        seconds: float = 60.0,
    ) -> list[dict[str, Any]]:
        """What a node's memory held for each attempt (None: all that the node's tap has taken).

        With `folder` the values too, each request's in a file there.
        """
        tap = self._taps[name]
        found = tap.wait(tap.attempts() if attempts is None else attempts, seconds)
        return [described(taken, name, folder) for taken in found]

    def poison(self, name: str, seconds: float = 60.0) -> None:
        """Overwrite all pages and contexts of a node, once it is idle."""
        self._idle(name, seconds)
        self._taps[name].poison(seconds)

    def strays(self, name: str, seconds: float = 60.0) -> list[str]:
        """Pages outside of all requests that changed since `poison`."""
        self._idle(name, seconds)
        return self._taps[name].strays(seconds)

    def state(self, name: str, seconds: float = 60.0) -> dict[str, Any]:
        """/debug/state of an idle node whose pages are all free and in order."""
        self._idle(name, seconds)
        return dict(self._nodes[name].node.state())

    def damage(self, name: str, how: str | None) -> None:
        """Let a prefill node send wrongly by `plan_damage.DAMAGES`, or rightly again (None)."""
        parts = self._nodes[name]
        assert isinstance(parts, PrefillParts)
        self._damage.close()
        if how is not None:
            self._damage.enter_context(plan_damage.damaged(parts.engine, how))

    def slow(self, name: str, seconds: float) -> None:
        """Let each step of a prefill node wait between the filing of its plan and its dispatch."""
        plan_damage.slow_down(self._nodes[name].runner, seconds)

    def close(self, names: list[str]) -> None:
        """Stop nodes, all at once since each may wait for its peers, and forget them."""
        parts = [self._nodes.pop(name) for name in names]
        with ThreadPoolExecutor(max(len(parts), 1)) as pool:
            list(pool.map(lambda each: each.stop(10.0), parts))
        for name in names:
            self._taps.pop(name, None)

    def _decode(self, name: str) -> DecodeParts:
        parts = self._nodes[name]
        assert isinstance(parts, DecodeParts), f"{name} is no decode node"
        return parts

    def _idle(self, name: str, seconds: float) -> None:
        node = self._nodes[name].node
        wait_until(lambda: not any(node.state()["requests"].values()), f"{name} is idle", seconds)
        check_pools(node, seconds)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def main() -> None:
    """Answer until stdin ends."""
    logging.basicConfig(level=os.environ.get("JAXDISAGG_LOG", "WARNING"))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anything else prints goes to stderr
    set_host_devices(DEVICES)
    side = MeshSide()
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer: dict[str, Any] = {"ok": getattr(side, order.pop("op"))(**order)}
        except Exception as error:
            logging.getLogger(__name__).debug("an order failed", exc_info=True)
            answer = {"error": {"kind": type(error).__name__, "text": str(error)}}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # threads of nodes that nobody closed must not keep the process


if __name__ == "__main__":
    main()
