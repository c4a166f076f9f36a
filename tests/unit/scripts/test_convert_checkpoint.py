"""Converting model folders there and back: the same bits, the other files, refusals."""

import errno
import json
import shutil
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
import pytest
import typer
from byte_tokenizer import write_tokenizer
from convert_checkpoint import convert, main
from make_checkpoint import FP8, family_fields
from random_checkpoint import write_checkpoint
from safetensors.numpy import save_file
from tensor_files import load_file
from typer.testing import CliRunner

from jaxdisagg.config import MeshConfig
from models.checkpoint import weights_fingerprint
from models.registry import load_config

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3-moe": "Qwen3MoeForCausalLM",
    "deepseek-v3": "DeepseekV3ForCausalLM",
}


def write(folder: Path, family: str, **change) -> Path:
    options = ("kv_heads", "head_dim", "experts", "experts_per_token", "expert_ffn", "groups")
    options += ("shared_experts", "top_groups", "dense_layers", "q_lora_rank", "kv_lora_rank")
    options += ("nope_dim", "rope_dim", "value_dim", "mtp_layers")
    config = {
        "architectures": [ARCHITECTURES[family]],
        "vocab_size": 260,
        "hidden_size": 144,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "torch_dtype": "bfloat16",
        **family_fields(family, dict.fromkeys(options)),
        **change,
    }
    write_checkpoint(folder, config)
    write_tokenizer(folder, 260)
    (folder / "generation_config.json").write_text('{"eos_token_id": 258}')
    return folder


def tensors(folder: Path) -> dict[str, np.ndarray]:
    return {n: t for f in folder.glob("*.safetensors") for n, t in load_file(f).items()}


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("llama", MeshConfig(tp=2)),
        ("qwen3-moe", MeshConfig(tp=2, dp=2, ep=4)),
        ("deepseek-v3", MeshConfig(tp=4, dp=2, ep=2)),
    ],
)
def test_there_and_back(tmp_path: Path, family: str, mesh: MeshConfig):
    source = write(tmp_path / "hf", family)
    convert(source, tmp_path / "native", mesh=mesh)
    convert(tmp_path / "native", tmp_path / "back", to="hf", files=3)
    before, after = tensors(source), tensors(tmp_path / "back")
    assert len(list((tmp_path / "back").glob("*.safetensors"))) == 3
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert (after[name].dtype, after[name].shape) == (tensor.dtype, tensor.shape)
        assert after[name].tobytes() == tensor.tobytes(), name
    prints = {weights_fingerprint(tmp_path / n) for n in ("hf", "native", "back")}
    assert len(prints) == 1
    config = json.loads((source / "config.json").read_text())
    for folder in ("native", "back"):
        assert json.loads((tmp_path / folder / "config.json").read_text()) == config
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            assert (tmp_path / folder / name).read_bytes() == (source / name).read_bytes()
    assert not list((tmp_path / "native").glob("*.safetensors"))


def test_fp8_becomes_plain(tmp_path: Path):
    source = write(tmp_path / "hf", "deepseek-v3", quantization_config=FP8)
    convert(source, tmp_path / "native")
    convert(source, tmp_path / "plain", to="hf")
    convert(tmp_path / "native", tmp_path / "back", to="hf")
    stored, plain = tensors(source), tensors(tmp_path / "plain")
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    assert stored[name].dtype == ml_dtypes.float8_e4m3fn
    expected = np.empty(stored[name].shape, np.float32)
    for (r, c), value in np.ndenumerate(stored[name]):
        expected[r, c] = np.float32(value) * stored[f"{name}_scale_inv"][r // 128, c // 128]
    assert plain[name].tobytes() == expected.astype(ml_dtypes.bfloat16).tobytes()
    assert not any(n.endswith("_scale_inv") for n in plain)
    for name, tensor in tensors(tmp_path / "back").items():
        assert tensor.tobytes() == plain[name].tobytes()
    for folder in ("native", "plain"):
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert "quantization_config" not in config
        assert config["torch_dtype"] == "bfloat16"
    # Another dtype was stored: other weights, as far as a peer can tell.
    assert weights_fingerprint(tmp_path / "native") != weights_fingerprint(source)


def test_another_dtype(tmp_path: Path):
    source = write(tmp_path / "hf", "llama", torch_dtype="float32")
    convert(source, tmp_path / "native", dtype="bfloat16")
    convert(tmp_path / "native", tmp_path / "back", to="hf", dtype="float32")
    before, after = tensors(source), tensors(tmp_path / "back")
    for name, tensor in before.items():
        expected = tensor.astype(ml_dtypes.bfloat16).astype(np.float32)
        assert after[name].tobytes() == expected.tobytes()
    prints = {weights_fingerprint(tmp_path / n) for n in ("hf", "native", "back")}
    assert len(prints) == 3
    config = json.loads((tmp_path / "native" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    # Converting once more keeps what the weights are.
    convert(tmp_path / "native", tmp_path / "again", mesh=MeshConfig(tp=2))
    assert weights_fingerprint(tmp_path / "again") == weights_fingerprint(tmp_path / "native")


def test_a_module_that_is_announced_but_not_there(tmp_path: Path):
    source = write(tmp_path / "hf", "deepseek-v3")
    main = {n: t for n, t in tensors(source).items() if not n.startswith("model.layers.2.")}
    assert 0 < len(main) < len(tensors(source))
    save_file(main, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"missing: model\.layers\.2\.enorm\.weight"):
        convert(source, tmp_path / "native")
    convert(source, tmp_path / "native", mtp=False)
    convert(tmp_path / "native", tmp_path / "back", to="hf", mtp=False)
    back = tensors(tmp_path / "back")
    assert back.keys() == main.keys()
    assert all(back[name].tobytes() == main[name].tobytes() for name in main)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    app = typer.Typer()
    app.command()(main)
    source, target = write(tmp_path / "hf", "llama"), tmp_path / "native"

    def run(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, [str(source), str(target), *words])
        return result.exit_code, " ".join(result.output.split())

    for words, message in (
        (("--tp", "3"), "tp=3 does not fit 4 KV heads"),
        (("--ep", "2"), "ep=2 must be 1"),
        (("--to", "hf", "--tp", "2"), "safetensors are written through one device"),
        (("--files", "2"), "the native form has no safetensors files"),
    ):
        code, output = run(*words)
        assert code == 2
        assert message in output
        assert not target.exists()
    code, output = run("--tp", "2", "--dtype", "float32")
    assert code == 0, output
    assert "M parameters" in output
    assert "host memory beside them at most" in output
    code, output = run()
    assert code == 2
    assert "is not an empty folder" in output


@pytest.mark.parametrize("to", ["native", "hf"])
def test_a_folder_without_all_files_is_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: Literal["native", "hf"]
):
    source, target = write(tmp_path / "source", "llama"), tmp_path / "target"

    def full(file: Path, to: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copy", full)
    with pytest.raises(OSError, match="No space left"):
        convert(source, target, to=to)
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        load_config(target)
