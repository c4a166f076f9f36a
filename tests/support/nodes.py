"""Whole nodes inside the test's process: real fabric between them, devices apart."""

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax

from ffi_transport.engine import TransferEngine
from ffi_transport.types import EngineConfig
from jaxdisagg.api import GenerationRequest, RequestTiming, SamplingParams
from jaxdisagg.assembly import DecodeParts, MixedParts, PrefillParts
from jaxdisagg.config import BatchConfig, CacheConfig, MeshConfig, NodeConfig, Timeouts
from jaxdisagg.decode_node import DecodeNode
from jaxdisagg.model_loading import LoadedModel, load_model
from jaxdisagg.page_pool import PagePool
from jaxdisagg.prefill_node import PrefillNode

PAGE = 16
CHUNK = 64
WAIT_SECONDS = 90.0  # for what takes a moment: a deadline, no measure

Load = Callable[[NodeConfig, Sequence[jax.Device]], LoadedModel]


def node_config(
    role: str, model: Path, *, tp: int = 1, dp: int = 1, ep: int = 1, **more: Any
) -> NodeConfig:
    """A small node: pages of 16 tokens, chunks of up to 64, batches of 2 and 8."""
    values: dict[str, Any] = {
        "mesh": MeshConfig(tp=tp, dp=dp, ep=ep),
        "cache": CacheConfig(page_size=PAGE, pages=256),
        "batch": BatchConfig(chunks=(16, CHUNK), decode_rows=(2, 8), max_model_len=512),
        "timeouts": Timeouts(prefill=60.0),
        "id": f"{role}-0",
    }
    return NodeConfig(role=role, model=model, **(values | more))


@dataclass(frozen=True)
class Generated:
    """What one request gave: tokens and the chosen ones' logprobs."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str | None


async def generate(node: DecodeNode, request: GenerationRequest) -> Generated:
    """Run one request to its end."""
    tokens, logprobs, reason = [], [], None
    async for output in node.generate(request):
        if output.token is not None:
            tokens.append(output.token)
            if output.logprob is not None:
                logprobs.append(output.logprob)
        reason = output.finish_reason
    return Generated(tokens, logprobs, reason)


def generate_all(
    node: DecodeNode,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    at_once: int = 1,
    prefix: str = "r",
    sampling: SamplingParams | None = None,
) -> list[Generated]:
    """Run prompts in groups of `at_once`, each group concurrently."""
    how = sampling or SamplingParams(logprobs=0)

    async def run() -> list[Generated]:
        found: list[Generated] = []
        for first in range(0, len(prompts), at_once):
            group = [
                generate(node, GenerationRequest(f"{prefix}-{i}", tuple(p), max_tokens, how))
                for i, p in enumerate(prompts[first : first + at_once], first)
            ]
            found += await asyncio.gather(*group)
        return found

    return asyncio.run(run())


def wait_until(condition: Any, what: str, seconds: float = WAIT_SECONDS) -> None:
    """Poll until true; fails the test, saying what was waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)


def check_pools(node: DecodeNode | PrefillNode, seconds: float = WAIT_SECONDS) -> None:
    """Wait until every page is free, then check the pools' records, on the thread they belong to.

    From another thread a pool may be seen in the middle of a release.
    """
    for pool in node.pools:
        free = functools.partial(lambda p: p.counts().free == p.counts().total, pool)
        wait_until(free, "every page is free", seconds)
        checked: Future[None] = Future()

        def check(pool: PagePool = pool, checked: Future[None] = checked) -> None:
            try:
                checked.set_result(pool.check())
            except RuntimeError as error:
                checked.set_exception(error)

        node.post(check)
        checked.result(seconds)


def timing_of(node: DecodeNode, request_id: str) -> RequestTiming:
    """A request's account; the prefill node's report may come after the last token."""
    wait_until(lambda: node.timing(request_id) is not None, f"the account of {request_id}")
    timing = node.timing(request_id)
    assert timing is not None
    return timing


def engine_for(node: NodeConfig, **more: Any) -> TransferEngine:
    """A transfer engine on loopback, fast to notice a dead peer."""
    values: dict[str, Any] = {
        "provider": node.provider,
        "domains": node.nics,
        "device_memory": node.device_memory,
    }
    return TransferEngine(EngineConfig(**(values | more)), hello=None)


class Pair:
    """A prefill node and a decode node on different devices of this process.

    What `tp`, `dp` and `ep` say of both, `prefill` and `decode` may say otherwise of one. `load`
    may put another model in place of the folder's.
    """

    def __init__(
        self,
        model: Path,
        *,
        tp: int = 1,
        dp: int = 1,
        ep: int = 1,
        shuffle: bool = False,
        trace: bool = False,
        connected: bool = True,
        load: Load = load_model,
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        **both: Any,
    ) -> None:
        both |= {"tp": tp, "dp": dp, "ep": ep}
        p = node_config("prefill", model, **(both | (prefill or {})))
        d = node_config("decode", model, **(both | (decode or {})))
        devices = jax.devices()
        n = p.mesh.devices
        self.prefill = PrefillParts(
            p, load(p, devices[:n]), engine_for(p, trace=trace), lambda _: None
        )
        self.decode = DecodeParts(
            d, load(d, devices[n : n + d.mesh.devices]), engine_for(d), lambda _: None
        )
        if shuffle:  # page ids that differ on both sides and have no neighbours
            for seed, node in enumerate((self.prefill.node, self.decode.node)):
                node.pools[:] = [
                    PagePool(pool.num_pages, pool.page_size, seed=seed) for pool in node.pools
                ]
        peers = self.decode.messenger.peers
        peers.refresh([(self.prefill.engine.control_address, 0)])
        if connected:
            wait_until(lambda: peers.missing() is None, "the nodes are connected")

    def idle(self) -> None:
        """Wait until no request is open on either side, then check that no page is lost."""
        nodes = (self.prefill.node, self.decode.node)
        wait_until(
            lambda: not any(node.state()["requests"] for node in nodes), "both nodes are idle"
        )
        for node in nodes:
            check_pools(node)

    def close(self) -> None:
        """Stop both nodes."""
        self.decode.stop(10.0)
        self.prefill.stop(10.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def mixed(model: Path, *, load: Load = load_model, **more: Any) -> MixedParts:
    """A mixed node on the first devices of this process; `more` is `node_config`'s."""
    config = node_config("mixed", model, **more)
    return MixedParts(config, load(config, jax.devices()[: config.mesh.devices]), lambda _: None)
