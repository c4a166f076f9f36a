"""Serve a model disaggregated, ask it a question, account for the answer, compare with one process.

Everything runs on this machine: one prefill node and one decode node as processes of their own on
CPU meshes, or where jax finds GPUs on those, connected by libfabric's best provider.
"""

import json
import logging
import os
import statistics
import time
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any, NoReturn

import httpx
import typer
from made_models import MADE, default_nodes, made, model_folder
from rich.console import Console
from rich.table import Table
from serve import default_cpus

from jaxdisagg.config import BatchConfig, NodeConfig, ServeConfig
from jaxdisagg.config_text import parse_node
from jaxdisagg.deployment import Deployment
from jaxdisagg.gpu_setup import visible_gpus
from jaxdisagg.start_progress import print_error, start_or_exit

console = Console()
QUESTION = "What is the capital of France?"
ANSWER_SECONDS = 120.0
ONE_AT_A_TIME = BatchConfig(chunks=(64,), decode_rows=(2,))  # fewer steps to compile


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
            fail(json.loads(response.read())["error"]["message"])
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
                    text = printable(choice["delta"].get("content") or "")
                    console.print(text, end="", highlight=False, markup=False)
                for entry in (choice.get("logprobs") or {}).get("content") or ():
                    tokens.append(entry["token"])
                    logprobs.append(entry["logprob"])
                    times.append(time.perf_counter())
                timing = choice.get("timing") or timing
    return Answer(model, tuple(tokens), tuple(logprobs), tuple(times), timing)


def printable(text: str) -> str:
    """Text without the control characters that a random model writes, which a terminal obeys."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def copy_rule(model: Path, decode: NodeConfig, timing: dict[str, Any]) -> list[tuple[str, str]]:
    """Why it is that many page-writes: two rows of the account, or none where it is not so simple.

    Of a latent cache every rank gets a copy of each page, of a grouped-query cache its heads' part.
    The number is another one where a page is too long for one write.
    """
    from models.registry import load_config  # jax takes a second, which `--help` need not wait for

    family, config = load_config(model)
    spec = family.cache_spec(replace(config, mtp=decode.mtp))
    pages, tp = timing["pages"], decode.mesh.tp
    if tp * (pages * spec.num_layers + 1) != timing["page_writes"]:
        return []
    ranks = f"{tp} tp rank{'s' * (tp > 1)}"
    return [
        ("  which is", f"{ranks} x ({pages} pages x {spec.num_layers} layers + 1 context)"),
        ("  a rank gets", f"{'a copy' if spec.kind == 'mla' else 'its heads'} of every page"),
    ]


def account(
    answer: Answer,
    decode: dict[str, Any],
    prefill: dict[str, Any],
    rule: list[tuple[str, str]],
) -> Table:
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
        *rule,
        ("bytes", f"{t['bytes']:,}"),
        ("TTFT", f"{t['ttft'] * 1e3:.1f} ms, which is the sum of"),
        ("  queue", f"{t['queue'] * 1e3:.1f} ms"),
        ("  prefill", f"{t['prefill'] * 1e3:.1f} ms"),
        ("  exposed transfer", f"{t['exposed_transfer'] * 1e3:.1f} ms"),
        ("  first decode step", f"{t['first_decode'] * 1e3:.1f} ms"),
        ("ITL", itl),
    ):
        table.add_row(name, value)
    if drafts := decode.get("drafts"):
        table.add_row("drafts", f"{drafts['proposed']} proposed, {drafts['accepted']} accepted")
    return table


def compare(answer: Answer, whole: Answer, node: str, dtype: str) -> None:
    """Say how far the answer equals that of the one-process `node`; in float32 it must, wholly."""
    pairs = zip(answer.tokens, whole.tokens, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    both = zip(answer.logprobs[:same], whole.logprobs, strict=False)
    gap = max((abs(a - b) for a, b in both), default=0.0)
    how = f"{node}; logprobs within {gap:.1e}" if same else node
    if answer.tokens == whole.tokens:
        console.print(
            f"[green]the {same} tokens equal those of the one-process node[/green] ({how})"
        )
    elif dtype == "float32":
        fail(f"the tokens differ: {answer.tokens} apart, {whole.tokens} in one process")
    else:
        console.print(
            f"the first {same} of {len(answer.tokens)} tokens equal those of the one-process node "
            f"({how}): in {dtype} two programs round differently, and "
            "near ties fall either way; float32 compares exactly"
        )


def state_of(deployment: Deployment, role: str) -> dict[str, Any]:
    """/debug/state of the first node of a role."""
    node = next(n for n in deployment.nodes if n.config.role == role)
    return httpx.get(f"{node.url}/debug/state", timeout=10.0).json()


def make_configs(
    model: Path, prefill: str | None, decode: str | None, tp: int | None, dtype: str, mtp: bool
) -> tuple[ServeConfig, ServeConfig]:
    """The deployment with two nodes, and the one with a node that does both and drafts nothing.

    Raises ValueError naming a bad option and OSError if a made model cannot be written.
    """
    if tp is not None:
        if prefill is not None or decode is not None:
            raise ValueError("--tp is short for both nodes: use it without --prefill and --decode")
        prefill = decode = f"tp={tp}"
    defaults = default_nodes(model, visible_gpus())
    base = NodeConfig(role="mixed", model=model_folder(model), dtype=dtype, batch=ONE_AT_A_TIME)
    nodes = []
    for role, text, default, cpus in (
        ("prefill", prefill, defaults[0], default_cpus(2)[0]),
        ("decode", decode, defaults[1], default_cpus(2)[1]),
    ):
        text = default if text is None else text
        text = text if "cpus=" in text else f"{text},{cpus}"
        nodes.append(parse_node(text, replace(base, role=role, id=f"{role}-0", mtp=mtp)))
    whole = replace(base, id="mixed-0")
    return ServeConfig(nodes=tuple(nodes), port=0), ServeConfig(nodes=(whole,), port=0)


def main(
    model: Annotated[
        Path, typer.Option(help=f"model folder in Hugging Face form, or {', '.join(MADE)}")
    ],
    question: str = QUESTION,
    max_tokens: int = 32,
    prefill: Annotated[str | None, typer.Option(help="the prefill node: tp=2,cpus=0")] = None,
    decode: Annotated[str | None, typer.Option(help="the decode node: tp=1,cpus=1")] = None,
    tp: Annotated[int | None, typer.Option(help="short for tp=N on both")] = None,
    mtp: Annotated[bool, typer.Option("--mtp", help="draft tokens with the MTP module")] = False,
    dtype: str = "float32",
) -> None:
    """Prefill on one node, decode on another, and compare with a node that does both."""
    logging.basicConfig(level=os.environ.get("JAXDISAGG_LOG", "WARNING"))
    try:
        split, whole = make_configs(model, prefill, decode, tp, dtype, mtp)
    except (ValueError, OSError) as error:
        print_error(console, str(error))
        raise typer.Exit(2) from None
    p, d = split.nodes
    console.rule(f"prefill (tp {p.mesh.tp}) and decode (tp {d.mesh.tp}) apart")
    with start_or_exit(split, console) as deployment:
        console.print(question, style="bold", highlight=False, markup=False)
        answer = ask(deployment.url, question, max_tokens, show=True)
        console.print()
        decoded, prefilled = state_of(deployment, "decode"), state_of(deployment, "prefill")
    if made(model) is not None:
        noise = "noise, and a draft a guess" if mtp else "noise"
        console.print(f"random weights: the text is {noise}; what counts is that both agree")
    rule = copy_rule(d.model, d, answer.timing)
    console.print(account(answer, decoded, prefilled, rule))
    console.rule("prefill and decode in one process")
    with start_or_exit(whole, console) as deployment:
        mixed = ask(deployment.url, question, max_tokens, show=False)
    compare(answer, mixed, "tp 1, without drafts" if mtp else "tp 1", dtype)
    if (
        decoded["compiles_after_warm_up"]
        or prefilled["page_writes"] != answer.timing["page_writes"]
    ):
        fail("page-writes pushed and counted differ, or a step was compiled after warm-up")


if __name__ == "__main__":
    typer.run(main)
