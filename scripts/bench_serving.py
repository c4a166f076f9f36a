"""Load running servers of the OpenAI API and compare them: TTFT, ITL, tokens per second.

    bench_serving.py --target disagg=http://127.0.0.1:8000 --target mixed=http://127.0.0.1:8001

Every target gets the same load in every round; the order of the targets turns from round to round.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jaxdisagg.bench.client import Load, Segment, complete, run_segment
from jaxdisagg.bench.load_report import add_ratios, row_of
from jaxdisagg.bench.report import environment, write_json
from jaxdisagg.metrics import flatten

console = Console()

# Column titles, and the keys of the numbers that each shows.
COLUMNS = {
    "done": ("requests",),
    "TTFT p50/p99/max": ("ttft_p50_ms", "ttft_p99_ms", "ttft_max_ms"),
    "ITL p50/p99/max": ("itl_p50_ms", "itl_p99_ms", "itl_max_ms"),
    "tok/s": ("tokens_per_s",),
}
STREAM_COLUMNS = {
    "streams' ITL": ("stream_itl_p50_ms", "stream_itl_p99_ms", "stream_itl_max_ms"),
    "stall": ("stall_ms_per_request",),
}
DRAFT_COLUMNS = {"drafts right": ("drafts_accepted_share",)}
WARM_UP_REQUESTS = 2


class Arrivals(StrEnum):
    """How the starts of requests are spaced."""

    poisson = "poisson"
    fixed = "fixed"


def parse_target(text: str) -> tuple[str, str]:
    """NAME=URL or URL; raises ValueError."""
    name, found, url = text.partition("=")
    if not found or "://" in name:
        name, url = text, text
    if not name or not url.startswith(("http://", "https://")):
        raise ValueError(f"target {text!r} must be NAME=http://HOST:PORT")
    return name, url.rstrip("/")


async def check(client: httpx.AsyncClient, name: str) -> str:
    """The model that a target serves; raises ValueError if it does not serve."""
    try:
        response = await client.get("/v1/models")
        return response.raise_for_status().json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise ValueError(f"target {name} at {client.base_url} does not serve: {error}") from error


async def drafts_of(client: httpx.AsyncClient) -> Counter[str]:
    """Drafts `proposed` and `accepted` so far, of a node or of all nodes behind a router.

    Zero where nothing is drafted, and where the server does not tell.
    """
    try:
        state = (await client.get("/debug/state")).raise_for_status().json()
        numbers = dict(flatten(state))
    except (httpx.HTTPError, ValueError, AttributeError):
        return Counter()
    found = Counter[str]()
    for path, value in numbers.items():
        *_, group, name = ["", *path.split(".")]
        if group == "drafts":
            found[name] += int(value)
    return found


async def bench(
    targets: dict[str, str], load: Load, rounds: int, on_done: Callable[[str], None]
) -> list[dict[str, Any]]:
    """One row for each target. `on_done` is called with its name after each request."""
    clients = {
        name: httpx.AsyncClient(
            base_url=url,
            timeout=load.timeout_s,
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )
        for name, url in targets.items()
    }
    segments: dict[str, list[Segment]] = {name: [] for name in targets}
    try:
        models = {name: await check(client, name) for name, client in clients.items()}
        for name, client in clients.items():
            for number in range(WARM_UP_REQUESTS):
                prompt = load.prompt("warm-up", number, load.prompt_tokens)
                record = await complete(client, prompt, load.output_tokens, load.timeout_s)
                if record.error is not None:
                    raise ValueError(f"target {name} failed while warming up: {record.error}")
        before = {name: await drafts_of(client) for name, client in clients.items()}
        names = list(targets)
        for number in range(rounds):
            this = replace(load, seed=load.seed + number)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                done = partial(on_done, name)
                segments[name].append(await run_segment(clients[name], this, done))
        drafts = {name: await drafts_of(c) - before[name] for name, c in clients.items()}
    finally:
        for client in clients.values():
            await client.aclose()
    rows = [
        {"target": name, "model": models[name], "rounds": rounds}
        | row_of(segments[name], load.streams)
        | accepted_of(drafts[name])
        for name in targets
    ]
    add_ratios(rows)
    return rows


def accepted_of(drafts: Counter[str]) -> dict[str, Any]:
    """The part of a row about drafts; empty without any."""
    if not drafts["proposed"]:
        return {}
    share = round(drafts["accepted"] / drafts["proposed"], 4)
    return {
        "drafts_proposed": drafts["proposed"],
        "drafts_accepted": drafts["accepted"],
        "drafts_accepted_share": share,
    }


def table_of(rows: list[dict[str, Any]], with_streams: bool) -> Table:
    """The rows as a table, below each but the first its ratios to the first."""
    columns = COLUMNS | (STREAM_COLUMNS if with_streams else {})
    if any("drafts_accepted_share" in row for row in rows):
        columns |= DRAFT_COLUMNS
    table = Table("target", title="times in ms")
    for title in columns:
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            row["target"],
            *(
                _cell(row, keys, "{:.3g}" if keys in DRAFT_COLUMNS.values() else "{:.1f}")
                for keys in columns.values()
            ),
        )
        if row is not rows[0]:
            cells = (_cell(row["ratios"], keys, "x{:.2f}") for keys in columns.values())
            table.add_row(f"  to {rows[0]['target']}", *cells, style="dim")
    return table


def _cell(row: dict[str, Any], keys: tuple[str, ...], form: str) -> str:
    values = [row.get(key) for key in keys]
    if all(value is None for value in values):
        return ""
    return "/".join(_number(value, form) for value in values)


def _number(value: float | None, form: str) -> str:
    if value is None:
        return "-"
    whole = isinstance(value, int) or (value >= 100 and "x" not in form)
    return f"{value:.0f}" if whole else form.format(value)


def main(
    target: Annotated[list[str], typer.Option(help="NAME=URL of a server; repeatable.")],
    requests: Annotated[int, typer.Option(help="Requests per target and round.")] = 32,
    duration: Annotated[float, typer.Option(help="Seconds in which requests start.")] = 30.0,
    rate: Annotated[float, typer.Option(help="Requests per second; 0: all at once.")] = 1.0,
    arrivals: Arrivals = Arrivals.poisson,
    concurrency: Annotated[int, typer.Option(help="Most requests at the same time.")] = 64,
    prompt_tokens: int = 256,
    output_tokens: int = 64,
    streams: Annotated[int, typer.Option(help="Answers that decode all the time beside.")] = 0,
    stream_prompt_tokens: int = 16,
    stream_output_tokens: int = 256,
    vocab_size: Annotated[int, typer.Option(help="Prompts hold token ids below this.")] = 256,
    rounds: Annotated[int, typer.Option(help="Times that every target gets the load.")] = 2,
    seed: int = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that one request may take.")] = 120.0,
    json: Annotated[Path | None, typer.Option(help="Write environment and rows here.")] = None,
) -> None:
    """Load servers in turn with the same requests and compare them."""
    try:
        targets = dict(map(parse_target, target))
        if len(targets) != len(target):
            raise ValueError("two targets have one name")
        if rounds < 1:
            raise ValueError(f"rounds={rounds} must be at least 1")
        load = Load(
            requests=requests,
            duration_s=duration,
            rate=rate,
            arrivals=arrivals.value,
            concurrency=concurrency,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            streams=streams,
            stream_prompt_tokens=stream_prompt_tokens,
            stream_output_tokens=stream_output_tokens,
            vocab_size=vocab_size,
            seed=seed,
            timeout_s=timeout,
        )
        total = sum(len(replace(load, seed=seed + n).start_times()) for n in range(rounds))
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        ) as progress:
            tasks = {name: progress.add_task(name, total=total) for name in targets}
            rows = asyncio.run(
                bench(targets, load, rounds, lambda name: progress.advance(tasks[name]))
            )
    except ValueError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(2) from None
    console.print(table_of(rows, streams > 0))
    for row in rows:
        if row["failed"]:
            text = f"{row['target']}: {row['failed']} failed, the first with: {row['first_error']}"
            console.print(text, style="red", markup=False, highlight=False)
    if json is not None:
        write_json(json, environment(load=asdict(load)), rows)
    if any(row["failed"] for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
