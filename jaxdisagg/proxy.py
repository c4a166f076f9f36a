"""The thin proxy in front of the decode nodes (E11): a request to one of them, its answer back.

Requests are read whole, so that one whose node cannot be reached can go to another. Streams are
passed on part by part.
"""

import logging
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import msgspec
from fastapi import Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, Counter

from jaxdisagg.api import RequestError
from jaxdisagg.http.errors import error_object
from jaxdisagg.http.schemas import clip, read_body
from jaxdisagg.http.streaming import Attendant, ByteStream, ClientGone, event
from jaxdisagg.membership import Membership, Node

logger = logging.getLogger(__name__)

NODE_HEADER = "x-jaxdisagg-node"
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


class Proxy:
    """Forwards requests over `client` to `members`; counts them in `registry`.

    `answer_timeout_s` is the longest between two parts of an answer.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        members: Membership,
        attendant: Attendant,
        registry: CollectorRegistry,
        answer_timeout_s: float,
    ) -> None:
        self._client = client
        self._members = members
        self._attendant = attendant
        self._answer_timeout_s = answer_timeout_s
        self._requests = Counter(
            "jaxdisagg_router_requests",
            "Proxied requests by node and outcome: ok, rejected (4xx), failed, cancelled.",
            ("node", "outcome"),
            registry=registry,
        )

    async def forward(self, request: Request) -> Response:
        """Send a request to the node with the least to do that has its model; its answer back."""
        body = await read_body(request)
        model = _model_of(body)
        known = self._members.models()
        if model is not None and known and model not in known:
            names = ", ".join(map(repr, known))
            message = f"the model {clip(repr(model))} does not exist here, only these do: {names}"
            raise RequestError(404, message, code="model_not_found", param="model")
        headers = _pass_on(request.headers.items()) | {"accept-encoding": "identity"}
        declined: Response | None = None
        for node in self._members.candidates(model):
            if node.gone:
                continue
            outgoing = self._client.build_request(
                request.method, f"{node.info.url}{request.url.path}", headers=headers, content=body
            )
            node.in_flight += 1
            try:
                answer = await self._attendant.run(request.receive, self._begin(node, outgoing))
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
        missing = self._members.missing(model) or "no decode or mixed node is ready"
        raise RequestError(503, missing, code="no_decode_node")

    async def _begin(self, node: Node, outgoing: httpx.Request) -> httpx.Response:
        """The node's answer: a stream from its headers on, anything else as a whole."""
        try:
            async with node.wait(self._answer_timeout_s):
                answer = await self._client.send(outgoing, stream=True)
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
                self._attendant,
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
                async with node.wait(self._answer_timeout_s):
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
        self._requests.labels(node.info.id, outcome).inc()


class _Wanted(msgspec.Struct):
    model: str | None = None


def _model_of(body: bytes) -> str | None:
    """The model that a request names; None where it does not, or where the node will object."""
    try:
        return msgspec.json.decode(body, type=_Wanted).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


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
