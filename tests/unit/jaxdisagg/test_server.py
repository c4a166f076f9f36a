"""The endpoints beside generation, metrics, and running the server."""

import httpx
import pytest

from jaxdisagg.metrics import flatten
from jaxdisagg.server import bind, create_app, create_status_app


async def test_models(client, engine):
    (model,) = (await client.get("/v1/models")).json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 100)
    assert (await client.get("/v1/models/tiny")).json() == model
    response = await client.get("/v1/models/org/other")
    assert response.status_code == 404
    assert "'org/other' does not exist" in response.json()["error"]["message"]
    engine.missing = "weights"
    assert (await client.get("/v1/models")).status_code == 503


async def test_health(client, engine):
    response = await client.get("/health")
    assert response.status_code == 200
    assert response.json() == {"status": "ok", "role": "decode", "model": "tiny"}
    engine.missing = "warm-up has not ended"
    response = await client.get("/health")
    assert response.status_code == 503
    assert response.json() == {"status": "not ready", "missing": "warm-up has not ended"}


async def test_debug_state(client, engine):
    assert (await client.get("/debug/state")).json() == engine.state()


async def metrics_of(client: httpx.AsyncClient) -> dict[str, float]:
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = [line for line in response.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


async def test_metrics(client):
    for body in ({"prompt": "abc"}, {"prompt": "a", "stream": True}, {"prompt": ""}):
        await client.post("/v1/completions", json=body)
    found = await metrics_of(client)
    at = 'jaxdisagg_requests_total{endpoint="/v1/completions",outcome='
    assert found[at + '"ok"}'] == 2
    assert found[at + '"rejected"}'] == 1
    assert found['jaxdisagg_answers_total{reason="length"}'] == 2
    assert found["jaxdisagg_prompt_tokens_total"] == 4
    assert found["jaxdisagg_generated_tokens_total"] == 4
    assert found["jaxdisagg_itl_seconds_count"] == 2
    total = found['jaxdisagg_ttft_seconds_sum{term="total"}']
    terms = ("queue", "prefill", "exposed_transfer", "first_decode")
    parts = [found[f'jaxdisagg_ttft_seconds_sum{{term="{term}"}}'] for term in terms]
    assert sum(parts) == pytest.approx(total)
    assert found['jaxdisagg_engine_state{name="pages.free"}'] == 7


async def test_two_apps_in_one_process_count_apart(client, make_engine, tiny_tokenizer):
    await client.post("/v1/completions", json={"prompt": "abc"})
    transport = httpx.ASGITransport(create_app(make_engine(), tiny_tokenizer))
    async with httpx.AsyncClient(transport=transport, base_url="http://other") as other:
        assert (await metrics_of(other))["jaxdisagg_prompt_tokens_total"] == 0


def test_flatten_names_numbers_by_their_path():
    document = {"a": {"b": {"c": 1}, "d": 2.5}, "e": True, "f": "x", "g": [1], "h": None}
    assert dict(flatten(document)) == {"a.b.c": 1.0, "a.d": 2.5, "e": 1.0}


def test_a_port_in_use_is_named():
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ValueError, match=f"cannot listen on 127.0.0.1 port {port}: it is in use"
        ):
            bind("127.0.0.1", port)


def test_a_host_that_is_not_ours_is_named():
    with pytest.raises(ValueError, match=r"cannot listen on 192\.0\.2\.1 port 0: "):
        bind("192.0.2.1", 0)


async def test_served_over_a_socket(node, serve):
    async with serve(node.app) as url, httpx.AsyncClient(base_url=url) as client:
        response = await client.post("/v1/completions", json={"prompt": "x"})
        assert response.json()["choices"][0]["text"] == "hi"
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{url}/health")


async def test_a_status_app_shows_a_node_without_an_api(serve):
    ready = [(False, "warm-up has not ended")]
    app = create_status_app(lambda: {"pages": {"free": 3}}, lambda: ready[0])
    async with serve(app) as url, httpx.AsyncClient(base_url=url) as client:
        response = await client.get("/health")
        assert (response.status_code, response.json()["missing"]) == (503, "warm-up has not ended")
        ready[0] = (True, "")
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/debug/state")).json() == {"pages": {"free": 3}}
        assert (
            'jaxdisagg_engine_state{name="pages.free"} 3.0' in (await client.get("/metrics")).text
        )
        assert (await client.post("/v1/completions", json={})).status_code == 404
