"""Write a random checkpoint in Hugging Face format, for tests and mesh experiments.

Norms lie around 1; all else is normal with --std. Wide, untied weights (the default) make the
greedy tokens of a random model sensitive to damaged cache contents; the usual 0.02 would hide it.
Sizes that a family does not have are refused; those left out are tiny.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from byte_tokenizer import write_tokenizer
from random_checkpoint import write_checkpoint

from models.registry import parse_config

Family = Literal["qwen3", "llama", "qwen3-moe", "deepseek-v3"]
ARCHITECTURES = {
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "deepseek-v3": ("DeepseekV3ForCausalLM", "deepseek_v3"),
}
# Option -> (field of config.json, default), for the options that not every family has.
_GQA = {"kv_heads": ("num_key_value_heads", 4), "head_dim": ("head_dim", 32)}
_MOE = {
    "experts_per_token": ("num_experts_per_tok", 2),
    "expert_ffn": ("moe_intermediate_size", 96),
}
OPTIONS: dict[str, dict[str, tuple[str, int]]] = {
    "qwen3": _GQA,
    "llama": _GQA,
    "qwen3-moe": {**_GQA, **_MOE, "experts": ("num_experts", 8)},
    "deepseek-v3": {
        **_MOE,
        "experts": ("n_routed_experts", 8),
        "shared_experts": ("n_shared_experts", 1),
        "groups": ("n_group", 4),
        "top_groups": ("topk_group", 2),
        "dense_layers": ("first_k_dense_replace", 1),
        "q_lora_rank": ("q_lora_rank", 48),
        "kv_lora_rank": ("kv_lora_rank", 32),
        "nope_dim": ("qk_nope_head_dim", 32),
        "rope_dim": ("qk_rope_head_dim", 16),
        "value_dim": ("v_head_dim", 32),
        "mtp_layers": ("num_nextn_predict_layers", 1),
    },
}
CONSTANTS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "qwen3-moe": {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
    "deepseek-v3": {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "moe_layer_freq": 1,
        "rope_scaling": None,
    },
}

FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def family_fields(family: Family, given: dict[str, int | None]) -> dict[str, Any]:
    """The fields of config.json that are the family's own; `given` are options, None if absent.

    Raises ValueError naming an option that the family does not have.
    """
    known = OPTIONS[family]
    for option, value in given.items():
        if value is not None and option not in known:
            name = option.replace("_", "-")
            raise ValueError(f"--{name}: {family} has no such size")
    fields: dict[str, Any] = {}
    for option, (field, default) in known.items():
        value = given[option]
        fields[field] = default if value is None else value
    if fields.get("q_lora_rank") == 0:
        fields["q_lora_rank"] = None
    return {**fields, **CONSTANTS[family]}


Size = Annotated[int | None, typer.Option(min=1)]
MaybeNone = Annotated[int | None, typer.Option(min=0)]


def main(
    folder: Annotated[Path, typer.Argument(help="Where to write; made if it is not there.")],
    family: Annotated[Family, typer.Option()] = "qwen3",
    vocab: Annotated[int, typer.Option(min=1)] = 512,
    hidden: Annotated[int, typer.Option(min=1)] = 128,
    layers: Annotated[int, typer.Option(min=1)] = 4,
    heads: Annotated[int, typer.Option(min=1)] = 8,
    ffn: Annotated[int, typer.Option(min=1, help="of the dense layers")] = 384,
    kv_heads: Size = None,
    head_dim: Size = None,
    experts: Size = None,
    experts_per_token: Size = None,
    expert_ffn: Size = None,
    shared_experts: MaybeNone = None,
    groups: Size = None,
    top_groups: Size = None,
    dense_layers: MaybeNone = None,
    q_lora_rank: Annotated[int | None, typer.Option(min=0, help="0: queries at full rank")] = None,
    kv_lora_rank: Size = None,
    nope_dim: Size = None,
    rope_dim: Size = None,
    value_dim: Size = None,
    mtp_layers: Annotated[int | None, typer.Option(min=0, max=1)] = None,
    max_position: Annotated[int, typer.Option(min=1)] = 4096,
    rope_theta: Annotated[float, typer.Option()] = 1e6,
    tied: Annotated[bool, typer.Option("--tied/--untied")] = False,
    std: Annotated[float, typer.Option(min=0)] = 0.25,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option()] = "float32",
    fp8: Annotated[bool, typer.Option("--fp8", help="Linear layers in fp8 blocks.")] = False,
    files: Annotated[int, typer.Option(min=1, help="Number of safetensors files.")] = 1,
    tokenizer: Annotated[
        bool, typer.Option("--tokenizer", help="A tokenizer of bytes, to serve the folder.")
    ] = False,
) -> None:
    """Write a random checkpoint of the family to FOLDER."""
    given = {
        name: value
        for name, value in locals().items()
        if any(name in options for options in OPTIONS.values())
    }
    architecture, model_type = ARCHITECTURES[family]
    try:
        config = {
            "architectures": [architecture],
            "model_type": model_type,
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": ffn,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            **family_fields(family, given),
            "max_position_embeddings": max_position,
            "rms_norm_eps": 1e-6,
            "rope_theta": rope_theta,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": tied,
            "torch_dtype": dtype,
            **({"quantization_config": FP8} if fp8 else {}),
        }
        parse_config(config)  # before anything of the folder is changed
        if tokenizer:
            write_tokenizer(folder, vocab)
        write_checkpoint(folder, config, std=std, seed=seed, files=files)
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    size = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    typer.echo(f"wrote {folder} ({size / 1e6:.1f} MB)")


if __name__ == "__main__":
    typer.run(main)
