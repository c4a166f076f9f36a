"""Times of a layer's experts on this machine: the blocked loop beside what it could be instead.

`dense` is a gated MLP as wide as the experts of one token: the same multiplications. `read` is one
for two tokens as wide as all chosen experts together: the same weights. `all` runs every expert on
every token; `ragged` is `lax.ragged_dot`, which GPUs use. Taken in turns; trust the ratios.
"""

import functools
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jaxdisagg.bench.report import environment, write_json
from jaxdisagg.config_text import parse_numbers
from jaxdisagg.gpu_setup import default_platform
from jaxdisagg.start_progress import print_error

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax
import jax.numpy as jnp
import numpy as np

from models import expert_sums
from models.layers import gated_mlp

console = Console()


def every_expert(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
) -> jax.Array:
    """[T, D]: all experts on all tokens, with weight zero where it was not chosen."""

    def add(e: jax.Array, out: jax.Array) -> jax.Array:
        weight = jnp.where(ids == e, weights, 0).sum(-1, keepdims=True)
        return out + gated_mlp(x, gate[e], up[e], down[e]).astype(jnp.float32) * weight

    return jax.lax.fori_loop(0, gate.shape[0], add, jnp.zeros(x.shape, jnp.float32))


def measure(
    tokens: int, dtype: str, experts: int, choices: int, hidden: int, ffn: int, repeats: int
) -> dict[str, Any]:
    """One row: median milliseconds of each way."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) / shape[-2] ** 0.5, dtype)

    x = normal(tokens, hidden)
    ids = np.stack([rng.permutation(experts)[:choices] for _ in range(tokens)]).astype(np.int32)
    weights = jnp.asarray(rng.random((tokens, choices)), jnp.float32)
    stacked = (
        normal(experts, hidden, ffn),
        normal(experts, hidden, ffn),
        normal(experts, ffn, hidden),
    )
    chosen = len(np.unique(ids))

    def dense(width: int) -> tuple[jax.Array, ...]:
        return normal(hidden, width), normal(hidden, width), normal(width, hidden)

    average = -(-ids.size // experts)
    order, sizes = expert_sums.sort_pairs(jnp.asarray(ids), experts)
    ways: dict[str, tuple[Callable[..., jax.Array], tuple[Any, ...]]] = {
        "blocked": (
            functools.partial(expert_sums.sum_experts, average=average), (x, ids, weights, stacked)
        ),
        "dense": (gated_mlp, (x, *dense(choices * ffn))),
        "read": (gated_mlp, (normal(2, hidden), *dense(chosen * ffn))),
        "all": (every_expert, (x, ids, weights, *stacked)),
        "ragged": (expert_sums.ragged, (x, weights, order, sizes, *stacked)),
    }  # fmt: skip
    programs = {name: jax.jit(f).lower(*args).compile() for name, (f, args) in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, (_, args) in ways.items():
            if name == "ragged" and repeat > min(repeats, 2):
                continue
            start = time.perf_counter()
            programs[name](*args).block_until_ready()
            if repeat:  # the first run warms up
                times[name].append(time.perf_counter() - start)
    medians = {f"ms_{name}": statistics.median(taken) * 1e3 for name, taken in times.items()}
    return {"dtype": dtype, "tokens": tokens, "experts_read": chosen, **medians}


def table_of(rows: list[dict[str, Any]]) -> Table:
    """The rows for a terminal."""
    table = Table(title="experts, milliseconds", box=box.SIMPLE)
    for column in rows[0]:
        table.add_column(column.removeprefix("ms_"), justify="right")
    for row in rows:
        table.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()))
    return table


def main(
    tokens: Annotated[str, typer.Option(help="tokens of a step")] = "8,64,256",
    experts: Annotated[int, typer.Option(min=1)] = 64,
    choices: Annotated[int, typer.Option(min=1, help="experts of a token")] = 8,
    hidden: Annotated[int, typer.Option(min=1)] = 512,
    ffn: Annotated[int, typer.Option(min=1, help="width of an expert")] = 256,
    repeats: Annotated[int, typer.Option(min=1)] = 11,
    json: Annotated[Path | None, typer.Option(help="write the rows here")] = None,
) -> None:
    """Time one layer's experts on one device, in float32 and bfloat16."""
    try:
        if choices > experts:
            raise ValueError(f"choices={choices} must not exceed experts={experts}")
        sizes = parse_numbers(tokens, "tokens")
        if min(sizes) < 1:
            raise ValueError(f"tokens={tokens!r} must be at least 1")
        default_platform()
    except ValueError as error:
        print_error(console, str(error))
        raise typer.Exit(2) from None
    rows = [
        measure(size, dtype, experts, choices, hidden, ffn, repeats)
        for dtype in ("float32", "bfloat16")
        for size in track(sizes, description=dtype, console=console)
    ]
    console.print(table_of(rows))
    if json is not None:
        write_json(
            json, environment(experts=experts, choices=choices, hidden=hidden, ffn=ffn), rows
        )


if __name__ == "__main__":
    typer.run(main)
