"""Serve a model with prefill and decode apart (or `--mixed`), until Ctrl-C."""

import logging
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from made_models import MADE, default_nodes, model_folder
from rich.console import Console

from jaxdisagg.config import DEFAULT_PORT, BatchConfig, NodeConfig, ServeConfig
from jaxdisagg.config_text import parse_node, parse_numbers, serve_from_toml
from jaxdisagg.deployment import Deployment
from jaxdisagg.gpu_setup import visible_gpus
from jaxdisagg.start_progress import print_error, start_or_exit

console = Console(stderr=True)


def default_cpus(nodes: int) -> list[str]:
    """A share of the allowed CPUs for each node, or none when there are fewer CPUs than nodes."""
    allowed = sorted(os.sched_getaffinity(0))
    share = len(allowed) // nodes
    if not share:
        return [""] * nodes
    return [
        "cpus=" + "+".join(map(str, allowed[i * share : (i + 1) * share])) for i in range(nodes)
    ]


def make_config(
    base: NodeConfig, prefill: list[str], decode: list[str], mixed: list[str], port: int
) -> ServeConfig:
    """The deployment that the options describe. Raises ValueError naming what is wrong."""
    nodes = [
        parse_node(text, replace(base, role=role, id=f"{role}-{i}"))
        for role, texts in (("prefill", prefill), ("decode", decode), ("mixed", mixed))
        for i, text in enumerate(texts)
    ]
    return ServeConfig(nodes=tuple(nodes), host=base.host, port=port)


def main(
    model: Annotated[
        Path, typer.Option(help=f"model folder in Hugging Face form, or {', '.join(MADE)}")
    ],
    prefill: Annotated[list[str], typer.Option(help="a prefill node: tp=1,cpus=0,nics=eth0")] = [],  # noqa: B006
    decode: Annotated[list[str], typer.Option(help="a decode node: tp=1,cpus=1")] = [],  # noqa: B006
    mixed: Annotated[list[str], typer.Option(help="a node that does both: tp=1")] = [],  # noqa: B006
    config: Annotated[Path | None, typer.Option(help="a TOML file with the nodes instead")] = None,
    host: Annotated[str | None, typer.Option(help="127.0.0.1 if not said")] = None,
    port: Annotated[int | None, typer.Option(help="8000 if not said; 0: a free one")] = None,
    dtype: str = "float32",
    page_size: int = 16,
    pages: Annotated[int, typer.Option(help="cache pages of each dp rank")] = 513,
    max_model_len: Annotated[int, typer.Option(help="0: the model's, at most 2048")] = 0,
    chunks: Annotated[str, typer.Option(help="token buckets of a prefill step")] = "64,256",
    batch: Annotated[str, typer.Option(help="row buckets of a decode step")] = "2,8",
    mtp: Annotated[bool, typer.Option(help="load the model's MTP module to draft tokens")] = False,
    provider: Annotated[str, typer.Option(help="libfabric provider")] = "auto",
    rules: Annotated[Path | None, typer.Option(help="sharding rules, TOML")] = None,
    log_level: str = "WARNING",
) -> None:
    """Serve a model over the OpenAI API; without node options, one prefill and one decode node."""
    try:
        if log_level not in logging.getLevelNamesMapping():
            known = ", ".join(logging.getLevelNamesMapping())
            raise ValueError(f"log-level={log_level!r} must be one of {known}")
        os.environ["JAXDISAGG_LOG"] = log_level
        logging.basicConfig(level=log_level)
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log every heartbeat
        base = NodeConfig(
            role="mixed",
            model=model_folder(model),
            dtype=dtype,
            batch=BatchConfig(
                chunks=parse_numbers(chunks, "chunks"),
                decode_rows=parse_numbers(batch, "batch"),
                max_model_len=max_model_len,
            ),
            host=host or "127.0.0.1",
            provider=provider,
            rules=rules,
            mtp=mtp,
        )
        if config is not None and (prefill or decode or mixed):
            raise ValueError("--config describes the nodes: use it without --prefill, ...")
        if not (prefill or decode or mixed):
            defaults = zip(default_nodes(model, visible_gpus()), default_cpus(2), strict=True)
            prefill, decode = ([f"{node},{cpus}"] for node, cpus in defaults)
        base = replace(base, cache=replace(base.cache, page_size=page_size, pages=pages))
        serve = (
            serve_from_toml(config, base, host, port)
            if config is not None
            else make_config(base, prefill, decode, mixed, DEFAULT_PORT if port is None else port)
        )
    except (ValueError, OSError) as error:
        print_error(console, str(error))
        raise typer.Exit(2) from None
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    try:
        deployment = start_or_exit(serve, console)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    _serve(deployment)


def _serve(deployment: Deployment) -> None:
    console.print(f"serving at [bold]{deployment.url}/v1[/bold]; Ctrl-C ends it", highlight=False)
    reported: set[str] = set()
    try:
        while True:
            time.sleep(0.5)
            for node in deployment.ended():
                if node.config.id not in reported:
                    reported.add(node.config.id)
                    console.print(
                        f"[red]{node.config.id} ended with code {node.process.returncode}[/red]"
                    )
            serving = [n for n in deployment.nodes if n.config.role != "prefill"]
            if all(n.config.id in reported for n in serving):
                console.print("[red]no node is left that can answer[/red]")
                raise typer.Exit(1)
    except KeyboardInterrupt:
        console.print("stopping")
    finally:
        deployment.stop()


if __name__ == "__main__":
    typer.run(main)
