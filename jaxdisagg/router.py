"""The router's app: where nodes announce themselves, and where clients ask for what they serve."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from jaxdisagg.announce import ANNOUNCE_PATH, HEARTBEAT_S, LEAVE_PATH, Members, NodeInfo
from jaxdisagg.api import RequestError
from jaxdisagg.http.errors import error_response, json_response
from jaxdisagg.http.schemas import read_body
from jaxdisagg.http.status import make_status_routes
from jaxdisagg.http.streaming import ClientGone
from jaxdisagg.membership import SILENCE_S, Membership, Node
from jaxdisagg.metrics import StateMetrics
from jaxdisagg.proxy import ANSWER_TIMEOUT_S, Proxy
from jaxdisagg.server import KEEP_ALIVE_S, bare_app

PROXIED = ("/v1/completions", "/v1/chat/completions")
CONNECT_TIMEOUT_S = 5.0  # of which a starved router may itself use some
WATCH_S = HEARTBEAT_S / 4
STATE_TIMEOUT_S = 2.0


class Router:
    """What the router's endpoints work with; `client` has its connections to nodes."""

    def __init__(self, app: FastAPI, answer_timeout_s: float, silence_s: float) -> None:
        self.members = Membership(silence_s)
        self.metrics = StateMetrics(self.state)
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        # A connection is given up long before the node would close it under a new request.
        limits = httpx.Limits(
            max_connections=None,
            max_keepalive_connections=64,
            keepalive_expiry=KEEP_ALIVE_S / 2,
        )
        self.client = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)
        self.proxy = Proxy(
            self.client,
            self.members,
            app.state.attendant,
            self.metrics.registry,
            answer_timeout_s,
        )

    def state(self) -> dict[str, Any]:
        """The nodes and the router's own requests to them."""
        return {
            "nodes": {
                node.info.id: {
                    **msgspec.to_builtins(node.info),
                    "ready": node.info.ready,
                    "load": node.info.load,
                    "in_flight": node.in_flight,
                    "reachable": not node.unreachable,
                    "silent_s": round(time.monotonic() - node.seen, 3),
                }
                for node in self.members.nodes
            }
        }

    async def debug_state(self) -> dict[str, Any]:
        """The router's state, and the /debug/state of every node that has one."""
        asked = [node for node in self.members.nodes if node.info.url is not None]
        answers = await asyncio.gather(*(self._state_of(node) for node in asked))
        nodes = {node.info.id: answer for node, answer in zip(asked, answers, strict=True)}
        return {"router": self.state(), "nodes": nodes}

    async def _state_of(self, node: Node) -> Any:
        try:
            async with node.wait(STATE_TIMEOUT_S):
                response = await self.client.get(f"{node.info.url}/debug/state")
                return msgspec.json.decode(response.raise_for_status().content)
        except (httpx.HTTPError, msgspec.MsgspecError, TimeoutError) as error:
            return {"error": f"{node.info.url} does not tell: {error or 'no answer in time'}"}


def create_router_app(
    *, answer_timeout_s: float = ANSWER_TIMEOUT_S, silence_s: float = SILENCE_S
) -> FastAPI:
    """The router's app; it must be served with its lifespan, which drops silent nodes.

    Both times are the longest between two parts of an answer, `silence_s` that of a node whose
    heartbeats ended.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        watch = asyncio.create_task(_drop_stale_nodes(router.members))
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await router.client.aclose()

    app = bare_app(lifespan)
    router = Router(app, answer_timeout_s, silence_s)

    def ready() -> tuple[bool, str]:
        missing = router.members.missing()
        return not missing, missing

    def about() -> dict[str, Any]:
        return {"role": "router", "nodes": [node.info.id for node in router.members.nodes]}

    async def proxy(request: Request) -> Response:
        try:
            return await router.proxy.forward(request)
        except RequestError as error:
            return error_response(error)
        except (ClientGone, ClientDisconnect):
            return Response(status_code=499)

    for path in PROXIED:
        app.add_api_route(path, proxy, methods=["POST"])

    @app.get("/v1/models")
    async def models() -> Response:
        names = sorted({node.info.model for node in router.members.candidates()})
        if not names:
            raise RequestError(503, router.members.missing(), code="no_decode_node")
        data = [{"id": name, "object": "model", "owned_by": "jaxdisagg"} for name in names]
        return json_response({"object": "list", "data": data})

    @app.post(ANNOUNCE_PATH)
    async def announce(request: Request) -> Response:
        router.members.announce(_node_info(await read_body(request)), time.monotonic())
        return json_response(Members(tuple(node.info for node in router.members.nodes)))

    @app.post(LEAVE_PATH)
    async def leave(request: Request) -> Response:
        router.members.leave(_node_info(await read_body(request)))
        return json_response(Members(()))

    @app.get("/debug/state")
    async def debug_state() -> Response:
        return json_response(await router.debug_state())

    app.include_router(make_status_routes(ready, router.metrics, about))
    return app


async def _drop_stale_nodes(members: Membership) -> None:
    now = time.monotonic()
    while True:
        before = now
        await asyncio.sleep(WATCH_S)
        now = time.monotonic()
        if now - before > WATCH_S + HEARTBEAT_S:  # this process was stopped, or starved
            members.excuse(now - before, now)
        members.drop_stale(now)


def _node_info(body: bytes) -> NodeInfo:
    try:
        return msgspec.json.decode(body, type=NodeInfo)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, f"not an announcement: {error}") from error
