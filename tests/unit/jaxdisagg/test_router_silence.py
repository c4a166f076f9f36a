"""Nodes whose heartbeats end: busy ones, frozen ones, and those that come back."""

import asyncio
import signal
import sys
from contextlib import asynccontextmanager

import httpx
import msgspec
import pytest
from repository import REPOSITORY

from jaxdisagg.announce import NodeInfo
from jaxdisagg.router import create_router_app
from jaxdisagg.server import create_app

DEADLINE_S = 60.0
SILENCE_S = 1.0
HEARTBEAT_S = 60.0  # of a node that stays, however slow the machine is
LAST_S = 0.1  # announced with the last heartbeat, so that the next one is missed soon
BODY = {"prompt": "x"}
STREAM = {"prompt": "x", "stream": True}


@pytest.fixture
async def router(serve):
    """A client of a router that waits SILENCE_S for a node whose heartbeats have ended."""
    async with (
        serve(create_router_app(silence_s=SILENCE_S)) as url,
        httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client,
    ):
        yield client


@pytest.fixture
async def patient_router(serve):
    """The same of a router that waits twice as long."""
    async with (
        serve(create_router_app(silence_s=2 * SILENCE_S)) as url,
        httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client,
    ):
        yield client


async def announce(router: httpx.AsyncClient, url: str, heartbeat_s: float = HEARTBEAT_S) -> None:
    info = NodeInfo(id="n0", role="mixed", model="tiny", url=url, heartbeat_s=heartbeat_s)
    await router.post("/internal/announce", content=msgspec.json.encode(info))


async def until(router: httpx.AsyncClient, status: int) -> None:
    """Until the router's health has this status."""
    async with asyncio.timeout(DEADLINE_S):
        while (await router.get("/health")).status_code != status:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("body", [BODY, STREAM])
@pytest.mark.parametrize("tokens", [0, 1])
async def test_a_silent_node_is_given_up(router, serve, make_engine, tiny_tokenizer, body, tokens):
    """It still holds its connections open, as a frozen process does."""
    engine = make_engine(gate=True)
    async with serve(create_app(engine, tiny_tokenizer)) as url:
        await announce(router, url)
        engine.release(tokens)
        post = asyncio.create_task(router.post("/v1/completions", json=body))
        await engine.until(lambda: engine.requests)
        await announce(router, url, LAST_S)
        response = await post
        assert response.status_code == (200 if tokens and body is STREAM else 502)
        lost = "node n0 was lost: its heartbeats ended and it sent nothing for too long"
        assert lost in response.text
        assert "[DONE]" not in response.text
        await engine.until(lambda: engine.cancelled)
        assert (await router.get("/health")).status_code == 503


async def test_what_a_busy_node_still_sends_is_passed_on(
    patient_router, serve, make_engine, tiny_tokenizer
):
    """Only its heartbeats are late: it gets nothing new, and its streams go on."""
    router = patient_router
    engine = make_engine(script=b"abcdefghij", gate=True)
    async with serve(create_app(engine, tiny_tokenizer)) as url:
        await announce(router, url)
        stream = asyncio.create_task(router.post("/v1/completions", json=STREAM))
        await engine.until(lambda: engine.requests)
        engine.release()
        await announce(router, url, LAST_S)
        await until(router, 503)
        refused = await router.post("/v1/completions", json=BODY)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "no_decode_node"
        for _ in range(9):  # longer than silence is borne, and never silent for a fourth of that
            await asyncio.sleep(SILENCE_S / 4)
            engine.release()
        async with asyncio.timeout(DEADLINE_S):
            text = (await stream).text
        assert text.count('"text"') == 10
        assert text.endswith("data: [DONE]\n\n")
        assert len(engine.requests) == 1


async def test_a_request_outlives_a_pause_of_its_nodes_heartbeats(
    patient_router, serve, make_engine, tiny_tokenizer
):
    router = patient_router
    engine = make_engine(gate=True)
    async with serve(create_app(engine, tiny_tokenizer)) as url:
        await announce(router, url)
        post = asyncio.create_task(router.post("/v1/completions", json=BODY))
        await engine.until(lambda: engine.requests)
        await announce(router, url, LAST_S)
        await until(router, 503)
        await announce(router, url)
        await asyncio.sleep(2.2 * SILENCE_S)  # longer than silence is borne
        nodes = (await router.get("/debug/state")).json()["router"]["nodes"]
        assert nodes["n0"]["in_flight"] == 1
        engine.release(2)
        async with asyncio.timeout(DEADLINE_S):
            assert (await post).json()["choices"][0]["text"] == "hi"


@asynccontextmanager
async def stub_node(folder: str, router_url: str):
    """A node in a process of its own, and its URL."""
    script = REPOSITORY / "tests" / "support" / "stub_node.py"
    process = await asyncio.create_subprocess_exec(
        sys.executable, script, folder, router_url, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            url = (await process.stdout.readline()).decode().strip()
        yield process, url
    finally:
        process.kill()  # ends a stopped process too
        await process.wait()


@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_a_frozen_process_fails_its_requests_and_serves_again(router, tiny_folder, body):
    async with stub_node(str(tiny_folder), str(router.base_url)) as (process, url):
        await until(router, 200)
        assert (await router.post("/v1/completions", json=body)).status_code == 200
        process.send_signal(signal.SIGSTOP)
        # Still announced: both are sent to it, by an old connection and by a new one.
        both = [asyncio.create_task(router.post("/v1/completions", json=body)) for _ in range(2)]
        in_flight = 'jaxdisagg_engine_state{name="nodes.n0.in_flight"} 2.0'
        async with asyncio.timeout(DEADLINE_S):
            while in_flight not in (await router.get("/metrics")).text:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await announce(router, url, LAST_S)  # in its name: the last heartbeat
        for response in await asyncio.gather(*both):
            assert response.status_code == 502
            assert "node n0 was lost: its heartbeats ended" in response.text
        assert (await router.post("/v1/completions", json=body)).status_code == 503
        process.send_signal(signal.SIGCONT)
        await until(router, 200)
        response = await router.post("/v1/completions", json=body)
        assert response.status_code == 200
        assert '"text":"h"' in response.text
