"""Whole answers and streams in OpenAI's formats."""

import json
from typing import Any

import httpx
import pytest

from jaxdisagg.api import RequestError, SamplingParams, TokenOutput

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def post(client: httpx.AsyncClient, path: str, body: dict, **how) -> dict[str, Any]:
    response = await client.post(path, json=body, **how)
    assert response.status_code == 200, response.text
    return response.json()


async def stream(client: httpx.AsyncClient, path: str, body: dict, **how) -> list[Any]:
    """The documents of a stream's events; the string "[DONE]" for the mark."""
    response = await client.post(path, json={**body, "stream": True}, **how)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in response.headers
    assert response.text.endswith("\n\n")
    events = response.text.split("\n\n")[:-1]
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    data = [event.removeprefix("data: ") for event in events]
    return [text if text == "[DONE]" else json.loads(text) for text in data]


def content_of(chunks: list[Any], index: int = 0) -> str:
    choices = [c for chunk in chunks if chunk != "[DONE]" for c in chunk["choices"]]
    return "".join(
        c["text"] if "text" in c else c["delta"]["content"] for c in choices if c["index"] == index
    )


async def test_completion(client, engine):
    document = await post(client, "/v1/completions", {"prompt": "hello", "model": "tiny"})
    assert document["id"].startswith("cmpl-")
    assert (document["object"], document["model"]) == ("text_completion", "tiny")
    assert document["choices"] == [
        {"index": 0, "text": "hi", "logprobs": None, "finish_reason": "length"}
    ]
    assert document["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    (request,) = engine.requests
    assert request.prompt == (258, ord("o"))
    assert request.max_tokens == 16
    assert request.stop_token_ids == (260,)
    assert request.sampling == SamplingParams(temperature=1.0)


async def test_chat_completion(client, engine, tiny_tokenizer):
    document = await post(client, "/v1/chat/completions", CHAT)
    assert document["id"].startswith("chatcmpl-")
    assert document["object"] == "chat.completion"
    assert document["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hi", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    (request,) = engine.requests
    assert list(request.prompt) == tiny_tokenizer.encode_chat(CHAT["messages"])
    assert document["usage"]["prompt_tokens"] == len(request.prompt)
    assert request.max_tokens == 100 - len(request.prompt)  # the default, cut to the room


async def test_sampling_parameters_reach_the_engine(client, engine):
    body = {
        "temperature": 0,
        "top_k": 5,
        "top_p": 0.5,
        "seed": 7,
        "max_tokens": 3,
        "ignore_eos": True,
    }
    await post(client, "/v1/completions", {"prompt": [1], **body})
    await post(client, "/v1/chat/completions", {**CHAT, **body, "seed": -1})
    await post(client, "/v1/chat/completions", {**CHAT, "max_completion_tokens": 4})
    sampling = SamplingParams(temperature=0.0, top_k=5, top_p=0.5, seed=7)
    assert engine.requests[0].sampling == sampling
    assert (engine.requests[0].max_tokens, engine.requests[0].stop_token_ids) == (3, ())
    assert 0 <= engine.requests[1].sampling.seed < 1 << 32
    assert engine.requests[2].max_tokens == 4


async def test_content_parts_and_developer_role(client, engine, tiny_tokenizer):
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "y"}]
    messages = [{"role": "developer", "content": "d"}, {"role": "user", "content": parts}]
    await post(client, "/v1/chat/completions", {"messages": messages})
    plain = [{"role": "system", "content": "d"}, {"role": "user", "content": "hey"}]
    assert list(engine.requests[0].prompt) == tiny_tokenizer.encode_chat(plain)


async def test_template_variables(client, engine, tiny_tokenizer):
    body = {**CHAT, "chat_template_kwargs": {"add_generation_prompt": False}}
    await post(client, "/v1/chat/completions", body)
    expected = tiny_tokenizer.encode_chat(CHAT["messages"], {"add_generation_prompt": False})
    assert list(engine.requests[0].prompt) == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [(97, 98)]),
        ([97, 98], [(97, 98)]),
        (["ab"], [(97, 98)]),
        (["ab", "c"], [(97, 98), (99,)]),
        ([[97, 98], [99]], [(97, 98), (99,)]),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
async def test_prompt_forms(client, engine, prompt, expected, streaming):
    engine.scripts = {(97, 98): b"one", (99,): b"three"}
    body = {"prompt": prompt, "max_tokens": 9}
    if streaming:
        chunks = await stream(client, "/v1/completions", body)
        texts = [content_of(chunks, i) for i in range(len(expected))]
    else:
        document = await post(client, "/v1/completions", body)
        assert [choice["index"] for choice in document["choices"]] == list(range(len(expected)))
        texts = [choice["text"] for choice in document["choices"]]
        assert document["usage"]["prompt_tokens"] == sum(map(len, expected))
        assert document["usage"]["completion_tokens"] == sum(map(len, texts))
    assert texts == ["one", "three"][: len(expected)]
    assert sorted(r.prompt for r in engine.requests) == expected
    assert len({r.id for r in engine.requests}) == len(expected)


async def test_completion_stream(client):
    chunks = await stream(client, "/v1/completions", {"prompt": "x"})
    assert chunks[-1] == "[DONE]"
    assert [c["choices"][0]["text"] for c in chunks[:-1]] == ["h", "i"]
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None, "length"]
    assert len({(c["id"], c["object"], c["created"], c["model"]) for c in chunks[:-1]}) == 1
    assert "usage" not in chunks[0]


async def test_chat_stream_with_usage(client, engine):
    body = {**CHAT, "stream_options": {"include_usage": True}}
    chunks = await stream(client, "/v1/chat/completions", body)
    assert chunks[-1] == "[DONE]"
    assert {c["object"] for c in chunks[:-1]} == {"chat.completion.chunk"}
    assert [c["choices"][0]["delta"] for c in chunks[:-2]] == [
        {"role": "assistant", "content": ""},
        {"content": "h"},
        {"content": "i"},
    ]
    assert [c["usage"] for c in chunks[:-2]] == [None] * 3
    prompt_tokens = len(engine.requests[0].prompt)
    assert (chunks[-2]["choices"], chunks[-2]["usage"]) == (
        [],
        {"prompt_tokens": prompt_tokens, "completion_tokens": 2, "total_tokens": prompt_tokens + 2},
    )


@pytest.mark.parametrize("text", ["naïve 🙂!", "漢字", "👩‍👩‍👧"])
async def test_characters_split_over_tokens_stream_whole(client, engine, text):
    engine.script = text.encode()
    chunks = await stream(client, "/v1/chat/completions", {**CHAT, "max_tokens": 50})
    assert content_of(chunks) == text
    assert "\ufffd" not in json.dumps(chunks, ensure_ascii=False)
    document = await post(client, "/v1/chat/completions", {**CHAT, "max_tokens": 50})
    assert document["choices"][0]["message"]["content"] == text


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("stop", ["ello", ["zzz", "ello"]])
async def test_a_stop_string_over_token_borders(client, engine, streaming, stop):
    engine.script = [ord("a"), 258, ord("o"), ord("!"), ord("?")]
    body = {"prompt": "x", "stop": stop}
    if streaming:
        chunks = await stream(client, "/v1/completions", body)
        choice = chunks[-2]["choices"][0]
        text = content_of(chunks)
    else:
        document = await post(client, "/v1/completions", body)
        (choice,) = document["choices"]
        text = choice["text"]
        assert document["usage"]["completion_tokens"] == 3
    assert (text, choice["finish_reason"]) == ("ah", "stop")
    assert engine.finished == engine.ended == {engine.requests[0].id}
    assert engine.cancelled == set()


async def test_only_a_stop_string_tells_the_engine_that_an_answer_is_whole(client, engine):
    await post(client, "/v1/completions", {"prompt": "x", "stop": "zzz"})
    # Complete with the last token, which the engine has ended by itself.
    await post(client, "/v1/completions", {"prompt": "x", "stop": "i"})
    assert engine.finished == set()
    assert len(engine.ended) == 2


async def test_a_stop_token_ends_without_text(client, engine):
    engine.script = [ord("a"), TokenOutput(None, finish_reason="stop")]
    document = await post(client, "/v1/completions", {"prompt": "x"})
    assert document["choices"][0]["text"] == "a"
    assert document["choices"][0]["finish_reason"] == "stop"
    assert document["usage"]["completion_tokens"] == 1


LOGPROBS = [
    TokenOutput(258, -0.5, ((258, -0.5), (97, -1.0))),
    TokenOutput(0xC3, -0.25, ((0xC3, -0.25), (98, -2.0))),
    TokenOutput(0xA9, float("-inf"), ((99, -0.125),)),
]


async def test_completion_logprobs(client, engine):
    engine.script = LOGPROBS
    document = await post(client, "/v1/completions", {"prompt": "x", "logprobs": 2})
    assert document["choices"][0]["text"] == "hellé"
    assert document["choices"][0]["logprobs"] == {
        "tokens": ["hell", "bytes:\\xc3", "bytes:\\xa9"],
        "token_logprobs": [-0.5, -0.25, -9999.0],
        "top_logprobs": [
            {"hell": -0.5, "a": -1.0},
            {"bytes:\\xc3": -0.25, "b": -2.0},
            {"c": -0.125, "bytes:\\xa9": -9999.0},
        ],
        "text_offset": [0, 4, 4],
    }
    assert engine.requests[0].sampling.logprobs == 2


async def test_chat_logprobs(client, engine):
    engine.script = LOGPROBS
    body = {**CHAT, "logprobs": True, "top_logprobs": 2}
    document = await post(client, "/v1/chat/completions", body)
    content = document["choices"][0]["logprobs"]["content"]
    assert content[0] == {
        "token": "hell",
        "logprob": -0.5,
        "bytes": list(b"hell"),
        "top_logprobs": [
            {"token": "hell", "logprob": -0.5, "bytes": list(b"hell")},
            {"token": "a", "logprob": -1.0, "bytes": [97]},
        ],
    }
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == "hellé"
    await post(client, "/v1/chat/completions", {**CHAT, "logprobs": True})
    assert [r.sampling.logprobs for r in engine.requests] == [2, 0]


async def test_streamed_logprobs_are_those_of_the_whole_answer(client, engine):
    engine.script = LOGPROBS
    body = {**CHAT, "logprobs": True, "top_logprobs": 2}
    document = await post(client, "/v1/chat/completions", body)
    chunks = await stream(client, "/v1/chat/completions", body)
    streamed = [c["choices"][0]["logprobs"] for c in chunks[:-1]]
    joined = [entry for part in streamed if part for entry in part["content"]]
    assert joined == document["choices"][0]["logprobs"]["content"]
    assert len(streamed) == 4


@pytest.mark.parametrize("streaming", [False, True])
async def test_tokens_after_a_stop_string_have_no_logprobs(client, engine, streaming):
    engine.script = [TokenOutput(b, -1.0) for b in b"xab!"]
    body = {"prompt": "x", "stop": "ab", "logprobs": 0}
    if streaming:
        chunks = await stream(client, "/v1/completions", body)
        parts = [c["choices"][0]["logprobs"]["tokens"] for c in chunks[:-1]]
        assert [token for part in parts for token in part] == ["x"]
    else:
        document = await post(client, "/v1/completions", body)
        assert document["choices"][0]["logprobs"]["tokens"] == ["x"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_failure_midway_ends_the_stream_with_an_error(client, engine, path):
    engine.script = [*b"ab", RequestError(503, "prefill node p0 is gone", code="peer_lost")]
    body = {"prompt": "x"} if path == "/v1/completions" else CHAT
    chunks = await stream(client, path, body)
    assert chunks[-1] == {
        "error": {
            "message": "prefill node p0 is gone",
            "type": "server_error",
            "param": None,
            "code": "peer_lost",
        }
    }
    assert content_of(chunks[:-1]) == "ab"
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks[:-1])
    response = await client.post(path, json=body)
    assert response.status_code == 503


async def test_a_bug_midway_ends_the_stream_with_an_error(client, engine, caplog):
    engine.script = [97, KeyError("secret")]
    chunks = await stream(client, "/v1/completions", {"prompt": "x"})
    assert chunks[-1]["error"]["code"] == "internal_error"
    assert "secret" not in json.dumps(chunks)
    assert "failed midway" in caplog.text


async def test_timing_on_request(client):
    head = {"x-jaxdisagg-timing": "1"}
    document = await post(client, "/v1/chat/completions", CHAT, headers=head)
    timing = document["choices"][0]["timing"]
    terms = ("queue", "prefill", "exposed_transfer", "first_decode")
    assert sum(timing[term] for term in terms) == pytest.approx(timing["ttft"])
    assert (timing["prefill_node"], timing["pages"]) == ("p0", 3)
    chunks = await stream(client, "/v1/completions", {"prompt": "x"}, headers=head)
    assert "timing" not in chunks[0]["choices"][0]
    assert chunks[-2]["choices"][0]["timing"] == timing
    assert "timing" not in (await post(client, "/v1/completions", {"prompt": "x"}))["choices"][0]


async def test_a_timing_that_comes_late_is_waited_for(client, engine):
    head = {"x-jaxdisagg-timing": "1"}
    engine.timing_unknown = 4
    document = await post(client, "/v1/completions", {"prompt": ["x", "y"]}, headers=head)
    assert [choice["timing"]["pages"] for choice in document["choices"]] == [3, 3]
    engine.timing_unknown = 4
    chunks = await stream(client, "/v1/completions", {"prompt": "x"}, headers=head)
    assert chunks[-2]["choices"][0]["timing"]["pages"] == 3
    assert engine.timing_unknown == 0
    engine.timing_unknown = 1 << 30
    document = await post(client, "/v1/completions", {"prompt": "x"}, headers=head)
    assert document["choices"][0]["timing"] is None


async def test_a_timing_that_comes_late_is_counted(client, engine):
    engine.timing_unknown = 2
    await post(client, "/v1/completions", {"prompt": "x"})
    counted = 'jaxdisagg_ttft_seconds_count{term="total"} 1.0'
    for expected in (False, True, True):
        assert (counted in (await client.get("/metrics")).text) is expected


@pytest.mark.parametrize("streaming", [False, True])
async def test_the_request_id_is_a_header_too(client, streaming):
    response = await client.post("/v1/completions", json={"prompt": "x", "stream": streaming})
    assert response.headers["x-request-id"].startswith("cmpl-")
    assert response.headers["x-request-id"] in response.text


async def test_long_texts_are_tokenized_alike(client, engine, make_engine, tiny_tokenizer):
    text = "hello " * 1000
    engine.info = type(engine.info)("tiny", 262, 10000, 5, "mixed")
    await post(client, "/v1/completions", {"prompt": text})
    messages = [{"role": "user", "content": text}]
    await post(client, "/v1/chat/completions", {"messages": messages})
    assert list(engine.requests[0].prompt) == tiny_tokenizer.encode(text)
    assert list(engine.requests[1].prompt) == tiny_tokenizer.encode_chat(messages)
