"""A sweep as a picture: what a layer computes and sends, and what of the transfer is exposed."""

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxdisagg.sweep.tables import milliseconds

COMPUTE = "#4c566a"
SPEEDS = ("#2f6690", "#c8553d", "#588157", "#7d5ba6", "#b08900")


def check_plot(path: Path) -> None:
    """Raise ValueError, saying what to install or to name otherwise, if no plot can be written."""
    if path.suffix.lower() != ".png":
        raise ValueError(f"--png: {path} must end in .png")
    if not path.parent.is_dir():
        raise ValueError(f"--png: no folder {path.parent}")
    if find_spec("matplotlib") is None:
        raise ValueError("--png: matplotlib is missing; pip install 'jaxdisagg[plot]'")


def write_plot(path: Path, title: str, rows: Iterable[dict[str, Any]]) -> None:
    """Draw the rows that fit, one group of bars for each, and write them to a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in rows if "error" not in row]
    speeds = list(dict.fromkeys(t["nic_gbps"] for row in rows for t in row["times"]))
    arrow = "\N{RIGHTWARDS ARROW}"
    labels = [f"{r['prefill']}\n{arrow} {r['decode']}\n{r['tokens']:,} tokens" for r in rows]
    bars = 1 + len(speeds)
    height = 0.8 / bars
    figure = Figure(figsize=(11, 1.6 + 0.26 * len(rows) * (bars + 1)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    layer, prompt = figure.subplots(1, 2, sharey=True)

    def draw(axis: Any, place: int, values: list[float], texts: list[str], **look: Any) -> None:
        at = [y + (place - (bars - 1) / 2) * height for y in range(len(rows))]
        drawn = axis.barh(at, values, height * 0.92, **look)
        axis.bar_label(drawn, texts, padding=3, fontsize=8)

    compute = [row["times"][0]["layer_compute_ms"] for row in rows]
    draw(layer, 0, compute, [milliseconds(v) for v in compute], color=COMPUTE, label="computes")
    for number, speed in enumerate(speeds):
        look = {"color": SPEEDS[number % len(SPEEDS)]}
        times = [row["times"][number] for row in rows]
        sent = [time["layer_transfer_ms"] for time in times]
        texts = [milliseconds(value) for value in sent]
        draw(layer, 1 + number, sent, texts, label=f"is sent at {speed:g} Gbit/s a NIC", **look)
        alone = [time["transfer_ms"] for time in times]
        texts = [
            f"{milliseconds(time['tail_ms'])} of {milliseconds(time['transfer_ms'])}"
            for time in times
        ]
        draw(prompt, 1 + number, alone, texts, alpha=0.3, **look)
        draw(prompt, 1 + number, [time["tail_ms"] for time in times], [""] * len(rows), **look)
    layer.set_yticks(range(len(rows)), labels)
    layer.invert_yaxis()
    layer.set_xlabel("a layer, ms")
    prompt.set_xlabel("a prompt's transfer, ms; in full colour what outlasts the prefill")
    for axis in (layer, prompt):
        axis.margins(x=0.25)
        axis.set_xlim(left=0)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(
        handles=layer.get_legend_handles_labels()[0],
        loc="outside lower center",
        ncols=min(bars, 4),
        frameon=False,
    )
    figure.savefig(path, dpi=120)
