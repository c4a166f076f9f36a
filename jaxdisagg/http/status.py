"""The endpoints by which any node can be watched: /health, /metrics, /debug/state."""

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from jaxdisagg.http.errors import json_response
from jaxdisagg.metrics import StateMetrics


def make_status_routes(
    ready: Callable[[], tuple[bool, str]],
    metrics: StateMetrics,
    about: Callable[[], Mapping[str, Any]] = dict,
    state: Callable[[], Mapping[str, Any]] | None = None,
) -> APIRouter:
    """The endpoints over a node's `ready` and `state`; the latter's is left out without `state`.

    `about` adds to the health of a ready node.
    """
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        is_ready, missing = ready()
        if not is_ready:
            return json_response({"status": "not ready", "missing": missing}, 503)
        return json_response({"status": "ok", **about()})

    @router.get("/metrics")
    async def render_metrics() -> Response:
        body, content_type = metrics.render()
        return Response(body, media_type=content_type)

    if state is not None:

        @router.get("/debug/state")
        async def debug_state() -> Response:
            return json_response(state())

    return router
