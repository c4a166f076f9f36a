"""Transfers and a split deployment over NICs of a known rate, in network namespaces.

Two sides with 1, 2, 4 NICs, also unequal numbers, each limited by tc: for each pair the transfer
benchmark beside raw TCP on the same links, as shares of the line rate; then a prefill node at one
side and a decode node at the other, whose answers must be those of one process.

Needs root, or user namespaces for everybody, and `ip` and `tc` (iproute2). Where that is not to be
had it says what is missing and ends with code 77. Code 1: answers or counts are wrong, or with
--check a bar is missed; 2: an option is wrong or something did not start. Nothing is left behind,
however it ends: see jaxdisagg/bench/netns.py.
"""

import signal
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from made_models import MADE, default_nodes, made, model_folder
from rich import box
from rich.console import Console
from rich.table import Table

from ffi_transport.errors import TransportError
from jaxdisagg.bench.netns import Bed, BedUnavailable
from jaxdisagg.bench.netns_bars import BAR_PAGE, add_speed_ups, missed_bars
from jaxdisagg.bench.netns_nodes import SplitError, prompts, run_split, run_whole
from jaxdisagg.bench.report import check_json, environment, write_json
from jaxdisagg.config_text import parse_numbers
from jaxdisagg.deployment import DeploymentError
from jaxdisagg.start_progress import print_error

console = Console()
PAIRS = "1,2,4,1:2,2:4"
UNAVAILABLE = 77
MAX_SECONDS = 30  # of one measurement, which has a deadline


def parse_pairs(text: str) -> list[tuple[int, int]]:
    """`1,2,4:2` as [(1, 1), (2, 2), (4, 2)]. Raises ValueError naming the option."""
    try:
        pairs = [tuple(int(n) for n in part.split(":")) for part in text.split(",")]
    except ValueError:
        pairs = []
    if not pairs or any(len(pair) > 2 for pair in pairs):
        raise ValueError(f"nics={text!r}: expected numbers or pairs such as 1,2,2:4")
    return [(pair[0], pair[-1]) for pair in pairs]


def name_of(row: dict[str, Any]) -> str:
    """How the NICs of a row are written."""
    left, right = row["nics"], row["peer_nics"]
    return str(left) if left == right else f"{left} -> {right}"


def transfer_table(rows: list[dict[str, Any]], rate_mbit: int) -> Table:
    """The rows for a terminal."""
    mtu, provider = rows[0]["mtu"], rows[0]["provider"]
    share = rows[0]["payload_line_gbps"] / rows[0]["line_gbps"]
    table = Table(
        title=f"paged writes over {provider}, NICs of {rate_mbit} Mbit/s, MTU {mtu}",
        caption=(
            "Line rate: tc's, of whole Ethernet frames, over the fewer NICs of the two sides; "
            f"TCP's payload can have {share:.1%} of it. Raw TCP: one stream for each NIC."
        ),
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    for column in ("NICs", "KiB", "GB/s", "of line", "of payload", "raw TCP", "of line", "speed-up",
                   "MB a NIC"):  # fmt: skip
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        least, most = (round(f(row["nic_bytes"]) / 1e6) for f in (min, max))
        table.add_row(
            name_of(row),
            f"{row['page_bytes'] / 1024:g}",
            f"{row['gbps']:.3f}",
            f"{row['of_line']:.1%}",
            f"{row['of_payload_line']:.1%}",
            f"{row['raw_tcp_gbps']:.3f}",
            f"{row['raw_tcp_of_line']:.1%}",
            "" if row["speed_up"] is None else f"{row['speed_up']:.2f}",
            str(least) if least == most else f"{least}..{most}",
        )
    return table


def split_table(rows: list[dict[str, Any]], model: str) -> Table:
    """The deployments for a terminal."""
    table = Table(
        title=f"{model}: prefill and decode apart",
        caption="Tokens equal those of one process. Frames hold control messages and headers, too.",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    for column in ("NICs", "answers", "tokens", "pushed", "counted", "bytes by NIC",
                   "frame bytes by NIC", "counted by NIC"):  # fmt: skip
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            name_of(row),
            *(str(row[key]) for key in ("answers", "tokens", "pushed", "counted")),
            *(
                " ".join(f"{count:,}" for count in row[key])
                for key in ("posted_bytes", "frame_bytes", "received_units")
            ),
        )
    return table


def run_nodes(
    pairs: list[tuple[int, int]],
    limits: dict[str, Any],
    model: Path,
    nodes: tuple[str, str],
    max_tokens: int,
) -> list[dict[str, Any]]:
    """A split deployment for each pair of NIC numbers. Raises SplitError for a wrong answer."""
    questions = prompts(3, 200)
    rows, whole = [], None
    for left, right in pairs:
        with Bed(left, right, **limits) as bed, console.status(f"nodes: {left} -> {right} NICs"):
            folder = model_folder(model)  # in here: it may start threads
            split = run_split(bed, folder, nodes, questions, max_tokens)
            if whole is None:
                whole = run_whole(folder, questions, max_tokens)
        problem = split.problem(whole)
        if problem is not None:
            raise SplitError(f"{left} -> {right} NICs: {problem}")
        rows.append(
            {
                "nics": left,
                "peer_nics": right,
                "answers": len(split.answers),
                "tokens": sum(len(answer.tokens) for answer in split.answers),
                "pushed": split.pushed,
                "counted": split.counted,
                "posted_bytes": list(split.posted_bytes),
                "frame_bytes": list(split.frame_bytes),
                "received_units": list(split.received_units),
            }
        )
        console.print(f"nodes over {name_of(rows[-1])} NICs: {rows[-1]['tokens']} tokens equal")
    return rows


def stop(why: str, code: int) -> NoReturn:
    """End with a message."""
    print_error(console, why)
    raise typer.Exit(code)


def main(
    nics: Annotated[str, typer.Option(help="NICs of both sides, or of each: 1,2,2:4")] = PAIRS,
    rate: Annotated[int, typer.Option(min=1, help="Mbit/s of each NIC, both ways")] = 1000,
    mtu: Annotated[int, typer.Option(min=576, max=65535)] = 1500,
    pages: Annotated[str, typer.Option(help="page sizes in KiB")] = "64",
    megabytes: Annotated[int, typer.Option(min=2, help="MiB a NIC and measurement")] = 64,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    provider: Annotated[str, typer.Option(help="auto, tcp, net or tcp;ofi_rxm")] = "auto",
    window: Annotated[int, typer.Option(min=0, help="KiB in flight; 0: the default")] = 0,
    congestion: Annotated[
        str, typer.Option(help="TCP's congestion control; default: the machine's")
    ] = "",
    transfer: Annotated[bool, typer.Option(help="run the transfer benchmark")] = True,
    nodes: Annotated[bool, typer.Option(help="run a prefill and a decode node")] = True,
    model: Annotated[
        Path, typer.Option(help=f"for the nodes: a folder, or {', '.join(MADE)}")
    ] = Path("tiny-qwen3-moe"),
    prefill: Annotated[str | None, typer.Option(help="the prefill node: tp=2")] = None,
    decode: Annotated[str | None, typer.Option(help="the decode node: tp=1")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="of an answer")] = 16,
    check: Annotated[bool, typer.Option("--check", help="1 if a bar is missed")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the rows here")] = None,
) -> None:
    """Measure transfers over NICs of a known rate, and serve a model across them."""
    try:
        pairs = parse_pairs(nics)
        sizes = [size << 10 for size in parse_numbers(pages, "pages")]
        if min(sizes) < 1024 or max(sizes) > min(1 << 20, megabytes << 18):
            raise ValueError(f"pages={pages!r}: 1 to 1024 KiB, and at most a quarter of megabytes")
        if transfer and (seconds := megabytes * (1 << 23) / 1e6 / rate) > MAX_SECONDS:
            raise ValueError(
                f"megabytes={megabytes}: {seconds:.0f} s at {rate} Mbit/s, at most {MAX_SECONDS}"
            )
        check_json(json_file)
        if check and not (transfer and BAR_PAGE in sizes and (1, 1) in pairs):
            raise ValueError("check: there are bars for 64 KiB pages, beside one NIC at each side")
        if nodes and made(model) is None and not (model / "config.json").is_file():
            raise ValueError(f"model: no config.json in {model}, and no made model of that name")
    except ValueError as error:
        stop(str(error), 2)
    defaults = default_nodes(model)
    prefill, decode = (
        default if text is None else text
        for text, default in zip((prefill, decode), defaults, strict=True)
    )
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    rows: list[dict[str, Any]] = []
    splits: list[dict[str, Any]] = []
    limits: dict[str, Any] = {"rate_mbit": rate, "mtu": mtu, "congestion": congestion}
    options = {"provider": provider, "window": window, "megabytes": megabytes, "rounds": rounds}
    try:
        for left, right in pairs if transfer else ():
            with Bed(left, right, **limits) as bed, console.status(f"{left} -> {right} NICs"):
                # Not before: numpy starts threads, and only a process of one becomes a user's root.
                from jaxdisagg.bench.netns_transfer import measure_pair

                rows += measure_pair(bed, options, sizes)
            console.print(f"{name_of(rows[-1])} NICs: {rows[-1]['of_line']:.1%} of the line rate")
        add_speed_ups(rows)
        if nodes:
            splits = run_nodes(pairs, limits, model, (prefill, decode), max_tokens)
    except BedUnavailable as error:
        console.print(f"skipped: {error}", highlight=False, markup=False)
        raise typer.Exit(UNAVAILABLE) from None
    except SplitError as error:
        stop(str(error), 1)
    except (DeploymentError, TransportError, RuntimeError, ValueError, OSError) as error:
        stop(str(error), 2)
    except KeyboardInterrupt:
        stop("interrupted; nothing is left behind", 130)
    missed = missed_bars(rows)
    if rows:
        console.print(transfer_table(rows, rate))
        for bar in missed:
            console.print(f"[red]missed:[/red] {bar}", highlight=False)
    if splits:
        console.print(split_table(splits, str(model)))
    if json_file is not None:
        write_json(json_file, environment(rate_mbit=rate, mtu=mtu), [*rows, *splits])
    if check and missed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
