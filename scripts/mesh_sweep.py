"""Pairs of meshes for a model: what a request moves between them, how long, what compute hides.

    mesh_sweep.py --config qwen3-coder-480b --prefill tp=8 --decode tp=8 --decode tp=4,dp=2
    mesh_sweep.py --config tiny-deepseek --run --prefill tp=2 --decode tp=1 --decode tp=2,dp=2

Counts are the transfer plan's own, times are estimates (docs/mesh-experiments.md). With --run every
pair is executed on CPU meshes, and bytes and page-writes must be the predicted ones.
"""

import logging
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from made_models import MADE, default_nodes, made, model_folder
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jaxdisagg.bench.report import check_json, environment, write_json
from jaxdisagg.config import CacheConfig, NodeConfig
from jaxdisagg.config_text import parse_numbers
from jaxdisagg.process_setup import set_host_devices
from jaxdisagg.start_progress import print_error
from jaxdisagg.sweep.plot import check_plot, write_plot
from jaxdisagg.sweep.tables import errors, fitting, mappings, tables

if TYPE_CHECKING:
    from jaxdisagg.sweep.predict import Load, Question, Side
    from jaxdisagg.sweep.shapes import ModelShapes

console = Console()
CONFIGS = Path(__file__).resolve().parent / "model_configs"
NAMES = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.json")))
ESTIMATED_TOKENS, RUN_TOKENS = (4096,), (40, 100)
Sides = list[tuple[str, "Side | str"]]


def sides(texts: list[str], base: NodeConfig, shapes: "ModelShapes") -> Sides:
    """Each mesh with its node, or why it cannot be."""
    from jaxdisagg.sweep.predict import fit_side

    found: Sides = []
    for text in dict.fromkeys(texts):
        try:
            found.append((text, fit_side(text, base, shapes)))
        except ValueError as error:
            found.append((text, str(error)))
    return found


def predicted(
    prefill: Sides, decode: Sides, tokens: tuple[int, ...], question: "Question"
) -> list[dict[str, Any]]:
    """A row for each pair and prompt length; of a pair that cannot be, one with its error."""
    from jaxdisagg.sweep.predict import predict

    rows: list[dict[str, Any]] = []
    for text, source in prefill:
        for other, destination in decode:
            pair = {"prefill": text, "decode": other}
            if isinstance(source, str) or isinstance(destination, str):
                wrong = {"prefill": source, "decode": destination}
                told = (f"{side}: {why}" for side, why in wrong.items() if isinstance(why, str))
                rows.append(pair | {"error": "; ".join(told)})
                continue
            try:
                rows += [predict(source, destination, length, question) for length in tokens]
            except ValueError as error:
                rows.append(pair | {"error": str(error)})
    return rows


def measure(rows: list[dict[str, Any]], prefill: Sides, decode: Sides, load: "Load") -> bool:
    """Run the pairs that have rows and put into these what was measured; whether all agreed."""
    from jaxdisagg.sweep.execute import agrees, devices_of, run_pairs, steps

    of_pair = {(row["prefill"], row["decode"], row["tokens"]): row for row in fitting(rows)}
    known = {key[:2] for key in of_pair}
    pairs = [
        (source, target)
        for _, source in prefill
        for _, target in decode
        if not isinstance(source, str) and not isinstance(target, str)
        if (source.text, target.text) in known
    ]
    set_host_devices(devices_of(pairs))
    good = True
    with Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        TimeElapsedColumn(), console=console, transient=True,
    ) as progress:  # fmt: skip
        task = progress.add_task("building nodes", total=steps(pairs, load))

        def advance(what: str) -> None:
            progress.update(task, advance=1, description=what)

        for source, target, length, found in run_pairs(pairs, load, advance):
            row = of_pair[source.text, target.text, length]
            row["run_error" if isinstance(found, str) else "measured"] = found
            good = good and not isinstance(found, str) and agrees(found)
    return good


def show(rows: list[dict[str, Any]], about: list[str]) -> None:
    """Everything for the terminal: the model and the assumptions, tables, errors."""
    for line in (*about, "", *mappings(rows)):
        console.print(line, highlight=False, markup=False)
    for table in tables(rows):
        console.print(table)
    for line in errors(rows):
        print_error(console, line)


def parse_nics(text: str) -> tuple[int, int]:
    """`4` for both sides or `4,1` for a prefill and a decode device. Raises ValueError."""
    numbers = parse_numbers(text, "nics-per-device")
    if len(numbers) > 2:
        raise ValueError(f"nics-per-device={text!r}: expected one number, or two: prefill,decode")
    return numbers[0], numbers[-1]


def main(
    config: Annotated[
        str,
        typer.Option(help=f"a config.json, a model folder, or {NAMES}, {', '.join(MADE)}"),
    ],
    prefill: Annotated[list[str], typer.Option(help="a prefill mesh: tp=8; repeatable")] = [],  # noqa: B006
    decode: Annotated[list[str], typer.Option(help="a decode mesh: tp=4,dp=2; repeatable")] = [],  # noqa: B006
    tokens: Annotated[list[int], typer.Option(help="prompt length; repeatable")] = [],  # noqa: B006
    dtype: Annotated[str | None, typer.Option(help="of the cache; else the config's")] = None,
    page_size: Annotated[int, typer.Option(help="where a mesh does not say page_size=")] = 16,
    mtp: Annotated[bool, typer.Option("--mtp", help="with the MTP module's cache layer")] = False,
    rules: Annotated[Path | None, typer.Option(help="sharding rules, TOML")] = None,
    nics_per_device: Annotated[str, typer.Option(help="4, or 4,1 for prefill,decode")] = "1",
    nic_gbps: Annotated[list[float], typer.Option(help="10^9 bits/s; repeatable")] = [400.0],  # noqa: B006
    tflops: Annotated[float, typer.Option(help="of a prefill device, dense, in the dtype")] = 989.0,
    mfu: Annotated[float, typer.Option(help="the part of it that is reached")] = 0.4,
    chunk: Annotated[int, typer.Option(help="tokens of a prefill step; 0: all at once")] = 0,
    seeds: Annotated[int, typer.Option(help="requests to average random choices over")] = 64,
    run: Annotated[bool, typer.Option("--run", help="execute the pairs on CPU meshes")] = False,
    requests: Annotated[int, typer.Option(help="with --run, per pair and length")] = 4,
    json: Annotated[Path | None, typer.Option(help="write environment and rows here")] = None,
    png: Annotated[Path | None, typer.Option(help="draw the rows; needs matplotlib")] = None,
) -> None:
    """Predict what each pair of meshes moves and how long it takes; with --run, count it too."""
    logging.basicConfig(level=os.environ.get("JAXDISAGG_LOG", "ERROR"))
    try:
        check_json(json)
        if png is not None:
            check_plot(png)
        defaults = default_nodes(Path(config))
        prefill, decode = prefill or [defaults[0]], decode or [defaults[1]]
        for name, meshes in (("prefill", prefill), ("decode", decode)):
            if meshes == [""]:
                raise ValueError(f"{name}: name at least one mesh, such as --{name} tp=2")
        lengths = tuple(dict.fromkeys(tokens)) or (RUN_TOKENS if run else ESTIMATED_TOKENS)
        nics = parse_nics(nics_per_device)
        # jax takes a second, which `--help` and a wrong option need not wait for.
        from jaxdisagg.sweep.compute import Device
        from jaxdisagg.sweep.predict import Load, Question, check_tokens
        from jaxdisagg.sweep.shapes import find_config, read_shapes
        from jaxdisagg.sweep.words import headline

        load = Load(lengths, requests)
        question = Question(Device(tflops, mfu), nics, tuple(nic_gbps), chunk, seeds)
        named = str(model_folder(Path(config))) if made(Path(config)) else config
        path = find_config(named, CONFIGS)
        if run and path.name != "config.json":
            raise ValueError(
                f"--run: {config} has no weights; name a model folder or {', '.join(MADE)}"
            )
        shapes = read_shapes(path, dtype=dtype, mtp=mtp)
        check_tokens(lengths, shapes)
        base = NodeConfig(
            role="mixed",
            model=path.parent,
            dtype=shapes.config.dtype,
            cache=CacheConfig(page_size=page_size),
            rules=rules,
        )
        sources = sides(prefill, replace(base, role="prefill"), shapes)
        targets = sides(decode, replace(base, role="decode"), shapes)
        rows = predicted(sources, targets, lengths, question)
        about = [
            headline(side.fit, shapes.name)
            for _, side in (*sources, *targets)
            if not isinstance(side, str)
        ][:1]
        about.append(question.assumptions())
        good = measure(rows, sources, targets, load) if run else True
    except (ValueError, OSError) as error:
        print_error(console, str(error))
        raise typer.Exit(2) from None
    show(rows, about)
    if json is not None:
        write_json(json, environment(model=shapes.name, **asdict(question)), rows)
    if png is not None:
        write_plot(png, shapes.name, rows)
    if not fitting(rows):
        raise typer.Exit(2)
    if not good:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
