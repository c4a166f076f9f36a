"""A client that leaves cancels its request, over a real socket."""

import asyncio
import json

import httpx
import pytest

from jaxdisagg.api import RequestError
from jaxdisagg.server import HttpServer, bind

DEADLINE_S = 60.0
BODIES = {
    "/v1/completions": {"prompt": "x", "max_tokens": 5},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 2])
async def test_leaving_while_waiting_for_a_token(node, serve, path, stream, tokens):
    """Before the first token, and between tokens."""
    engine = node.engine
    engine.script, engine.gate = b"hello", True
    async with serve(node.app) as url, httpx.AsyncClient(base_url=url) as client:
        body = {**BODIES[path], "stream": stream}
        post = asyncio.create_task(client.post(path, json=body))
        await engine.until(lambda: engine.requests)
        engine.release(tokens)
        await asyncio.sleep(0.05)
        assert engine.cancelled == set()
        post.cancel()
        with pytest.raises(asyncio.CancelledError):
            await post
        await engine.until(lambda: engine.cancelled)
        assert engine.cancelled == {engine.requests[0].id}
        counted = (await client.get("/metrics")).text
    assert f'jaxdisagg_requests_total{{endpoint="{path}",outcome="cancelled"}} 1.0' in counted


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_cancels_every_prompt(node, serve, stream):
    engine = node.engine
    engine.script, engine.gate = b"hello", True
    async with serve(node.app) as url, httpx.AsyncClient(base_url=url) as client:
        body = {"prompt": ["a", "b", "c"], "stream": stream}
        post = asyncio.create_task(client.post("/v1/completions", json=body))
        await engine.until(lambda: len(engine.requests) == 3)
        engine.release(4)
        post.cancel()
        await engine.until(lambda: len(engine.cancelled) == 3)


async def test_tokens_are_sent_as_they_come(node, serve):
    engine = node.engine
    engine.script, engine.gate = b"abc", True
    async with serve(node.app) as url, httpx.AsyncClient(base_url=url) as client:
        engine.release(1)
        body = {"prompt": "x", "stream": True}
        async with (
            asyncio.timeout(DEADLINE_S),
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            assert response.status_code == 200
            source = response.aiter_lines()
            for expected in "abc":
                line = await anext(source)
                assert json.loads(line.removeprefix("data: "))["choices"][0]["text"] == expected
                assert await anext(source) == ""
                engine.release(1)  # the next token exists only now
            assert await anext(source) == "data: [DONE]"


async def test_a_reader_that_stops_reading_and_leaves(node, serve):
    """The server is then suspended in a send, not in a wait for a token."""
    engine = node.engine
    engine.info = type(engine.info)("tiny", 262, 1 << 20, 5, "mixed")
    engine.script = [97] * 200_000
    async with serve(node.app) as url:
        host, port = httpx.URL(url).host, httpx.URL(url).port
        _reader, writer = await asyncio.open_connection(host, port, limit=1024)
        body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 200_000}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await engine.until(lambda: engine.requests)
        await asyncio.sleep(0.2)
        assert engine.ended == set()
        writer.transport.abort()
        await engine.until(lambda: engine.cancelled)


async def test_other_requests_go_on(node, serve):
    engine = node.engine
    engine.gate = True
    async with serve(node.app) as url, httpx.AsyncClient(base_url=url) as client:
        leaving = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}))
        staying = asyncio.create_task(client.post("/v1/completions", json={"prompt": "b"}))
        await engine.until(lambda: len(engine.requests) == 2)
        leaving.cancel()
        await engine.until(lambda: engine.cancelled)
        engine.release(10)
        async with asyncio.timeout(DEADLINE_S):
            response = await staying
        assert response.json()["choices"][0]["text"] == "hi"


async def test_a_failure_before_the_first_token_is_no_200(node, serve):
    engine = node.engine
    engine.script, engine.gate = [RequestError(503, "no prefill node")], True
    async with serve(node.app) as url, httpx.AsyncClient(base_url=url) as client:
        body = {"prompt": "x", "stream": True}
        post = asyncio.create_task(client.post("/v1/completions", json=body))
        await engine.until(lambda: engine.requests)
        engine.release()
        async with asyncio.timeout(DEADLINE_S):
            response = await post
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "no prefill node"


@pytest.mark.parametrize("stream", [False, True])
async def test_stopping_the_server_fails_what_has_no_token_yet(node, serve, stream):
    engine = node.engine
    engine.gate = True
    async with httpx.AsyncClient() as client:
        async with serve(node.app) as url:
            body = {"prompt": "x", "stream": stream}
            post = asyncio.create_task(client.post(f"{url}/v1/completions", json=body))
            await engine.until(lambda: engine.requests)
        assert engine.cancelled == {engine.requests[0].id}
        async with asyncio.timeout(DEADLINE_S):
            response = await post
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "the server is stopping"


async def test_stopping_the_server_ends_a_stream_with_an_error(node, serve):
    engine = node.engine
    engine.gate = True
    body = {"prompt": "x", "stream": True}
    async with httpx.AsyncClient() as client, asyncio.timeout(DEADLINE_S):
        async with serve(node.app) as url:
            engine.release()
            stream = client.stream("POST", f"{url}/v1/completions", json=body)
            response = await stream.__aenter__()
            rest = response.aiter_lines()
            first = await anext(rest)
        assert engine.cancelled == {engine.requests[0].id}
        events = [line async for line in rest if line]
        await stream.__aexit__(None, None, None)
    assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == "h"
    (last,) = events
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the server is stopping"


async def test_a_grace_period_lets_requests_finish(node, serve):
    engine = node.engine
    engine.gate = True
    server = HttpServer(node.app, bind("127.0.0.1", 0))
    await server.start()
    async with httpx.AsyncClient(base_url="http://{}:{}".format(*server.address)) as client:
        post = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}))
        await engine.until(lambda: engine.requests)
        stop = asyncio.create_task(server.stop(grace_s=DEADLINE_S))
        await asyncio.sleep(0.05)
        engine.release(2)
        async with asyncio.timeout(DEADLINE_S):
            response = await post
            await stop
    assert response.json()["choices"][0]["text"] == "hi"
