"""From a checked body to the requests that the engine gets: limits, tokens, sampling."""

import asyncio
import functools
import time
import uuid
from dataclasses import dataclass
from typing import Any

from jaxdisagg.api import EngineInfo, GenerationRequest, RequestError, SamplingParams
from jaxdisagg.http.schemas import ChatBody, CompletionBody, GenerationBody, clip
from jaxdisagg.tokenizer import Tokenizer, TooManyTokens

DEFAULT_COMPLETION_TOKENS = 16
MAX_PROMPTS = 64
# Longer texts are tokenized in a thread, without the interpreter's lock, so that other requests'
# tokens keep flowing.
INLINE_CHARACTERS = 4096

Prompt = str | list[int]


@dataclass(frozen=True)
class Job:
    """One HTTP request: the engine requests that answer it, one per prompt, and its options."""

    id: str
    created: int
    model: str
    requests: tuple[GenerationRequest, ...]
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(request.prompt) for request in self.requests)


async def prepare_completion(body: CompletionBody, tokenizer: Tokenizer, info: EngineInfo) -> Job:
    """The job of a /v1/completions body; raises RequestError (400, 404)."""
    prompts = split_prompts(body.prompt, info)
    several = prompts is body.prompt
    tokens = []
    for i, prompt in enumerate(prompts):
        at = f"prompt[{i}]" if several else "prompt"
        ids = await _encode(tokenizer, prompt, info, at) if isinstance(prompt, str) else prompt
        tokens.append(check_tokens(ids, info, at))
    _check_logprobs(body.logprobs, "logprobs", info)
    limit = body.max_tokens or DEFAULT_COMPLETION_TOKENS
    asked = "max_tokens" if body.max_tokens is not None else None
    return _job("cmpl", body, tokens, limit, asked, body.logprobs, tokenizer, info)


async def prepare_chat(
    body: ChatBody, tokenizer: Tokenizer, info: EngineInfo, default_max_tokens: int
) -> Job:
    """The job of a /v1/chat/completions body; raises RequestError (400, 404)."""
    if body.top_logprobs is not None and not body.logprobs:
        message = "top_logprobs: only allowed when logprobs is true"
        raise RequestError(400, message, code="invalid_value", param="top_logprobs")
    _check_logprobs(body.top_logprobs, "top_logprobs", info)
    roles = {"developer": "system"}
    messages = [
        {"role": roles.get(m.role, m.role), "content": m.content}
        | ({"name": m.name} if m.name is not None else {})
        for m in body.messages
    ]
    encode = functools.partial(
        tokenizer.encode_chat, messages, body.chat_template_kwargs, most=info.max_model_len - 1
    )
    try:
        if sum(len(m.content) for m in body.messages) <= INLINE_CHARACTERS:
            ids = encode()
        else:
            ids = await asyncio.to_thread(encode)
    except TooManyTokens as error:
        raise _no_room(error, info, "messages") from error
    except ValueError as error:
        raise RequestError(400, str(error), code="invalid_value", param="messages") from error
    tokens = [check_tokens(ids, info, "messages")]
    both = (body.max_completion_tokens, body.max_tokens)
    if None not in both and both[0] != both[1]:
        message = "max_tokens and max_completion_tokens differ: give one of them"
        raise RequestError(400, message, code="invalid_value", param="max_tokens")
    limit = body.max_completion_tokens or body.max_tokens or default_max_tokens
    asked = "max_tokens" if body.max_tokens is not None else None
    asked = "max_completion_tokens" if body.max_completion_tokens is not None else asked
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _job("chatcmpl", body, tokens, limit, asked, logprobs, tokenizer, info)


def split_prompts(value: Any, info: EngineInfo) -> list[Prompt]:
    """The prompts in OpenAI's four forms: a text, token ids, or a list of either.

    A list of several prompts is returned as it is. Raises RequestError (400) naming the
    place of what is none of them, or of ids that are too many.
    """

    def fail(at: str, text: str) -> RequestError:
        return RequestError(400, f"{at}: {text}", code="invalid_value", param=at)

    def is_id(item: Any) -> bool:
        return isinstance(item, int) and not isinstance(item, bool)

    def check_length(ids: list[Any], at: str) -> None:
        if len(ids) >= info.max_model_len:
            raise _no_room(f"{len(ids)} tokens", info, at)

    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise fail("prompt", "must be a text, a list of token ids, or a list of either")
    if not value:
        raise fail("prompt", "is empty")
    if is_id(value[0]):
        check_length(value, "prompt")
        for i, item in enumerate(value):
            if not is_id(item):
                raise fail(f"prompt[{i}]", "must be a token id like the items before it")
        return [value]
    if len(value) > MAX_PROMPTS:
        raise fail("prompt", f"holds {len(value)} prompts, the limit is {MAX_PROMPTS}")
    for i, item in enumerate(value):
        if isinstance(item, list):
            check_length(item, f"prompt[{i}]")
            for j, token in enumerate(item):
                if not is_id(token):
                    raise fail(f"prompt[{i}][{j}]", "must be a token id")
        elif not isinstance(item, str):
            raise fail(f"prompt[{i}]", "must be a text or a list of token ids")
    return value


def check_tokens(ids: list[int], info: EngineInfo, at: str) -> tuple[int, ...]:
    """The token ids of a prompt; raises RequestError (400) if it is empty or an id unknown."""
    if not ids:
        raise RequestError(400, f"{at}: is empty", code="invalid_value", param=at)
    if min(ids) < 0 or max(ids) >= info.vocab_size:
        i = next(i for i, token in enumerate(ids) if not 0 <= token < info.vocab_size)
        message = (
            f"{at}[{i}]: token id {ids[i]} is out of range: "
            f"the vocabulary has ids 0 to {info.vocab_size - 1}"
        )
        raise RequestError(400, message, code="token_id_out_of_range", param=f"{at}[{i}]")
    return tuple(ids)


async def _encode(tokenizer: Tokenizer, text: str, info: EngineInfo, at: str) -> list[int]:
    most = info.max_model_len - 1
    try:
        if len(text) <= INLINE_CHARACTERS:
            return tokenizer.encode(text, most=most)
        return await asyncio.to_thread(tokenizer.encode, text, most=most)
    except TooManyTokens as error:
        raise _no_room(error, info, at) from error


def _no_room(length: object, info: EngineInfo, at: str) -> RequestError:
    message = (
        f"{at}: has {length} and leaves no room for an answer: "
        f"this model's limit is {info.max_model_len} tokens, prompt and answer together"
    )
    return RequestError(400, message, code="context_length_exceeded", param=at)


def _check_logprobs(value: int | None, name: str, info: EngineInfo) -> None:
    if value is not None and value > info.max_logprobs:
        message = f"{name}: {value} is over the limit of {info.max_logprobs}"
        raise RequestError(400, message, code="invalid_value", param=name)


def _job(
    prefix: str,
    body: GenerationBody,
    prompts: list[tuple[int, ...]],
    limit: int,
    asked: str | None,
    logprobs: int | None,
    tokenizer: Tokenizer,
    info: EngineInfo,
) -> Job:
    """The job of prompts that leave room for an answer.

    `asked` names the parameter that gave `limit`; a default is cut to what there is room for.
    """
    job_id = f"{prefix}-{uuid.uuid4().hex}"
    seed = None if body.seed is None else (body.seed ^ (body.seed >> 32)) & 0xFFFFFFFF
    sampling = SamplingParams(
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        seed=seed,
        logprobs=logprobs,
    )
    requests = tuple(
        GenerationRequest(
            id=f"{job_id}-{i}" if len(prompts) > 1 else job_id,
            prompt=prompt,
            max_tokens=_fit(len(prompt), limit, asked, info),
            sampling=sampling,
            stop_token_ids=() if body.ignore_eos else tokenizer.eos_token_ids,
        )
        for i, prompt in enumerate(prompts)
    )
    options = body.stream_options
    return Job(
        id=job_id,
        created=int(time.time()),
        model=info.model,
        requests=requests,
        stop=tuple(body.stop),
        stream=body.stream,
        include_usage=options is not None and options.include_usage,
    )


def _fit(prompt_tokens: int, limit: int, asked: str | None, info: EngineInfo) -> int:
    room = info.max_model_len - prompt_tokens
    if asked is None or limit <= room:
        return min(limit, room)
    message = (
        f"the prompt has {prompt_tokens} tokens and {asked} asks for {limit}: "
        f"this model's limit is {info.max_model_len} tokens, prompt and answer together"
    )
    raise RequestError(400, message, code="context_length_exceeded", param=asked)


def check_model(body: GenerationBody, info: EngineInfo) -> None:
    """Refuse a body that asks for another model: RequestError (404)."""
    if body.model is not None and body.model != info.model:
        raise unknown_model(body.model, info)


def unknown_model(name: str, info: EngineInfo) -> RequestError:
    """The error (404) of a request for another model than the one there is."""
    message = f"the model {clip(repr(name))} does not exist here, only {info.model!r} does"
    return RequestError(404, message, code="model_not_found", param="model")
