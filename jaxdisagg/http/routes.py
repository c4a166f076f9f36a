"""The endpoints of a decode or mixed node."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from jaxdisagg.api import Engine, EngineInfo, RequestError, RequestTiming
from jaxdisagg.http import formats, preparation, schemas
from jaxdisagg.http.errors import INTERNAL_ERROR, error_object, error_response, json_response
from jaxdisagg.http.generation import Answer, Piece, make_answers, merged
from jaxdisagg.http.preparation import Job
from jaxdisagg.http.streaming import (
    DONE,
    Attendant,
    ClientGone,
    event,
    event_stream,
)
from jaxdisagg.metrics import ServerMetrics
from jaxdisagg.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

TIMING_HEADER = "x-jaxdisagg-timing"
# The report of a prefill node may come after the answer has ended: it is waited for for a second.
TIMING_TRIES = 100
TIMING_PAUSE_S = 0.01
CLIENT_CLOSED_REQUEST = 499

Prepared = tuple[Job, formats.Format]


@dataclass(frozen=True)
class Frontend:
    """What the endpoints work with."""

    engine: Engine
    tokenizer: Tokenizer
    metrics: ServerMetrics
    attendant: Attendant
    default_max_tokens: int

    def info(self) -> EngineInfo:
        """The engine's limits; raises RequestError (503) saying what is missing."""
        ready, missing = self.engine.ready()
        if not ready:
            raise RequestError(503, f"not ready: {missing}", code="not_ready")
        return self.engine.info

    async def timing(self, request_id: str) -> RequestTiming | None:
        """Where the time of an ended request went; None if that is not known within a second."""
        for _ in range(TIMING_TRIES):
            if (timing := self.engine.timing(request_id)) is not None:
                return timing
            await asyncio.sleep(TIMING_PAUSE_S)
        return None


def make_routes(front: Frontend) -> APIRouter:
    """The OpenAI endpoints over an engine."""
    router = APIRouter()
    started = int(time.time())

    async def completion(request: Request) -> Prepared:
        body = schemas.parse(schemas.CompletionBody, await schemas.read_json(request))
        info = front.info()
        preparation.check_model(body, info)
        job = await preparation.prepare_completion(body, front.tokenizer, info)
        return job, formats.CompletionFormat(front.tokenizer, body.logprobs is not None)

    async def chat(request: Request) -> Prepared:
        body = schemas.parse(schemas.ChatBody, await schemas.read_json(request))
        info = front.info()
        preparation.check_model(body, info)
        job = await preparation.prepare_chat(body, front.tokenizer, info, front.default_max_tokens)
        return job, formats.ChatFormat(front.tokenizer, body.logprobs)

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _serve(front, request, completion)

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _serve(front, request, chat)

    def model_object(info: EngineInfo) -> formats.Json:
        return {
            "id": info.model,
            "object": "model",
            "created": started,
            "owned_by": "jaxdisagg",
            "max_model_len": info.max_model_len,
        }

    @router.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [model_object(front.info())]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        info = front.info()
        if name != info.model:
            raise preparation.unknown_model(name, info)
        return json_response(model_object(info))

    return router


async def _serve(
    front: Frontend, request: Request, prepare: Callable[[Request], Awaitable[Prepared]]
) -> Response:
    """Answer a generation request, whatever becomes of it, and count what became of it."""
    endpoint = request.url.path
    outcome = "failed"
    with_timing = request.headers.get(TIMING_HEADER) == "1"
    try:
        job, form = await prepare(request)
        answers = make_answers(job, front.engine, front.tokenizer, front.metrics)
        pieces = merged(answers)
        if job.stream:
            try:
                first = await front.attendant.run(request.receive, anext(pieces))
            except BaseException:
                await pieces.aclose()
                raise
            outcome = None  # the stream counts its own
            events = _events(front, endpoint, job, form, answers, first, pieces, with_timing)
            response = await event_stream(front.attendant, events)
        else:
            whole = _whole(front, job, form, answers, pieces, with_timing)
            response = json_response(await front.attendant.run(request.receive, whole))
            outcome = "ok"
        response.headers["x-request-id"] = job.id
        return response
    except RequestError as error:
        outcome = "rejected" if error.status < 500 else "failed"
        return error_response(error)
    except (ClientGone, ClientDisconnect):
        outcome = "cancelled"
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except Exception:
        logger.exception("request to %s failed", endpoint)
        return error_response(INTERNAL_ERROR)
    finally:
        if outcome is not None:
            front.metrics.requests.labels(endpoint, outcome).inc()


async def _whole(
    front: Frontend,
    job: Job,
    form: formats.Format,
    answers: list[Answer],
    pieces: AsyncGenerator[Piece],
    with_timing: bool,
) -> formats.Json:
    """The document of a whole answer."""
    found: list[list[Piece]] = [[] for _ in answers]
    async with aclosing(pieces):
        async for piece in pieces:
            found[piece.index].append(piece)
    choices = [form.choice(each) for each in found]
    if with_timing:
        timings = await asyncio.gather(*(front.timing(answer.request.id) for answer in answers))
        choices = [formats.with_timing(*both) for both in zip(choices, timings, strict=True)]
    return formats.envelope(job, form.object, choices, usage=_usage(job, answers))


async def _events(
    front: Frontend,
    endpoint: str,
    job: Job,
    form: formats.Format,
    answers: list[Answer],
    first: Piece,
    pieces: AsyncGenerator[Piece],
    with_timing: bool,
) -> AsyncGenerator[bytes]:
    """The server-sent events of a streamed answer whose first piece is there.

    A failure ends them with an error object and no finish reason.
    """

    def chunk(*choices: formats.Json, **more: formats.Json | None) -> bytes:
        if job.include_usage:
            more = {"usage": None} | more
        return event(formats.envelope(job, form.chunk_object, choices, **more))

    async def encode(piece: Piece) -> bytes:
        choice = form.chunk_choice(piece)
        if with_timing and piece.finish_reason is not None:
            timing = await front.timing(answers[piece.index].request.id)
            choice = formats.with_timing(choice, timing)
        return chunk(choice)

    outcome = "cancelled"
    try:
        async with aclosing(pieces):
            for answer in answers:
                if (opening := form.opening(answer.index)) is not None:
                    yield chunk(opening)
            yield await encode(first)
            async for piece in pieces:
                yield await encode(piece)
        if job.include_usage:
            yield chunk(usage=_usage(job, answers))
        outcome = "ok"
        yield DONE
    except Exception as error:
        outcome = "failed"
        if not isinstance(error, RequestError):
            logger.exception("request to %s failed midway", endpoint)
            error = INTERNAL_ERROR
        yield event(error_object(error))
    finally:
        front.metrics.requests.labels(endpoint, outcome).inc()


def _usage(job: Job, answers: list[Answer]) -> formats.Json:
    return formats.usage(job.prompt_tokens, sum(answer.completion_tokens for answer in answers))
