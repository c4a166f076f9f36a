"""Write a small random checkpoint in Hugging Face format, for tests and mesh experiments.

The weights come from a seed and numpy alone, so that a folder can be made again anywhere. Norms
lie around 1; all else is normal with --std. Wide, untied weights (the default) make the greedy
tokens of a random model sensitive to damaged cache contents; the usual 0.02 would hide it.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import ml_dtypes
import numpy as np
import typer
from safetensors.numpy import save_file

from models.registry import load_config

NUMPY_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}


def write_checkpoint(
    folder: Path, config: dict[str, Any], *, std: float = 0.25, seed: int = 0, files: int = 1
) -> None:
    """Write config.json and `files` safetensors files (an index too, if several) into `folder`.

    `config` is the content of config.json; its `dtype` or `torch_dtype` is that of the weights.
    Raises ValueError for a config that no model family reads, before any weight is written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    family, parsed = load_config(folder)
    specs = family.abstract_params(parsed).values()
    sources = {source.name: source for spec in specs for source in spec.sources}.values()
    dtype = NUMPY_DTYPES[parsed.dtype]
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for source in sorted(sources, key=lambda s: s.name):
        values = rng.standard_normal(source.shape, dtype=np.float32)
        values = 1 + np.float32(0.2) * values if "norm" in source.name else std * values
        tensors[source.name] = values.astype(dtype)
    if files == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for i in range(files):
        file = f"model-{i + 1:05}-of-{files:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[i::files]}
        save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def main(
    folder: Annotated[Path, typer.Argument(help="Where to write; made if it is not there.")],
    family: Annotated[Literal["qwen3", "llama"], typer.Option()] = "qwen3",
    vocab: Annotated[int, typer.Option(min=1)] = 512,
    hidden: Annotated[int, typer.Option(min=1)] = 128,
    layers: Annotated[int, typer.Option(min=1)] = 4,
    heads: Annotated[int, typer.Option(min=1)] = 8,
    kv_heads: Annotated[int, typer.Option(min=1)] = 4,
    head_dim: Annotated[int, typer.Option(min=2)] = 32,
    ffn: Annotated[int, typer.Option(min=1)] = 384,
    max_position: Annotated[int, typer.Option(min=1)] = 4096,
    rope_theta: Annotated[float, typer.Option()] = 1e6,
    tied: Annotated[bool, typer.Option("--tied/--untied")] = False,
    std: Annotated[float, typer.Option(min=0)] = 0.25,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option()] = "float32",
    files: Annotated[int, typer.Option(min=1, help="Number of safetensors files.")] = 1,
) -> None:
    """Write a random checkpoint of the family to FOLDER."""
    config = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-6,
        "rope_theta": rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
    }
    try:
        write_checkpoint(folder, config, std=std, seed=seed, files=files)
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    size = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    typer.echo(f"wrote {folder} ({size / 1e6:.1f} MB)")


if __name__ == "__main__":
    typer.run(main)
