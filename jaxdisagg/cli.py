"""The console command `jaxdisagg`."""

import typer

from jaxdisagg.doctor.command import doctor

app = typer.Typer(no_args_is_help=True, add_completion=False)
app.command()(doctor)


@app.callback()
def _commands() -> None:
    """Prefill and decode on separate device meshes."""


def main() -> None:
    """What the console script calls."""
    app()


if __name__ == "__main__":
    main()
