"""Times of the jitted prefill and decode steps over meshes, batches and lengths.

Prefill steps are timed with and without the trigger, interleaved, and beside that stands what one
trigger call costs by itself: the difference of two programs that differ in nothing else. With --mtp
decode steps are timed without and with drafts, interleaved. Every row is of this machine in this
run; trust the ratios.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from jaxdisagg.bench.report import check_json, environment, write_json
from jaxdisagg.bench.timing import interleaved, median_ci
from jaxdisagg.config import BatchConfig, CacheConfig, NodeConfig
from jaxdisagg.config_text import parse_node, parse_numbers
from jaxdisagg.process_setup import set_host_devices
from jaxdisagg.scheduler import DecodeRow, DecodeScheduler, PrefillJob, PrefillScheduler
from jaxdisagg.start_progress import print_error

if TYPE_CHECKING:
    from jaxdisagg.runner import ModelRunner

console = Console()
CALLS_IN_CHAIN = 256


def prefill_run(runner: "ModelRunner", tokens: int, earlier: int) -> Callable[[], None]:
    """One full prefill step of `tokens` tokens per rank behind `earlier` cached ones."""
    node = runner.node
    pages = -(-(tokens + earlier) // node.cache.page_size)
    ids = np.arange(1, pages + 1, dtype=np.uint32)

    def run() -> None:
        scheduler = PrefillScheduler(runner.dp, (tokens,), node.batch.prefill_rows)
        for rank in range(runner.dp):
            prompt = np.ones(tokens + earlier + 1, np.int32)
            scheduler.add(
                PrefillJob(str(rank), rank, prompt, ids, tokens + earlier, scheduled=earlier)
            )
        step = scheduler.next_step()
        assert step is not None
        runner.prefill(step, {str(rank): 0 for rank in range(runner.dp)}).wait()

    return run


def decode_run(runner: "ModelRunner", rows: int, length: int) -> Callable[[], None]:
    """One decode step of `rows` rows per rank, each at cache length `length`, one more to come."""
    from jaxdisagg.runner import RowSampling

    pages = -(-(length + 1) // runner.node.cache.page_size)
    greedy = RowSampling(0.0, 0, 1.0, 0)

    def run() -> None:
        scheduler = DecodeScheduler(runner.dp, (rows,))
        for rank in range(runner.dp):
            for i in range(rows):
                ids = np.arange(1 + i * pages, 1 + (i + 1) * pages, dtype=np.uint32)
                scheduler.add(
                    DecodeRow(f"{rank}-{i}", rank, ids, 1 + i, length - 1, length, context=0)
                )
        step = scheduler.next_step()
        assert step is not None
        runner.decode(step, lambda _: greedy).tokens()

    return run


def trigger_call_ns(runner: "ModelRunner", trigger: Any, repeats: int) -> float:
    """Nanoseconds that one trigger call adds to a program, all devices of the mesh firing."""
    import jax
    from jax import shard_map
    from jax.sharding import PartitionSpec as P

    cache = runner.cache
    x = jax.device_put(np.ones((runner.dp * 2, 8), np.float32), runner.programs.by_rank)
    step = jax.device_put(np.int32(0), runner.programs.replicated)

    def chain(calls: int) -> Callable[[], None]:
        def body(step: jax.Array, x: jax.Array, layer_cache: jax.Array) -> jax.Array:
            for _ in range(CALLS_IN_CHAIN):
                x = x * 1.0001
                if calls:
                    x = trigger(step, x, layer_cache, 0)
            return x

        program = jax.jit(
            shard_map(
                body,
                mesh=runner.mesh,
                in_specs=(P(), P("dp"), cache.spec.partition),
                out_specs=P("dp"),
                check_vma=False,
            )
        )
        return lambda: jax.block_until_ready(program(step, x, cache.layers[0]))

    runs = [chain(0), chain(CALLS_IN_CHAIN)]
    for run in runs:
        run()
    # The least of many: the machine only ever adds to a fixed cost.
    without, with_ = map(min, interleaved(runs, max(10 * repeats, 100)))
    return max(with_ - without, 0.0) / CALLS_IN_CHAIN * 1e9


def drafts_of(plain: float, drafting: float) -> dict[str, float]:
    """What drafts cost, from the seconds of a step without and with them.

    A step with drafts gives 1 + a tokens for a share `a` of drafts that are right, so it gains
    from the share on by which it takes longer.
    """
    return {
        "ms_drafts": drafting * 1e3,
        "drafts_ratio": drafting / plain,
        "break_even_acceptance": drafting / plain - 1,
    }


def rows_of_mesh(node: NodeConfig, lengths: tuple[int, ...], repeats: int) -> Iterator[Any]:
    """Yields (done, total, row or None) while one mesh is measured."""
    from ffi_transport.engine import TransferEngine
    from ffi_transport.trigger import make_trigger
    from ffi_transport.types import EngineConfig
    from jaxdisagg.model_loading import load_model
    from jaxdisagg.runner import ModelRunner
    from jaxdisagg.trigger_slots import open_slots

    chunks, batches = node.batch.chunks, node.batch.decode_rows
    total = 1 + len(chunks) * len(lengths) + len(batches) * len(lengths)
    with TransferEngine(EngineConfig(provider="loopback")) as engine:
        model = load_model(node)
        trigger = make_trigger(engine.index)
        config = replace(model.config, mtp=False)
        shared = (model.params, model.mesh, model.rules)
        parts = (replace(node, mtp=False), model.family, config, *shared)
        plain, triggered = ModelRunner(*parts), ModelRunner(*parts, trigger=trigger)
        open_slots(engine, triggered.cache)
        decoders = [plain]
        if node.mtp:
            decoders.append(ModelRunner(node, model.family, model.config, *shared))
        for runner in {plain, triggered, *decoders}:
            runner.warm_up()
        call_ns = trigger_call_ns(triggered, trigger, repeats)
        yield 1, total, None
        done = 1
        ep = f",ep={node.mesh.ep}" if node.mesh.ep > 1 else ""
        mesh = f"tp={node.mesh.tp},dp={node.mesh.dp}{ep}"
        base = {"mesh": mesh, "dtype": node.dtype, "devices": node.mesh.devices}
        layers = model.config.num_layers
        for tokens in chunks:
            for length in lengths:
                runs = [prefill_run(r, tokens, length) for r in (plain, triggered)]
                off, on = interleaved(runs, repeats)
                (ms_off, low, high), (ms_on, *_) = median_ci(off), median_ci(on)
                done += 1
                yield (
                    done,
                    total,
                    base
                    | {
                        "step": "prefill",
                        "tokens": tokens,
                        "context": length,
                        "ms_trigger_off": ms_off * 1e3,
                        "ms_ci95": [low * 1e3, high * 1e3],
                        "ms_trigger_on": ms_on * 1e3,
                        "on_off_ratio": ms_on / ms_off,
                        "trigger_call_ns": call_ns,
                        # Devices fire at once, so what a step waits for is one device's calls.
                        "trigger_share": call_ns * (layers + 1) / (ms_off * 1e9),
                        "tokens_per_s": tokens * node.mesh.dp / ms_on,
                    },
                )
        for rows in batches:
            for length in lengths:
                times = interleaved(
                    [decode_run(r, rows, max(length, 2)) for r in decoders], repeats
                )
                (ms, low, high), *drafting = map(median_ci, times)
                done += 1
                yield (
                    done,
                    total,
                    base
                    | {
                        "step": "decode",
                        "rows": rows,
                        "context": length,
                        "ms_trigger_off": ms * 1e3,
                        "ms_ci95": [low * 1e3, high * 1e3],
                        "tokens_per_s": rows * node.mesh.dp / ms,
                    }
                    | (drafts_of(ms, drafting[0][0]) if drafting else {}),
                )
        # Elsewhere a device stores into slots, at which nobody looks without a plan.
        on_cpu = model.mesh.devices.flat[0].platform == "cpu"
        assert not on_cpu or engine.counters()["triggers"] > 0, "the trigger was never called"


def table_of(rows: list[dict[str, Any]]) -> Table:
    """The rows for a terminal."""
    title = "step times, milliseconds; prefill: trigger off and on, decode: drafts off and on"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column in ("mesh", "step", "size", "context", "off", "95 %", "on", "on/off", "trigger",
                   "tokens/s"):  # fmt: skip
        table.add_column(column, justify="right")
    for row in rows:
        low, high = row["ms_ci95"]
        prefill = row["step"] == "prefill"
        on, ratio = ("ms_trigger_on", "on_off_ratio") if prefill else ("ms_drafts", "drafts_ratio")
        table.add_row(
            row["mesh"],
            row["step"],
            str(row["tokens"] if prefill else row["rows"]),
            str(row["context"]),
            f"{row['ms_trigger_off']:.1f}",
            f"{low:.1f}..{high:.1f}",
            f"{row[on]:.1f}" if on in row else "",
            f"{row[ratio]:.3f}" if ratio in row else "",
            f"{row['trigger_share']:.4%}" if prefill else "",
            f"{row['tokens_per_s']:.0f}",
        )
    return table


def main(
    model: Annotated[Path, typer.Option(help="model folder in Hugging Face form")],
    mesh: Annotated[list[str], typer.Option(help="tp=2,dp=2; repeatable")] = [],  # noqa: B006
    chunks: Annotated[str, typer.Option(help="prefill tokens per rank")] = "64,256",
    batch: Annotated[str, typer.Option(help="decode rows per rank")] = "2,8",
    lengths: Annotated[str, typer.Option(help="tokens already in the cache")] = "0,512",
    dtype: str = "float32",
    page_size: Annotated[int, typer.Option(min=1)] = 16,
    repeats: Annotated[int, typer.Option(min=1)] = 20,
    rules: Annotated[Path | None, typer.Option(help="sharding rules, TOML")] = None,
    mtp: Annotated[bool, typer.Option("--mtp", help="time decode with drafts beside")] = False,
    json: Annotated[Path | None, typer.Option(help="write the rows here, after each")] = None,
) -> None:
    """Time prefill and decode steps on each mesh, prefill with the trigger on and off."""
    try:
        check_json(json)
        sizes, rows_, contexts = (
            parse_numbers(chunks, "chunks"),
            parse_numbers(batch, "batch"),
            parse_numbers(lengths, "lengths"),
        )
        longest = max(contexts) + max(*sizes, 4)
        pages = (max(rows_) + 1) * -(-longest // page_size) + 1
        base = NodeConfig(
            role="mixed",
            model=model,
            dtype=dtype,
            cache=CacheConfig(page_size=page_size, pages=pages),
            batch=BatchConfig(chunks=sizes, decode_rows=rows_, max_model_len=longest),
            rules=rules,
            mtp=mtp,
        )
        nodes = [parse_node(text, base) for text in mesh or ["tp=1"]]
        set_host_devices(max(node.mesh.devices for node in nodes))
        found: list[dict[str, Any]] = []
        with Progress(console=console) as progress:
            for node in nodes:
                task = progress.add_task(f"tp={node.mesh.tp} dp={node.mesh.dp}", total=None)
                for done, total, row in rows_of_mesh(node, contexts, repeats):
                    progress.update(task, completed=done, total=total)
                    if row is not None:
                        found.append(row)
                        if json is not None:
                            write_json(json, environment(), found)
    except (ValueError, FileNotFoundError) as error:
        print_error(console, str(error))
        raise typer.Exit(2) from None
    console.print(table_of(found))


if __name__ == "__main__":
    typer.run(main)
