"""OpenAI's error objects: {"error": {"message", "type", "param", "code"}}."""

from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from jaxdisagg.api import RequestError

INTERNAL_ERROR = RequestError(
    500, "the server failed on this request; its log has the details", code="internal_error"
)


def error_object(error: RequestError) -> dict[str, Any]:
    """The JSON document of an error."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    detail = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return {"error": detail}


def json_response(body: Any, status: int = 200) -> Response:
    """A response whose body is `body` as JSON."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def error_response(error: RequestError) -> Response:
    """The HTTP answer of a request that failed."""
    return json_response(error_object(error), error.status)


def install_handlers(app: FastAPI) -> None:
    """Answer the errors of routing, and those that escape a route, with error objects too."""

    async def on_request_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return error_response(error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        at = f"{request.method} {request.url.path}"
        message = {404: f"no such endpoint: {at}", 405: f"method not allowed: {at}"}
        text = message.get(error.status_code, error.detail)
        response = error_response(RequestError(error.status_code, text))
        response.headers.update(error.headers or {})
        return response

    async def on_bug(request: Request, error: Exception) -> Response:
        return error_response(INTERNAL_ERROR)

    app.add_exception_handler(RequestError, on_request_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_bug)
