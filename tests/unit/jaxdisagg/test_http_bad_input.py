"""Every user's mistake is a 4xx with an error object that names it."""

import json

import httpx
import pytest

from jaxdisagg.api import RequestError

COMPLETION = {"prompt": "hi"}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def error_of(client: httpx.AsyncClient, path: str, status: int = 400, **how) -> dict:
    response = await client.post(path, **how)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    document = response.json()
    assert set(document) == {"error"}
    assert set(document["error"]) == {"message", "type", "param", "code"}
    assert document["error"]["type"] == (
        "invalid_request_error" if status < 500 else "server_error"
    )
    return document["error"]


BAD_COMPLETIONS = [
    ({}, "prompt", "prompt: this parameter is required"),
    ({"prompt": ""}, "prompt", "prompt: is empty"),
    ({"prompt": []}, "prompt", "prompt: is empty"),
    ({"prompt": ["a", ""]}, "prompt[1]", "prompt[1]: is empty"),
    ({"prompt": [[1], []]}, "prompt[1]", "prompt[1]: is empty"),
    ({"prompt": 5}, "prompt", "prompt: must be a text, a list of token ids, or a list of either"),
    ({"prompt": [1, "a"]}, "prompt[1]", "prompt[1]: must be a token id like the items before it"),
    ({"prompt": [1, True]}, "prompt[1]", "prompt[1]: must be a token id like the items before it"),
    ({"prompt": ["a", 1]}, "prompt[1]", "prompt[1]: must be a text or a list of token ids"),
    ({"prompt": [[1], [1.5]]}, "prompt[1][0]", "prompt[1][0]: must be a token id"),
    ({"prompt": ["a"] * 65}, "prompt", "prompt: holds 65 prompts, the limit is 64"),
    (
        {"prompt": [1, 262]},
        "prompt[1]",
        "prompt[1]: token id 262 is out of range: the vocabulary has ids 0 to 261",
    ),
    (
        {"prompt": [[5], [-1]]},
        "prompt[1][0]",
        "prompt[1][0]: token id -1 is out of range: the vocabulary has ids 0 to 261",
    ),
    (
        {"prompt": [1] * 100},
        "prompt",
        "prompt: has 100 tokens and leaves no room for an answer: "
        "this model's limit is 100 tokens, prompt and answer together",
    ),
    ({"prompt": [[1], [1] * 100]}, "prompt[1]", "prompt[1]: has 100 tokens and leaves no room"),
    ({"prompt": "a" * 100}, "prompt", "prompt: has 100 tokens and leaves no room"),
    ({"prompt": ["a", "é" * 50]}, "prompt[1]", "prompt[1]: has 100 tokens and leaves no room"),
    (
        {"prompt": "a" * 1189},
        "prompt",
        "prompt: has 1189 bytes, which are at least 100 tokens, and leaves no room",
    ),
    (
        {"prompt": [1] * 90, "max_tokens": 11},
        "max_tokens",
        "the prompt has 90 tokens and max_tokens asks for 11: "
        "this model's limit is 100 tokens, prompt and answer together",
    ),
    ({"prompt": "a", "logprobs": 6}, "logprobs", "logprobs: 6 is over the limit of 5"),
    ({"prompt": "a", "logprobs": True}, "logprobs", "logprobs: must be a valid integer (got true)"),
    ({"prompt": "a", "echo": True}, "echo", "'echo' = true is not supported (only false is)"),
    ({"prompt": "a", "messages": []}, "messages", "unknown parameter 'messages'"),
]

BAD_CHATS = [
    ({}, "messages", "messages: this parameter is required"),
    ({"messages": []}, "messages", "messages: must have at least 1 item"),
    ({"messages": "hi"}, "messages", 'messages: must be a valid list (got "hi")'),
    ({"messages": [{}] * 4097}, "messages", "messages: must have at most 4096 items, not 4097"),
    (
        {"messages": [{"role": "user", "content": [{}] * 4097}]},
        "messages[0].content",
        "messages[0].content: must have at most 4096 parts, not 4097",
    ),
    (
        {"messages": [{"role": "user", "content": "a" * 2000}]},
        "messages",
        "bytes, which are at least 1",
    ),
    (
        {"messages": [{"role": "robot", "content": "x"}]},
        "messages[0].role",
        "messages[0].role: must be 'system', 'developer', 'user' or 'assistant' (got \"robot\")",
    ),
    (
        {"messages": [{"role": "user"}]},
        "messages[0].content",
        "messages[0].content: this parameter is required",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content",
        "messages[0].content: part 0 is 'image_url', and only text parts are supported",
    ),
    (
        {"messages": [{"role": "user", "content": "x", "tool_calls": []}]},
        "messages[0].tool_calls",
        "messages[0].tool_calls: unknown parameter",
    ),
    ({**CHAT, "top_logprobs": 2}, "top_logprobs", "only allowed when logprobs is true"),
    ({**CHAT, "logprobs": True, "top_logprobs": 6}, "top_logprobs", "6 is over the limit of 5"),
    ({**CHAT, "logprobs": 2}, "logprobs", "logprobs: must be a valid boolean (got 2)"),
    ({**CHAT, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differ"),
    (
        {**CHAT, "tools": [{"type": "function"}]},
        "tools",
        '\'tools\' = [{"type":"function"}] is not',
    ),
    ({**CHAT, "prompt": "x"}, "prompt", "unknown parameter 'prompt'"),
]

BAD_EVERYWHERE = [
    ({"n": 2}, "n", "parameter 'n' = 2 is not supported (only 1 is)"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens: must be greater than or equal to 1 (got 0)"),
    ({"max_tokens": "5"}, "max_tokens", 'max_tokens: must be a valid integer (got "5")'),
    ({"max_tokens": 5.5}, "max_tokens", "max_tokens: must be a valid integer (got 5.5)"),
    ({"temperature": 3}, "temperature", "must be less than or equal to 2 (got 3)"),
    ({"temperature": True}, "temperature", "must be a valid number (got true)"),
    ({"top_p": 0}, "top_p", "top_p: must be greater than 0 (got 0)"),
    ({"top_k": -1}, "top_k", "top_k: must be greater than or equal to 0 (got -1)"),
    ({"seed": 1 << 63}, "seed", "seed: must be less than 9223372036854775808"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "stop: must have at most 4 items"),
    ({"stop": ["a", ""]}, "stop[1]", "stop[1]: "),
    ({"stop": ""}, "stop[0]", "stop[0]: "),
    ({"stop": [1]}, "stop[0]", "stop[0]: must be a valid string (got 1)"),
    ({"stream": "yes"}, "stream", 'stream: must be a valid boolean (got "yes")'),
    ({"stream_options": {}}, "stream_options", "only allowed when stream is true"),
    (
        {"stream": True, "stream_options": {"x": 1}},
        "stream_options.x",
        "stream_options.x: unknown parameter",
    ),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "'frequency_penalty' = 0.5 is not supported"),
]

CASES = [
    *[("/v1/completions", *case) for case in BAD_COMPLETIONS],
    *[("/v1/chat/completions", *case) for case in BAD_CHATS],
    *[("/v1/completions", {**COMPLETION, **body}, *rest) for body, *rest in BAD_EVERYWHERE],
    *[("/v1/chat/completions", {**CHAT, **body}, *rest) for body, *rest in BAD_EVERYWHERE],
]


@pytest.mark.parametrize(("path", "body", "param", "message"), CASES)
async def test_a_wrong_value_is_named(client, engine, path, body, param, message):
    error = await error_of(client, path, json=body)
    assert message in error["message"]
    assert error["param"] == param
    assert engine.requests == []


async def test_all_unknown_and_unsupported_parameters_are_named_at_once(client):
    body = {**COMPLETION, "n": 3, "foo": 1, "bar": None, "best_of": None, "user": "me"}
    error = await error_of(client, "/v1/completions", json=body)
    assert error["message"] == (
        "parameter 'n' = 3 is not supported (only 1 is); "
        "unknown parameter 'foo'; unknown parameter 'bar'"
    )
    assert (error["param"], error["code"]) == ("n", "unsupported_parameter")


async def test_all_wrong_values_are_named_at_once(client):
    body = {**COMPLETION, "top_p": 7, "seed": "x"}
    error = await error_of(client, "/v1/completions", json=body)
    assert "top_p: " in error["message"]
    assert "seed: " in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        {**COMPLETION, **{f"x{i}": i for i in range(50_000)}},
        {**COMPLETION, "x" * 50_000: 1},
        {**COMPLETION, "model": "x" * 50_000},
        {**COMPLETION, "stop": "", "stream_options": {f"x{i}": i for i in range(50_000)}},
    ],
    ids=["parameters", "name", "model", "options"],
)
async def test_an_error_stays_short(client, body):
    status = 404 if "model" in body else 400
    error = await error_of(client, "/v1/completions", status, json=body)
    assert len(error["message"]) < 3000
    assert len(error["param"]) < 100
    if "x49999" in body:
        assert error["message"].startswith("unknown parameter 'x0'; unknown parameter 'x1'; ")
        assert error["message"].endswith("and 49984 more")


async def test_neutral_values_of_unsupported_parameters_and_nulls_pass(client):
    body = {
        **CHAT,
        "n": 1,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "temperature": None,
        "stop": None,
        "max_tokens": None,
        "tools": None,
        "user": "me",
    }
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b'"x"', "must be a JSON object"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"prompt": ' + b'{"a":' * 100_000, "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_invalid_json(client, path, content, message):
    error = await error_of(client, path, content=content)
    assert message in error["message"]
    assert error["code"] == "invalid_json"


async def test_a_body_over_the_limit(client):
    content = b'{"prompt": "' + b"a" * (16 << 20) + b'"}'
    for how in ({"content": content}, {"content": chunks(content)}):
        error = await error_of(client, "/v1/completions", 413, **how)
        assert "longer than 16777216 bytes" in error["message"]
        assert error["code"] == "body_too_large"


async def chunks(content: bytes):
    """A body of undeclared length."""
    yield content


@pytest.mark.parametrize("where", ["prompt", "foo", "messages", "stop", "chat_template_kwargs"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_deep_nesting_is_no_bug(client, path, where):
    """Of every depth that the JSON decoder takes."""
    base = COMPLETION if path == "/v1/completions" else CHAT
    for depth in (100, 500, 800, 900, 950, 1000, 2000, 10_000):
        for opening, closing in (("[", "]"), ('{"a":', "}")):
            deep = opening * depth + "1" + closing * depth
            if where == "chat_template_kwargs":
                deep = '{"x": ' + deep + "}"
            given = "".join(f"{json.dumps(k)}: {json.dumps(v)}, " for k, v in base.items())
            content = "{" + given + f'"{where}": {deep}' + "}"
            response = await client.post(path, content=content)
            assert response.status_code in (200, 400), (depth, response.text)


async def test_another_model(client):
    error = await error_of(client, "/v1/completions", 404, json={"prompt": "a", "model": "gpt"})
    assert error["message"] == "the model 'gpt' does not exist here, only 'tiny' does"
    assert (error["param"], error["code"]) == ("model", "model_not_found")


async def test_a_conversation_that_the_template_refuses(engine, client, tiny_tokenizer):
    text = "{{ raise_exception('roles must alternate') }}"
    original, tiny_tokenizer.template = tiny_tokenizer.template, type(tiny_tokenizer.template)(text)
    try:
        error = await error_of(client, "/v1/chat/completions", json=CHAT)
        tiny_tokenizer.template = None
        no_template = await error_of(client, "/v1/chat/completions", json=CHAT)
    finally:
        tiny_tokenizer.template = original
    assert "roles must alternate" in error["message"]
    assert error["param"] == "messages"
    assert "no chat template" in no_template["message"]
    assert engine.requests == []


async def test_unknown_path_and_method(client):
    error = await error_of(client, "/v1/embeddings", 404, json={})
    assert error["message"] == "no such endpoint: POST /v1/embeddings"
    response = await client.get("/v1/completions")
    assert response.status_code == 405
    assert response.json()["error"]["message"] == "method not allowed: GET /v1/completions"
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
)
@pytest.mark.parametrize("status", [400, 429, 503])
async def test_a_request_that_the_engine_refuses(client, engine, path, body, stream, status):
    engine.script = [RequestError(status, "no page left", code="full", param="p")]
    error = await error_of(client, path, status, json={**body, "stream": stream})
    assert (error["message"], error["code"], error["param"]) == ("no page left", "full", "p")


@pytest.mark.parametrize("stream", [False, True])
async def test_one_of_several_prompts_refused_refuses_and_cancels_all(client, engine, stream):
    engine.scripts = {(98,): [RequestError(503, "no page left")]}
    body = {"prompt": ["a", "b", "c"], "stream": stream}
    error = await error_of(client, "/v1/completions", 503, json=body)
    assert error["message"] == "no page left"
    assert len(engine.cancelled | engine.ended) == len(engine.requests)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [[KeyError("bug")], []])
async def test_a_bug_is_a_500_without_its_inside(client, engine, stream, script, caplog):
    engine.script = script
    body = {**COMPLETION, "stream": stream}
    error = await error_of(client, "/v1/completions", 500, json=body)
    assert error["code"] == "internal_error"
    assert "bug" not in error["message"]
    assert "request to /v1/completions failed" in caplog.text


async def test_not_ready(client, engine):
    engine.missing = "no prefill node"
    error = await error_of(client, "/v1/completions", 503, json=COMPLETION)
    assert error["message"] == "not ready: no prefill node"
    assert error["code"] == "not_ready"
    assert engine.requests == []
