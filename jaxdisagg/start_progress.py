"""Starting a deployment from a terminal: a bar per process, a message for a traceback."""

from typing import Self

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from jaxdisagg.config import ServeConfig
from jaxdisagg.deployment import Deployment, DeploymentError, NodeProcess


def print_error(console: Console, why: str) -> None:
    """Show an error as it is: brackets in a path are no markup."""
    console.print("[red]error:[/red] " + escape(why), highlight=False)


class StartProgress:
    """Shows how far each node is; called with all nodes when one of them said something."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[what]}", markup=False),
            TimeElapsedColumn(),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, nodes: list[NodeProcess]) -> None:
        """Move the bars."""
        for process in (process for node in nodes for process in (node, *node.followers)):
            name = process.name
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(name, what="")
            self._progress.update(
                self._tasks[name],
                total=process.total,
                completed=process.total if process.ready else process.done,
                what="ready" if process.ready else process.progress,
            )


def start_or_exit(config: ServeConfig, console: Console) -> Deployment:
    """Start a deployment with a progress bar; a failure ends the script with its message."""
    with StartProgress(console) as progress:
        deployment = Deployment(config, progress)
        try:
            deployment.start()
        except (DeploymentError, ValueError) as error:
            print_error(console, str(error))
            raise typer.Exit(2) from None
    return deployment
