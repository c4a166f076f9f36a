"""Load a model folder onto a mesh, and print what it took: time, and host memory.

One load per run, so that nothing that an earlier one left behind is counted or used again.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from jaxdisagg.config import MeshConfig, NodeConfig
from jaxdisagg.mesh import make_mesh
from jaxdisagg.model_fit import fit_model
from jaxdisagg.process_setup import set_host_devices
from models.checkpoint import load_measured, open_checkpoint


def main(
    model: Annotated[Path, typer.Argument(help="A model folder of either form.")],
    tp: Annotated[int, typer.Option(min=1)] = 1,
    dp: Annotated[int, typer.Option(min=1)] = 1,
    ep: Annotated[int, typer.Option(min=1)] = 1,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option()] = "bfloat16",
    mtp: Annotated[bool, typer.Option("--mtp", help="With the MTP module.")] = False,
) -> None:
    """Load MODEL once and print the statistics."""
    set_host_devices(tp * dp)
    try:
        sizes = MeshConfig(tp=tp, dp=dp, ep=ep)
        fit = fit_model(NodeConfig(role="mixed", model=model, mesh=sizes, dtype=dtype, mtp=mtp))
        mesh = make_mesh(tp=tp, dp=dp, kv_heads=fit.layout.kv_heads)
        _, stats = load_measured(open_checkpoint(model, fit.config, mesh, fit.rules))
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(f"{model.name} tp={tp} dp={dp} ep={ep}: {stats}")


if __name__ == "__main__":
    typer.run(main)
