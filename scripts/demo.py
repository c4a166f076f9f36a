"""Serve a model disaggregated, ask it a question, account for the answer, compare with one process.

Everything runs on this machine: one prefill node and one decode node as processes of their own on
CPU meshes, connected by libfabric's best software provider.
"""

import json
import logging
import os
import statistics
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NoReturn

import httpx
import typer
from rich.console import Console
from rich.table import Table
from serve import default_cpus

from jaxdisagg.config import NodeConfig, ServeConfig, parse_node
from jaxdisagg.deployment import Deployment
from jaxdisagg.start_progress import print_error, start_or_exit

console = Console()
QUESTION = "What is the capital of France?"
ANSWER_SECONDS = 120.0


@dataclass(frozen=True)
class Answer:
    """A streamed chat answer: its tokens' texts, logprobs and arrivals (s), and its timing."""

    model: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    times: tuple[float, ...]
    timing: dict[str, Any]


def fail(why: str) -> NoReturn:
    """End the demo with a message."""
    print_error(console, why)
    raise typer.Exit(1)


def ask(url: str, question: str, max_tokens: int, *, show: bool) -> Answer:
    """Stream the greedy answer to a question; `show` prints it as it comes."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": True,
        "stream": True,
    }
    tokens: list[str] = []
    logprobs: list[float] = []
    times: list[float] = []
    timing: dict[str, Any] = {}
    model = ""
    with (
        httpx.Client(timeout=ANSWER_SECONDS) as client,
        client.stream(
            "POST", f"{url}/v1/chat/completions", json=body, headers={"x-jaxdisagg-timing": "1"}
        ) as response,
    ):
        if response.status_code != 200:
            fail(response.read().decode())
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if not line or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                fail(event["error"]["message"])
            model = event["model"]
            for choice in event["choices"]:
                if show:
                    console.print(
                        choice["delta"].get("content") or "", end="", highlight=False, markup=False
                    )
                for entry in (choice.get("logprobs") or {}).get("content") or ():
                    tokens.append(entry["token"])
                    logprobs.append(entry["logprob"])
                    times.append(time.perf_counter())
                timing = choice.get("timing") or timing
    return Answer(model, tuple(tokens), tuple(logprobs), tuple(times), timing)


def account(answer: Answer, decode: dict[str, Any], prefill: dict[str, Any]) -> Table:
    """What happened to the request, as counted by both sides."""
    t = answer.timing
    gaps = [b - a for a, b in pairwise(answer.times)]
    itl = (
        f"{statistics.median(gaps) * 1e3:.1f} ms median, {max(gaps) * 1e3:.1f} ms at most"
        if gaps
        else "only one token came"
    )
    table = Table(title="the request's account", show_header=False)
    for name, value in (
        ("prefilled at", t["prefill_node"]),
        ("provider", decode["fabric"]["provider"]),
        ("pages", f"{t['pages']}"),
        ("page-writes pushed", f"{prefill['page_writes']} (acknowledged to the prefill node)"),
        ("page-writes counted", f"{t['page_writes']} (immediates seen by the decode node)"),
        ("bytes", f"{t['bytes']:,}"),
        ("TTFT", f"{t['ttft'] * 1e3:.1f} ms, which is the sum of"),
        ("  queue", f"{t['queue'] * 1e3:.1f} ms"),
        ("  prefill", f"{t['prefill'] * 1e3:.1f} ms"),
        ("  exposed transfer", f"{t['exposed_transfer'] * 1e3:.1f} ms"),
        ("  first decode step", f"{t['first_decode'] * 1e3:.1f} ms"),
        ("ITL", itl),
    ):
        table.add_row(name, value)
    return table


def state_of(deployment: Deployment, role: str) -> dict[str, Any]:
    """/debug/state of the first node of a role."""
    node = next(n for n in deployment.nodes if n.config.role == role)
    return httpx.get(f"{node.url}/debug/state", timeout=10.0).json()


def main(
    model: Annotated[Path, typer.Option(help="model folder in Hugging Face form")],
    question: str = QUESTION,
    max_tokens: int = 32,
    tp: Annotated[int, typer.Option(help="tensor parallelism of both nodes")] = 1,
    dtype: str = "float32",
) -> None:
    """Prefill on one node, decode on another, and compare with a node that does both."""
    logging.basicConfig(level=os.environ.get("JAXDISAGG_LOG", "WARNING"))
    try:
        base = NodeConfig(role="mixed", model=model, dtype=dtype)
        cpus = default_cpus(2)
        prefill = replace(base, role="prefill", id="prefill-0")
        decode = replace(base, role="decode", id="decode-0")
        split = ServeConfig(
            nodes=(
                parse_node(f"tp={tp},{cpus[0]}", prefill),
                parse_node(f"tp={tp},{cpus[1]}", decode),
            ),
            port=0,
        )
        whole = ServeConfig(nodes=(parse_node(f"tp={tp}", replace(base, id="mixed-0")),), port=0)
    except ValueError as error:
        print_error(console, str(error))
        raise typer.Exit(2) from None
    console.rule("prefill and decode apart")
    with start_or_exit(split, console) as deployment:
        console.print(question, style="bold", highlight=False, markup=False)
        answer = ask(deployment.url, question, max_tokens, show=True)
        console.print()
        decoded, prefilled = state_of(deployment, "decode"), state_of(deployment, "prefill")
    console.print(account(answer, decoded, prefilled))
    console.rule("prefill and decode in one process")
    with start_or_exit(whole, console) as deployment:
        mixed = ask(deployment.url, question, max_tokens, show=False)
    if mixed.tokens != answer.tokens:
        fail(f"the tokens differ: {answer.tokens} apart, {mixed.tokens} in one process")
    gap = max(abs(a - b) for a, b in zip(answer.logprobs, mixed.logprobs, strict=True))
    console.print(
        f"[green]the {len(answer.tokens)} tokens equal those of the one-process node[/green] "
        f"(logprobs within {gap:.1e})"
    )
    if (
        decoded["compiles_after_warm_up"]
        or prefilled["page_writes"] != answer.timing["page_writes"]
    ):
        fail("page-writes pushed and counted differ, or a step was compiled after warm-up")


if __name__ == "__main__":
    typer.run(main)
