"""Convert a model folder: Hugging Face safetensors to the native form, or back.

fp8 blocks are dequantised. The native form holds the parameters as the program does, and is read
onto any mesh, whatever mesh it was written from. The files of the tokenizer are copied.
"""

import hashlib
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from jaxdisagg.config import MeshConfig, NodeConfig
from jaxdisagg.mesh import make_mesh
from jaxdisagg.model_fit import fit_model
from jaxdisagg.process_setup import set_host_devices
from models.checkpoint import load_measured, open_checkpoint, weights_fingerprint
from models.interface import ModelConfig
from models.registry import load_config, read_json_object
from models.weights.export import write_safetensors
from models.weights.native import config_as, save_native

COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
    "LICENSE*",
)
Dtype = Literal["float32", "bfloat16"]


def convert(
    source: Path,
    target: Path,
    *,
    to: Literal["native", "hf"] = "native",
    mesh: MeshConfig | None = None,
    dtype: Dtype | None = None,
    files: int = 1,
    mtp: bool = True,
) -> str:
    """Write `source`, of either form, to `target` in the other or the same; says what it took.

    The native form is written from the mesh; to safetensors, parameters pass one by one through
    one device. Without a dtype the weights keep theirs (float16 becomes bfloat16). An MTP module
    that the model offers is converted, too, unless `mtp` is False. Raises FileNotFoundError or
    ValueError, as loading does, and ValueError when `target` is not empty.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} is not an empty folder")
    _, config = load_config(source)
    config = replace(config, mtp=mtp and config.mtp_layers > 0, dtype=dtype or config.dtype)
    hf = read_json_object(source / "config.json")
    mesh = mesh or MeshConfig()
    if to == "hf" and mesh.devices > 1:
        raise ValueError(f"tp={mesh.tp} dp={mesh.dp}: safetensors are written through one device")
    if to == "native" and files > 1:
        raise ValueError(f"files={files}: the native form has no safetensors files")
    node = NodeConfig(role="mixed", model=source, mesh=mesh, dtype=config.dtype, mtp=config.mtp)
    fit = fit_model(node)
    on_devices = make_mesh(tp=mesh.tp, dp=mesh.dp, kv_heads=fit.layout.kv_heads)
    checkpoint = open_checkpoint(source, config, on_devices, fit.rules)
    target.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    if to == "native":
        weights = fingerprint_of(source, config, exact=checkpoint.exact)
        params, stats = load_measured(checkpoint)
        copy_files(source, target)
        save_native(target, params, hf, dtype=config.dtype, weights=weights)
        loaded = f"loaded {stats}; "
    else:
        copy_files(source, target)
        write_safetensors(target, checkpoint, config, files=files)
        text = json.dumps(config_as(hf, config.dtype), indent=2) + "\n"
        (target / "config.json").write_text(text)
        loaded = ""
    size = sum(f.stat().st_size for f in target.rglob("*") if f.is_file())
    return f"{loaded}wrote {size / 1e6:.0f} MB in {time.perf_counter() - begin:.1f} s"


def copy_files(source: Path, target: Path) -> None:
    """The tokenizer's and other files; before the weights, so that no model is without them."""
    for pattern in COPIED:
        for file in source.glob(pattern):
            shutil.copy(file, target / file.name)


def fingerprint_of(source: Path, config: ModelConfig, *, exact: bool) -> str:
    """The fingerprint of the converted weights: the source's, unless dtypes have changed."""
    before = weights_fingerprint(source)
    if exact:
        return before
    return hashlib.sha256(f"{before} as {config.dtype}".encode()).hexdigest()[:16]


def main(
    source: Annotated[Path, typer.Argument(help="A model folder of either form.")],
    target: Annotated[Path, typer.Argument(help="Where to write; a new or empty folder.")],
    to: Annotated[Literal["native", "hf"], typer.Option(help="The form to write.")] = "native",
    tp: Annotated[int, typer.Option(min=1, help="Mesh that the native form is written from.")] = 1,
    dp: Annotated[int, typer.Option(min=1)] = 1,
    ep: Annotated[int, typer.Option(min=1)] = 1,
    dtype: Annotated[Dtype | None, typer.Option(help="The source's, if left out.")] = None,
    files: Annotated[int, typer.Option(min=1, help="Number of safetensors files.")] = 1,
    mtp: Annotated[
        bool, typer.Option(help="The MTP module, too; some copies announce it without having it.")
    ] = True,
) -> None:
    """Convert the model folder SOURCE into TARGET."""
    set_host_devices(tp * dp)
    try:
        mesh = MeshConfig(tp=tp, dp=dp, ep=ep)
        done = convert(source, target, to=to, mesh=mesh, dtype=dtype, files=files, mtp=mtp)
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(f"{target}: {done}")


if __name__ == "__main__":
    typer.run(main)
