"""Paged write-immediates between two processes, against one raw TCP stream and memcpy.

Every round of a page size measures all three, one after the other, so that they see the same
machine; `ratio` is the median over the rounds of transfer / raw TCP. Source and destination pages
are random permutations: what is merged or packed is not luck of the order.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ffi_transport.errors import TransportError
from jaxdisagg.bench.report import check_json, environment, write_json
from jaxdisagg.bench.transfer import Bench, measure
from jaxdisagg.bench.transfer_side import TransferSide, two_cores


def table_of(rows: list[dict[str, Any]]) -> Table:
    """The rows for a terminal; GB/s are 10^9 bytes a second."""
    providers = ", ".join(dict.fromkeys(row["provider"] for row in rows))
    table = Table(title=f"paged writes with immediates over {providers}, GB/s")
    for column in ("KiB", "transfer", "raw TCP", "memcpy", "of TCP", "least..most", "pages/s",
                   "writes/s"):  # fmt: skip
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row["page_bytes"] >> 10),
            f"{row['gbps']:.2f}",
            f"{row['raw_tcp_gbps']:.2f}",
            f"{row['memcpy_gbps']:.2f}",
            f"{row['ratio']:.0%}",
            f"{row['ratio_least']:.0%}..{row['ratio_most']:.0%}",
            f"{row['pages_per_s']:,.0f}",
            f"{row['writes_per_s']:,.0f}",
        )
    return table


def main(
    provider: Annotated[str, typer.Option(help="auto, tcp, net, tcp;ofi_rxm, efa, verbs")] = "auto",
    pages: Annotated[str, typer.Option(help="page sizes in KiB")] = "4,16,64,256,1024",
    megabytes: Annotated[int, typer.Option(min=1, help="MiB moved in each measurement")] = 512,
    buffer: Annotated[int, typer.Option(min=1, help="MiB of each side's buffer")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="rounds of each page size")] = 7,
    bind: Annotated[str, typer.Option(help="the sending side's address")] = "127.0.0.1",
    peer_bind: Annotated[str, typer.Option(help="the receiving side's; default: the same")] = "",
    domains: Annotated[
        str, typer.Option(help="the sending side's NICs: names or addresses, with commas")
    ] = "",
    peer_domains: Annotated[str, typer.Option(help="the receiving side's NICs")] = "",
    window: Annotated[
        int, typer.Option(min=0, help="KiB in flight to a peer; 0: the provider's default")
    ] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the rows here")] = None,
) -> None:
    """Measure transfers over page sizes beside raw TCP and memcpy."""
    try:
        sizes = [int(size) << 10 for size in pages.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--pages: {pages!r} are no numbers of KiB") from None
    if min(sizes) < 1024 or max(sizes) > min(1 << 20, buffer << 20):
        raise typer.BadParameter("--pages: 1 to 1024 KiB, and at most the buffer")
    if provider == "loopback":
        raise typer.BadParameter("--provider: loopback stays within one process")
    try:
        check_json(json_file)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    sender, receiver = (
        TransferSide(
            provider=provider,
            bind=address,
            domains=tuple(filter(None, names.split(","))),
            bytes_in_flight=window << 10,
            core=core,
        )
        for core, address, names in zip(
            two_cores(), (bind, peer_bind or bind), (domains, peer_domains), strict=True
        )
    )
    console = Console()
    rows = []
    try:
        with (
            Bench(sender, receiver, buffer << 20) as bench,
            Progress(console=console, transient=True) as progress,
        ):
            for size in sizes:
                task = progress.add_task(f"{size >> 10} KiB", total=rounds)
                found = []
                for row in measure(bench, size, megabytes << 20, rounds):
                    found.append(row)
                    progress.advance(task)
                rows.append(found[-1])
    except (TransportError, ValueError, OSError) as error:
        console.print(f"[red]error:[/red] {error}", highlight=False)
        raise typer.Exit(2) from None
    console.print(table_of(rows))
    if json_file is not None:
        write_json(json_file, environment(), rows)


if __name__ == "__main__":
    typer.run(main)
