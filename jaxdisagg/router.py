"""The router: where nodes announce themselves, and a thin proxy in front of the decode nodes (E11).

Requests are read whole, so that one whose node cannot be reached can go to another. Streams are
passed on part by part.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import Counter
from starlette.requests import ClientDisconnect

from jaxdisagg.announce import ANNOUNCE_PATH, HEARTBEAT_S, LEAVE_PATH, Members, NodeInfo
from jaxdisagg.api import RequestError
from jaxdisagg.http.errors import error_object, error_response, json_response
from jaxdisagg.http.schemas import clip, read_body
from jaxdisagg.http.status import make_status_routes
from jaxdisagg.http.streaming import ByteStream, ClientGone, event
from jaxdisagg.membership import SILENCE_S, Membership, Node
from jaxdisagg.metrics import StateMetrics
from jaxdisagg.server import KEEP_ALIVE_S, bare_app

logger = logging.getLogger(__name__)

PROXIED = ("/v1/completions", "/v1/chat/completions")
NODE_HEADER = "x-jaxdisagg-node"
CONNECT_TIMEOUT_S = 2.0
WATCH_S = HEARTBEAT_S / 4
STATE_TIMEOUT_S = 2.0
# Between two parts of an answer, the first one included. A node that dies is noticed earlier, and
# one whose heartbeats ended has SILENCE_S.
ANSWER_TIMEOUT_S = 600.0
# Headers that concern one connection, or that each server writes itself.
NOT_PASSED_ON = frozenset(
    [
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization"),
        *("proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"),
        *("host", "content-length", "date", "server"),
    ]
)


class Router:
    """What the router's endpoints work with. `close` ends its connections to nodes."""

    def __init__(self, app: FastAPI, answer_timeout_s: float, silence_s: float) -> None:
        self.members = Membership(silence_s)
        self.attendant = app.state.attendant
        self.answer_timeout_s = answer_timeout_s
        self.metrics = StateMetrics(self.state)
        self.requests = Counter(
            "jaxdisagg_router_requests",
            "Proxied requests by node and outcome: ok, rejected (4xx), failed, cancelled.",
            ("node", "outcome"),
            registry=self.metrics.registry,
        )
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        # A connection is given up long before the node would close it under a new request.
        limits = httpx.Limits(
            max_connections=None,
            max_keepalive_connections=64,
            keepalive_expiry=KEEP_ALIVE_S / 2,
        )
        self.client = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)

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

    async def forward(self, request: Request) -> Response:
        """Send a request to the node with the least to do that has its model; its answer back."""
        body = await read_body(request)
        model = _model_of(body)
        known = self.members.models()
        if model is not None and known and model not in known:
            names = ", ".join(map(repr, known))
            message = f"the model {clip(repr(model))} does not exist here, only these do: {names}"
            raise RequestError(404, message, code="model_not_found", param="model")
        headers = _pass_on(request.headers.items()) | {"accept-encoding": "identity"}
        declined: Response | None = None
        for node in self.members.candidates(model):
            if node.gone:
                continue
            outgoing = self.client.build_request(
                request.method, f"{node.info.url}{request.url.path}", headers=headers, content=body
            )
            node.in_flight += 1
            try:
                answer = await self.attendant.run(request.receive, self._begin(node, outgoing))
            except (httpx.ConnectError, httpx.ConnectTimeout):
                node.in_flight -= 1
                node.unreachable = True
                logger.warning("node %s cannot be reached at %s", node.info.id, node.info.url)
                continue
            except BaseException as error:
                node.in_flight -= 1
                self._count(node, "cancelled" if isinstance(error, ClientGone) else "failed")
                raise
            response = await self._pass_back(node, answer)
            if not _is_not_ready(answer):
                return response
            declined = response  # it has begun nothing: another node may be ready
        if declined is not None:
            return declined
        missing = self.members.missing(model) or "no decode or mixed node is ready"
        raise RequestError(503, missing, code="no_decode_node")

    async def _begin(self, node: Node, outgoing: httpx.Request) -> httpx.Response:
        """The node's answer: a stream from its headers on, anything else as a whole."""
        try:
            async with node.wait(self.answer_timeout_s):
                answer = await self.client.send(outgoing, stream=True)
                if not _is_stream(answer):
                    try:
                        await answer.aread()
                    finally:
                        await answer.aclose()
                return answer
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise
        except (httpx.HTTPError, TimeoutError) as error:
            raise _lost(node, error) from error

    async def _pass_back(self, node: Node, answer: httpx.Response) -> Response:
        headers = _pass_on(answer.headers.multi_items()) | {NODE_HEADER: node.info.id}
        if _is_stream(answer):
            parts = self._parts(node, answer)
            return ByteStream(
                self.attendant,
                await anext(parts),
                parts,
                answer.status_code,
                headers,
                last_words=lambda error: event(error_object(error)),
            )
        node.in_flight -= 1
        kinds = {2: "ok", 4: "rejected"}
        self._count(node, kinds.get(answer.status_code // 100, "failed"))
        return Response(answer.content, answer.status_code, headers)

    async def _parts(self, node: Node, answer: httpx.Response) -> AsyncGenerator[bytes]:
        """Nothing, then the bytes of a stream as they come; closing this ends it upstream too."""
        outcome = "cancelled"
        source = answer.aiter_raw()
        part: bytes | None = b""
        try:
            while part is not None:
                yield part
                async with node.wait(self.answer_timeout_s):
                    part = await anext(source, None)
            outcome = "ok"
        except (httpx.HTTPError, TimeoutError) as error:
            outcome = "failed"
            yield b"\n\n" + event(error_object(_lost(node, error)))
        finally:
            node.in_flight -= 1
            self._count(node, outcome)
            await answer.aclose()

    def _count(self, node: Node, outcome: str) -> None:
        self.requests.labels(node.info.id, outcome).inc()


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
            return await router.forward(request)
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


class _Wanted(msgspec.Struct):
    model: str | None = None


def _model_of(body: bytes) -> str | None:
    """The model that a request names; None where it does not, or where the node will object."""
    try:
        return msgspec.json.decode(body, type=_Wanted).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _node_info(body: bytes) -> NodeInfo:
    try:
        return msgspec.json.decode(body, type=NodeInfo)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, f"not an announcement: {error}") from error


def _is_stream(answer: httpx.Response) -> bool:
    return answer.headers.get("content-type", "").startswith("text/event-stream")


def _pass_on(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers if name.lower() not in NOT_PASSED_ON}


def _is_not_ready(answer: httpx.Response) -> bool:
    """Whether a node answered that it cannot serve yet, which its last heartbeat did not tell."""
    if answer.status_code != 503 or _is_stream(answer):
        return False
    try:
        return msgspec.json.decode(answer.content)["error"]["code"] == "not_ready"
    except (msgspec.MsgspecError, TypeError, LookupError):
        return False


def _lost(node: Node, error: Exception) -> RequestError:
    """What to say of a node that left a request; one that broke its connection gets no others.

    It has probably ended, and what it announced last is not true of the next one on its port.
    """
    if isinstance(error, TimeoutError):
        ended = "its heartbeats ended and " if node.gone else ""
        reason = f"{ended}it sent nothing for too long"
    else:
        node.unreachable = True
        reason = str(error) or type(error).__name__
    return RequestError(502, f"node {node.info.id} was lost: {reason}", code="node_lost")
