"""What the bodies of /v1/completions and /v1/chat/completions may hold.

Null means "not given". Parameters that OpenAI has and we do not are accepted at the value that
changes nothing (n=1) and refused by name otherwise, like names that nobody knows.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from jaxdisagg.api import RequestError

MAX_BODY_BYTES = 16 << 20
MAX_STOP_STRINGS = 4
MAX_MESSAGES = 4096
MAX_PARTS = 4096
# An error names so many of the wrong parameters, each with so much of its value.
MAX_NAMED = 16
MAX_SHOWN = 60

# Unsupported parameters, each with the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "web_search_options": (),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
}


def _stop_list(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_STOP_STRINGS:
        raise ValueError(f"must have at most {MAX_STOP_STRINGS} items, not {len(value)}")
    return [value] if isinstance(value, str) else value


def _bounded(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_MESSAGES:
        raise ValueError(f"must have at most {MAX_MESSAGES} items, not {len(value)}")
    return value


def _content_text(value: Any) -> Any:
    """Join the parts of a message's content; only text parts are known."""
    if not isinstance(value, list):
        return value
    if len(value) > MAX_PARTS:
        raise ValueError(f"must have at most {MAX_PARTS} parts, not {len(value)}")
    texts = []
    for i, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f"part {i} is {clip(repr(kind))}, and only text parts are supported")
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError(f"part {i} must hold just `type` and a string `text`")
        texts.append(part["text"])
    return "".join(texts)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    """`stream_options`: whether a last chunk carries the usage."""

    include_usage: bool = False


class Message(_Strict):
    """One turn of a conversation; `content` is a text or a list of text parts."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content_text)]
    name: str | None = None


class GenerationBody(_Strict):
    """What both endpoints share. `top_k` and `ignore_eos` are extensions of ours."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, lt=1 << 31)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        BeforeValidator(_stop_list),
    ] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    user: str | None = None


class CompletionBody(GenerationBody):
    """`prompt` is checked where it is tokenized; `logprobs` counts alternatives per token."""

    prompt: Any
    logprobs: int | None = Field(None, ge=0)


class ChatBody(GenerationBody):
    """A conversation. `chat_template_kwargs` are further variables of the chat template."""

    messages: Annotated[list[Message], Field(min_length=1), BeforeValidator(_bounded)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0)
    chat_template_kwargs: dict[str, Any] = {}


async def read_body(request: Request) -> bytes:
    """Read a request's body; raises RequestError (413) if it is too long."""
    parts, size = [], 0
    too_long = RequestError(
        413, f"the body is longer than {MAX_BODY_BYTES} bytes", code="body_too_large"
    )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise too_long
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise too_long
        parts.append(part)
    return b"".join(parts)


async def read_json(request: Request) -> dict[str, Any]:
    """Read the JSON object of a request's body; raises RequestError (400, 413)."""
    body = await read_body(request)
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, f"the body is not valid JSON: {error}", code="invalid_json") from (
            error
        )
    if not isinstance(value, dict):
        raise RequestError(400, "the body must be a JSON object", code="invalid_json")
    return value


def parse[Body: GenerationBody](kind: type[Body], value: Mapping[str, Any]) -> Body:
    """Check a body and make it a Body; raises RequestError (400) naming the wrong parameters."""
    _refuse_unknown(kind, value)
    given = {k: v for k, v in value.items() if v is not None and k in kind.model_fields}
    try:
        body = kind.model_validate(given)
    except RecursionError as error:
        raise RequestError(400, "the body is nested too deeply", code="invalid_value") from error
    except ValidationError as error:
        found = error.errors(include_url=False)
        paths = [_path(item["loc"]) for item in found]
        shown = zip(paths[:MAX_NAMED], found[:MAX_NAMED], strict=True)
        texts = [f"{path}: {_reason(item)}" for path, item in shown]
        code = "missing_parameter" if found[0]["type"] == "missing" else "invalid_value"
        message = _listing(texts, len(found))
        raise RequestError(400, message, code=code, param=paths[0]) from error
    if body.stream_options is not None and not body.stream:
        message = "stream_options: only allowed when stream is true"
        raise RequestError(400, message, code="invalid_value", param="stream_options")
    return body


def _refuse_unknown(kind: type[GenerationBody], value: Mapping[str, Any]) -> None:
    texts, names = [], []
    for name, given in value.items():
        if name in kind.model_fields:
            continue
        if name not in NEUTRAL:
            texts.append(f"unknown parameter {clip(repr(name))}")
        elif given is None or any(_same(given, neutral) for neutral in NEUTRAL[name]):
            continue
        else:
            only = " or ".join(msgspec.json.encode(n).decode() for n in NEUTRAL[name])
            hint = f" (only {only} is)" if only else ""
            texts.append(f"parameter {name!r} = {_short(given)} is not supported{hint}")
        names.append(clip(name))
    if names:
        code = "unknown_parameter" if texts[0].startswith("unknown") else "unsupported_parameter"
        message = _listing(texts[:MAX_NAMED], len(texts))
        raise RequestError(400, message, code=code, param=names[0])


def _same(a: Any, b: Any) -> bool:
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _path(location: tuple[int | str, ...]) -> str:
    """E.g. messages[0].content; `location` starts with a name."""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in location).lstrip(".")


def _reason(item: Mapping[str, Any]) -> str:
    if item["type"] == "missing":
        return "this parameter is required"
    if item["type"] == "extra_forbidden":
        return "unknown parameter"
    if item["type"] == "value_error":
        return str(item["ctx"]["error"])
    text = item["msg"].replace("Input should", "must").replace("List should", "must")
    return f"{text} (got {_short(item['input'])})"


def _listing(texts: list[str], total: int) -> str:
    more = [f"and {total - len(texts)} more"] if total > len(texts) else []
    return "; ".join(texts + more)


def _short(value: Any) -> str:
    try:
        return clip(msgspec.json.encode(value).decode())
    except RecursionError:
        return "a deeply nested value"


def clip(text: str) -> str:
    """The beginning of a text that may be long, for a message."""
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
