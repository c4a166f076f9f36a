"""The router in front of real node servers on loopback sockets."""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import msgspec
import pytest

from jaxdisagg.announce import NodeInfo
from jaxdisagg.api import RequestError
from jaxdisagg.router import create_router_app
from jaxdisagg.server import bind, create_app

DEADLINE_S = 60.0
BODY = {"prompt": "x"}
STREAM = {"prompt": "x", "stream": True}


async def announce(client: httpx.AsyncClient, name: str, url: str, model="tiny", **more) -> None:
    info = NodeInfo(id=name, role="mixed", model=model, url=url, **{"heartbeat_s": 60.0} | more)
    response = await client.post("/internal/announce", content=msgspec.json.encode(info))
    assert response.status_code == 200, response.text


def unused_url() -> str:
    with bind("127.0.0.1", 0) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
async def router(serve):
    """A client of a served router without nodes."""
    async with (
        serve(create_router_app()) as url,
        httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client,
    ):
        yield client


@pytest.fixture
def nodes(router, serve, make_engine, tiny_tokenizer):
    """`async with nodes(2) as engines`: that many nodes n0, n1, ... have announced themselves."""

    @asynccontextmanager
    async def start(count: int):
        engines = [make_engine() for _ in range(count)]
        if count == 0:
            yield []
            return
        async with serve(create_app(engines[-1], tiny_tokenizer)) as url:
            await announce(router, f"n{count - 1}", url)
            async with start(count - 1) as others:
                yield [*others, engines[-1]]

    return start


async def test_an_answer_is_passed_on_with_its_headers(router, nodes):
    async with nodes(1) as (engine,):
        head = {"x-jaxdisagg-timing": "1"}
        response = await router.post("/v1/completions", json=BODY, headers=head)
        assert response.status_code == 200
        assert response.json()["choices"][0]["text"] == "hi"
        assert response.json()["choices"][0]["timing"]["prefill_node"] == "p0"
        assert response.headers["x-request-id"] == engine.requests[0].id
        assert response.headers["x-jaxdisagg-node"] == "n0"
        assert len(response.headers.get_list("date")) == 1


@pytest.mark.parametrize("status", [400, 503])
async def test_a_nodes_error_is_passed_on(router, nodes, status):
    async with nodes(1) as (engine,):
        engine.script = [RequestError(status, "no", code="why")]
        for body in (BODY, STREAM):
            response = await router.post("/v1/completions", json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (status, "why")
    assert len(engine.requests) == 2  # not tried again


async def test_a_node_that_is_not_ready_after_all_is_passed_over(router, nodes):
    """As after a restart on the same port, until its first heartbeat."""
    async with nodes(2) as (first, second):
        first.missing = "no prefill node"
        for body in (BODY, STREAM):
            response = await router.post("/v1/completions", json=body)
            assert response.status_code == 200
            assert response.headers["x-jaxdisagg-node"] == "n1"
        second.missing = "no pages"
        response = await router.post("/v1/completions", json=BODY)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
    assert (len(first.requests), len(second.requests)) == (0, 2)
    await until_idle(router)


async def test_a_stream_is_passed_on_as_it_comes(router, nodes):
    async with nodes(1) as (engine,):
        engine.script, engine.gate = b"abc", True
        engine.release()
        async with router.stream("POST", "/v1/completions", json=STREAM) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            source = (line async for line in response.aiter_lines() if line)
            for expected in "abc":
                line = await anext(source)
                assert json.loads(line.removeprefix("data: "))["choices"][0]["text"] == expected
                engine.release()
            assert await anext(source) == "data: [DONE]"


@pytest.mark.parametrize("body", [BODY, STREAM])
@pytest.mark.parametrize("tokens", [0, 1])
async def test_a_client_that_leaves_the_router_cancels_at_the_node(router, nodes, body, tokens):
    async with nodes(1) as (engine,):
        engine.gate = True
        post = asyncio.create_task(router.post("/v1/completions", json=body))
        await engine.until(lambda: engine.requests)
        engine.release(tokens)
        post.cancel()
        await engine.until(lambda: engine.cancelled)
        await until_idle(router)


async def test_a_reader_that_stops_reading_and_leaves_the_router(router, nodes):
    """The router is then suspended in a send, not in a wait for the node."""
    async with nodes(1) as (engine,):
        engine.info = type(engine.info)("tiny", 262, 1 << 20, 5, "mixed")
        engine.script = [97] * 200_000
        url = router.base_url
        _reader, writer = await asyncio.open_connection(url.host, url.port, limit=1024)
        body = json.dumps({**STREAM, "max_tokens": 200_000}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await engine.until(lambda: engine.requests)
        await asyncio.sleep(0.3)
        writer.transport.abort()
        await engine.until(lambda: engine.cancelled)
        await until_idle(router)


async def until_idle(router: httpx.AsyncClient) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            state = (await router.get("/debug/state")).json()["router"]["nodes"]
            if all(node["in_flight"] == 0 for node in state.values()):
                return
            await asyncio.sleep(0.01)


async def test_requests_go_to_the_node_with_the_least_to_do(router, nodes, eventually):
    async with nodes(2) as engines:
        for engine in engines:
            engine.gate = True
        posts = []
        for count in range(1, 5):
            posts.append(asyncio.create_task(router.post("/v1/completions", json=BODY)))
            await eventually(lambda n=count: sum(len(e.requests) for e in engines) == n)
        assert [len(engine.requests) for engine in engines] == [2, 2]
        for engine in engines:
            engine.release(10)
        assert {(await post).status_code for post in posts} == {200}
        await until_idle(router)


async def test_a_node_that_cannot_be_reached_is_passed_over(router, nodes):
    async with nodes(1) as (engine,):
        await announce(router, "a-dead", unused_url())
        for _ in range(2):
            response = await router.post("/v1/completions", json=BODY)
            assert response.headers["x-jaxdisagg-node"] == "n0"
        assert len(engine.requests) == 2
        state = (await router.get("/debug/state")).json()
        assert state["router"]["nodes"]["a-dead"]["reachable"] is False
        assert "does not tell" in state["nodes"]["a-dead"]["error"]
        assert state["nodes"]["n0"] == engine.state()


async def test_without_nodes_the_answer_says_what_is_missing(router):
    expected = "no decode or mixed node has announced itself"
    for response in (
        await router.post("/v1/completions", json=BODY),
        await router.get("/v1/models"),
    ):
        assert response.status_code == 503
        assert response.json()["error"]["message"] == expected
        assert response.json()["error"]["type"] == "server_error"
    health = await router.get("/health")
    assert (health.status_code, health.json()["missing"]) == (503, expected)
    await announce(router, "d0", unused_url())
    response = await router.post("/v1/completions", json=BODY)
    assert response.status_code == 503
    assert "d0 (not reachable)" in response.json()["error"]["message"]


@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_a_node_that_dies_with_a_request_is_a_502_and_no_second_try(router, nodes, body):
    async with dying_node(after=b"") as url, nodes(1) as (engine,):
        await announce(router, "a-dying", url)
        response = await router.post("/v1/completions", json=body)
        assert response.status_code == 502
        assert "node a-dying was lost" in response.json()["error"]["message"]
        assert engine.requests == []
        # Until its next heartbeat it is asked no more: another one may be on its port by then.
        assert (await router.post("/v1/completions", json=BODY)).status_code == 200
        assert len(engine.requests) == 1


async def test_a_node_that_dies_in_a_stream_ends_it_with_an_error(router):
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    async with dying_node(after=head + b"6\r\ndata: \r\n") as url:
        await announce(router, "a-dying", url)
        response = await router.post("/v1/completions", json=STREAM)
        assert response.status_code == 200
        last = response.text.rstrip().split("\n\n")[-1]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert "node a-dying was lost" in error["message"]
        assert "[DONE]" not in response.text
        await until_idle(router)
        missing = (await router.get("/health")).json()["missing"]
        assert "a-dying (not reachable)" in missing
        await announce(router, "a-dying", url)
        assert (await router.get("/health")).status_code == 200


async def test_a_half_answer_is_a_502(router):
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    async with dying_node(after=head) as url:
        await announce(router, "a-dying", url)
        response = await router.post("/v1/completions", json=BODY)
        assert response.status_code == 502


@asynccontextmanager
async def dying_node(after: bytes):
    """A server that reads a request, sends `after`, and closes the connection."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(after)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_node_that_answers_nothing_in_time(router, serve, make_engine, tiny_tokenizer):
    engine = make_engine(gate=True)
    app = create_router_app(answer_timeout_s=0.2)
    async with (
        serve(create_app(engine, tiny_tokenizer)) as url,
        serve(app) as router_url,
        httpx.AsyncClient(base_url=router_url) as client,
    ):
        await announce(client, "slow", url)
        response = await client.post("/v1/completions", json=BODY)
        assert response.status_code == 502
        assert "sent nothing for too long" in response.json()["error"]["message"]
        await engine.until(lambda: engine.cancelled)


async def test_the_named_model_chooses_the_nodes(router, serve, make_engine, tiny_tokenizer):
    engines = {name: make_engine() for name in ("a", "b")}
    for name, engine in engines.items():
        engine.info = type(engine.info)(name, 262, 100, 5, "mixed")
    async with (
        serve(create_app(engines["a"], tiny_tokenizer)) as url_a,
        serve(create_app(engines["b"], tiny_tokenizer)) as url_b,
    ):
        await announce(router, "n-a", url_a, model="a")
        await announce(router, "n-b", url_b, model="b")
        assert [m["id"] for m in (await router.get("/v1/models")).json()["data"]] == ["a", "b"]
        for name in ("b", "a", "b", "b"):
            response = await router.post("/v1/completions", json={**BODY, "model": name})
            assert (response.status_code, response.json()["model"]) == (200, name)
        assert [len(engine.requests) for engine in engines.values()] == [1, 3]
        for model in (None, 5, ["a"]):
            response = await router.post("/v1/completions", json={**BODY, "model": model})
            assert response.status_code == (200 if model is None else 400), response.text
        for content in (b"{", b"[" * 100_000, b'{"model": "a", "x": ' + b"[" * 100_000):
            response = await router.post("/v1/completions", content=content)
            assert response.json()["error"]["code"] == "invalid_json"
        response = await router.post("/v1/completions", json={**BODY, "model": "x" * 1000})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (404, "model_not_found")
        assert error["param"] == "model"
        assert error["message"].startswith("the model 'xxx")
        assert error["message"].endswith("does not exist here, only these do: 'a', 'b'")
        await announce(router, "n-b", url_b, model="b", ready=False)
        response = await router.post("/v1/completions", json={**BODY, "model": "b"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_decode_node")
        assert "n-b" in response.json()["error"]["message"]


async def test_models_health_and_metrics(router, nodes):
    async with nodes(2) as engines:
        assert [m["id"] for m in (await router.get("/v1/models")).json()["data"]] == ["tiny"]
        health = (await router.get("/health")).json()
        assert health == {"status": "ok", "role": "router", "nodes": ["n0", "n1"]}
        engines[0].script = engines[1].script = [RequestError(400, "no")]
        await router.post("/v1/completions", json=BODY)
        metrics = (await router.get("/metrics")).text
        assert 'jaxdisagg_router_requests_total{node="n0",outcome="rejected"} 1.0' in metrics
        assert 'jaxdisagg_engine_state{name="nodes.n0.in_flight"} 0.0' in metrics


async def test_stopping_the_router_ends_streams_with_an_error(serve, make_engine, tiny_tokenizer):
    engine = make_engine(gate=True)
    async with serve(create_app(engine, tiny_tokenizer)) as url, httpx.AsyncClient() as client:
        async with serve(create_router_app()) as router_url, asyncio.timeout(DEADLINE_S):
            client.base_url = router_url
            await announce(client, "n0", url)
            engine.release()
            stream = client.stream("POST", "/v1/completions", json=STREAM)
            response = await stream.__aenter__()
            rest = response.aiter_lines()
            assert (await anext(rest)).startswith("data: ")
        text = "\n".join([line async for line in rest])
        await stream.__aexit__(None, None, None)
        assert "the server is stopping" in text
        await engine.until(lambda: engine.cancelled)
