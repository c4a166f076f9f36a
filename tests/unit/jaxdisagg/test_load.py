"""The load client and its report."""

import asyncio
import json
from dataclasses import replace

import httpx
import pytest
import typer
from repository import load_script
from typer.testing import CliRunner

from jaxdisagg.api import RequestError
from jaxdisagg.bench.client import Load, Record, Segment, run_segment
from jaxdisagg.bench.load_report import add_ratios, percentile, row_of
from jaxdisagg.server import create_app


@pytest.fixture
def app(engine, tiny_tokenizer):
    engine.script = [97] * 64
    return create_app(engine, tiny_tokenizer)


LOAD = Load(requests=5, rate=0, prompt_tokens=8, output_tokens=4, vocab_size=200)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"requests": -1}, "requests=-1 must not be negative"),
        ({"output_tokens": 0}, "output_tokens=0 must be positive"),
        ({"requests": 0}, "nothing to do"),
    ],
)
def test_an_impossible_load_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(LOAD, **changes)


def test_start_times_are_bounded_in_count_and_time():
    fixed = Load(requests=5, duration_s=100.0, rate=2.0, arrivals="fixed")
    assert fixed.start_times() == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert replace(fixed, duration_s=1.2).start_times() == [0.0, 0.5, 1.0]
    assert replace(fixed, rate=0.0).start_times() == [0.0] * 5
    poisson = Load(requests=4000, duration_s=1e9, rate=2.0)
    times = poisson.start_times()
    assert times == sorted(times)
    assert len(times) == 4000
    assert times[-1] == pytest.approx(2000, rel=0.1)
    assert times == poisson.start_times()
    assert times != replace(poisson, seed=1).start_times()


def test_prompts_differ_but_repeat_with_the_seed():
    prompts = [LOAD.prompt(kind, n, 8) for kind in ("request", "stream") for n in range(3)]
    assert len({tuple(prompt) for prompt in prompts}) == 6
    assert prompts[0] == LOAD.prompt("request", 0, 8)
    assert all(0 <= token < 200 and len(prompt) == 8 for prompt in prompts for token in prompt)


async def test_a_segment_records_every_token(serve, app, engine):
    done = []
    async with serve(app) as url, httpx.AsyncClient(base_url=url) as client:
        segment = await run_segment(client, LOAD, lambda: done.append(1))
    assert len(done) == len(segment.requests) == 5
    for record in segment.requests:
        assert record.error is None
        assert (record.tokens, len(record.arrivals), len(record.gaps)) == (4, 4, 3)
        assert record.arrivals == sorted(record.arrivals)
        assert record.timing["prefill_node"] == "p0"
    assert {len(request.prompt) for request in engine.requests} == {8}
    assert {request.stop_token_ids for request in engine.requests} == {()}


async def test_streams_run_beside_the_requests(serve, app, engine):
    load = replace(LOAD, duration_s=0.3, streams=2, stream_prompt_tokens=3, stream_output_tokens=6)
    async with serve(app) as url, httpx.AsyncClient(base_url=url) as client:
        segment = await run_segment(client, load)
    assert len(segment.streams) >= 2
    assert {record.tokens for record in segment.streams} == {6}
    assert len(segment.requests) == 5
    assert segment.seconds >= 0.3


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([RequestError(503, "no page")], "503: no page"),
        ([97, RequestError(503, "peer lost")], "peer lost"),
        ([97, 97], "the stream ended after 2 tokens"),
    ],
)
async def test_failures_are_recorded(serve, app, engine, script, message):
    engine.script = script
    async with serve(app) as url, httpx.AsyncClient(base_url=url) as client:
        segment = await run_segment(client, replace(LOAD, requests=1))
    assert segment.requests[0].error == message


async def test_a_request_that_does_not_end_is_given_up_and_cancelled(serve, app, engine):
    engine.gate = True
    async with serve(app) as url, httpx.AsyncClient(base_url=url) as client:
        segment = await run_segment(client, replace(LOAD, requests=1, timeout_s=1.5))
        await engine.until(lambda: engine.cancelled)
    assert segment.requests[0].error == "no end within 1.5 s"


async def test_a_server_that_is_not_there_is_recorded():
    async with httpx.AsyncClient(base_url="http://127.0.0.1:1") as client:
        segment = await run_segment(client, replace(LOAD, requests=1))
    assert "connect" in segment.requests[0].error.lower()


def test_percentile_is_the_nearest_rank():
    values = [float(v) for v in range(100, 0, -1)]
    assert [percentile(values, p) for p in (50, 99, 100)] == [50.0, 99.0, 100.0]
    assert percentile([3.0], 50) == 3.0
    assert percentile([], 50) is None


TIMING = {"queue": 0.01, "prefill": 0.02, "exposed_transfer": 0.03, "first_decode": 0.04}


def test_a_row_says_what_was_measured():
    requests = [
        Record(0.0, [0.1, 0.2, 0.4], 3, TIMING),
        Record(0.0, [0.3, 0.4, 0.5], 3),
        Record(0.0, [0.1], error="gone"),
    ]
    # One stream with a usual gap of 10 ms and one stall of 70 ms.
    stream = Record(0.0, [0.01, 0.02, 0.03, 0.04, 0.11], 5)
    row = row_of([Segment(requests, [stream], 2.0)], lanes=1)
    assert (row["requests"], row["failed"], row["first_error"]) == (3, 1, "gone")
    assert (row["ttft_p50_ms"], row["ttft_max_ms"]) == (100.0, 300.0)
    assert (row["itl_p50_ms"], row["itl_max_ms"]) == (100.0, 200.0)
    assert row["stream_itl_max_ms"] == 70.0
    assert row["stall_ms_per_request"] == 20.0
    assert row["tokens_per_s"] == 6.0
    assert (row["queue_p50_ms"], row["first_decode_p50_ms"]) == (10.0, 40.0)
    other = row | {"itl_p50_ms": 50.0}
    add_ratios([row, other])
    assert other["ratios"]["itl_p50_ms"] == 0.5
    assert set(row["ratios"].values()) == {1.0}


def command() -> typer.Typer:
    app = typer.Typer()
    app.command()(load_script("bench_serving").main)
    return app


async def test_the_script_compares_targets_and_writes_json(serve, app, tmp_path):
    path = tmp_path / "rows.json"
    async with serve(app) as url:
        words = ["--target", f"a={url}", "--target", f"b={url}", "--requests", "3", "--rate", "0"]
        words += ["--prompt-tokens", "8", "--output-tokens", "4", "--json", str(path)]
        result = await asyncio.to_thread(CliRunner().invoke, command(), words)
    assert result.exit_code == 0, result.output
    document = json.loads(path.read_text())
    assert document["environment"]["load"]["prompt_tokens"] == 8
    assert [row["target"] for row in document["rows"]] == ["a", "b"]
    assert [(row["requests"], row["failed"], row["model"]) for row in document["rows"]] == [
        (6, 0, "tiny"),
        (6, 0, "tiny"),
    ]
    assert "TTFT" in result.output


@pytest.mark.parametrize("behind", ["node", "router"])
async def test_drafts_of_a_load_are_told_from_those_before_it(
    serve, engine, tiny_tokenizer, behind, tmp_path
):
    counts = iter([{"proposed": 10, "accepted": 9}, {"proposed": 50, "accepted": 19}])

    def state():
        node = {"node": "n", "drafts": next(counts), "peers": []}
        return node if behind == "node" else {"router": {"up": 1}, "nodes": {"n": node, "p": {}}}

    engine.state, engine.script = state, [97] * 4
    path = tmp_path / "rows.json"
    async with serve(create_app(engine, tiny_tokenizer)) as url:
        words = ["--target", url, "--requests", "2", "--rate", "0", "--prompt-tokens", "8"]
        words += ["--output-tokens", "4", "--rounds", "1", "--json", str(path)]
        result = await asyncio.to_thread(CliRunner().invoke, command(), words)
    assert result.exit_code == 0, result.output
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["drafts_proposed"], row["drafts_accepted"]) == (40, 10)
    assert row["drafts_accepted_share"] == 0.25
    assert "drafts right" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", "a=ftp://x"], "must be NAME=http"),
        (["--target", "a=http://127.0.0.1:1"], "does not serve"),
        (["--target", "a=http://x", "--target", "a=http://y"], "two targets have one name"),
        (["--target", "a=http://x", "--output-tokens", "0"], "output_tokens=0 must be positive"),
    ],
)
def test_the_scripts_bad_input(words, message):
    result = CliRunner().invoke(command(), words)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output
