"""Random checkpoints by command: every family, fp8, the MTP module's copies, a tokenizer."""

import errno
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import typer
from make_checkpoint import main
from tensor_files import load_file
from typer.testing import CliRunner

from jaxdisagg.tokenizer import Tokenizer
from models.registry import load_config
from models.weights.files import TensorWriter

FAMILIES = ("qwen3", "llama", "qwen3-moe", "deepseek-v3")
SMALL = ("--hidden", "64", "--layers", "2", "--vocab", "300", "--ffn", "160", "--heads", "4")
WEIGHTS = "model.safetensors"

app = typer.Typer()
app.command()(main)


def make(folder: Path, *options: str) -> dict[str, np.ndarray]:
    result = CliRunner().invoke(app, [str(folder), *SMALL, *options])
    assert result.exit_code == 0, result.output
    return {n: t for f in folder.glob("*.safetensors") for n, t in load_file(f).items()}


def refused(folder: Path, *options: str) -> str:
    result = CliRunner().invoke(app, [str(folder), *options])
    assert result.exit_code == 2
    return result.output


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tmp_path: Path, family: str):
    tensors = make(tmp_path / "a", "--family", family, "--dtype", "bfloat16")
    again = make(tmp_path / "b", "--family", family, "--dtype", "bfloat16", "--files", "3")
    _, config = load_config(tmp_path / "a")
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (64, 2, 300)
    assert tensors.keys() == again.keys()
    for name, tensor in tensors.items():
        assert tensor.tobytes() == again[name].tobytes()
        bias = name.endswith("e_score_correction_bias")
        assert tensor.dtype == (np.float32 if bias else ml_dtypes.bfloat16)
    other = make(tmp_path / "c", "--family", family, "--dtype", "bfloat16", "--seed", "1")
    assert all(other[name].tobytes() != tensor.tobytes() for name, tensor in tensors.items())
    head = tensors["lm_head.weight"].astype(np.float32)
    assert 0.24 < head.std() < 0.26
    norm = tensors["model.norm.weight"].astype(np.float32)
    assert 0.1 < norm.std() < 0.3
    assert 0.9 < norm.mean() < 1.1


@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3"])
def test_a_tensor_does_not_depend_on_the_others(tmp_path: Path, family: str):
    few = make(tmp_path / "a", "--family", family, "--experts", "8")
    more = make(tmp_path / "b", "--family", family, "--experts", "16")
    same = [n for n in few if ".mlp.gate." not in n]
    assert len(same) > 20
    for name in same:
        np.testing.assert_array_equal(few[name], more[name])


def test_the_mtp_module_has_copies(tmp_path: Path):
    with_mtp = make(tmp_path / "a", "--family", "deepseek-v3")
    without = make(tmp_path / "b", "--family", "deepseek-v3", "--mtp-layers", "0")
    prefix = "model.layers.2."
    own = {n for n in with_mtp if n.startswith(prefix)}
    assert with_mtp.keys() - own == without.keys()
    assert f"{prefix}eh_proj.weight" in own
    for copy, main_ in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        np.testing.assert_array_equal(
            with_mtp[f"{prefix}{copy}.weight"], with_mtp[f"{main_}.weight"]
        )
    assert not np.array_equal(with_mtp["lm_head.weight"], with_mtp["model.embed_tokens.weight"])


def test_the_correction_bias_is_as_wide_as_scores(tmp_path: Path):
    tensors = make(tmp_path, "--family", "deepseek-v3", "--experts", "512", "--expert-ffn", "2")
    bias = tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias.shape == (512,)
    assert 0.25 < bias.std() < 0.35


def test_sizes_reach_the_config(tmp_path: Path):
    options = {
        "--experts": ("n_routed_experts", 12),
        "--experts-per-token": ("num_experts_per_tok", 3),
        "--expert-ffn": ("moe_intermediate_size", 20),
        "--shared-experts": ("n_shared_experts", 2),
        "--groups": ("n_group", 3),
        "--top-groups": ("topk_group", 1),
        "--dense-layers": ("first_k_dense_replace", 0),
        "--kv-lora-rank": ("kv_lora_rank", 24),
        "--nope-dim": ("qk_nope_head_dim", 12),
        "--rope-dim": ("qk_rope_head_dim", 6),
        "--value-dim": ("v_head_dim", 10),
    }
    words = [word for option, (_, value) in options.items() for word in (option, str(value))]
    tensors = make(tmp_path, "--family", "deepseek-v3", "--q-lora-rank", "0", *words)
    config = json.loads((tmp_path / "config.json").read_text())
    assert {field: config[field] for field, _ in options.values()} == dict(options.values())
    assert config["q_lora_rank"] is None
    assert tensors["model.layers.0.self_attn.q_proj.weight"].shape == (4 * 18, 64)
    assert tensors["model.layers.0.self_attn.kv_b_proj.weight"].shape == (4 * 22, 24)
    assert tensors["model.layers.0.mlp.experts.11.up_proj.weight"].shape == (20, 64)


def test_fp8_blocks(tmp_path: Path):
    plain = make(tmp_path / "a", "--family", "deepseek-v3", "--hidden", "144")
    tensors = make(tmp_path / "b", "--family", "deepseek-v3", "--hidden", "144", "--fp8")
    quantised = {n for n, t in tensors.items() if t.dtype == ml_dtypes.float8_e4m3fn}
    assert tensors.keys() - plain.keys() == {f"{n}_scale_inv" for n in quantised}
    stay = {n for n in plain if n not in quantised}
    endings = ("norm.weight", "embed_tokens.weight", "head.weight", "gate.weight", "bias")
    assert stay == {n for n in plain if n.endswith((*endings, "eh_proj.weight"))}
    for name in stay:
        np.testing.assert_array_equal(tensors[name], plain[name])
    name = "model.layers.0.mlp.gate_proj.weight"
    scales = tensors[f"{name}_scale_inv"]
    assert scales.shape == (2, 2)
    for i in range(2):
        for j in range(2):
            block = np.s_[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
            stored = tensors[name][block].astype(np.float32)
            assert np.abs(stored).max() == 448
            error = np.abs(stored * scales[i, j] - plain[name][block])
            assert error.max() <= 16 * scales[i, j]  # half a step of e4m3 near its largest value


def test_a_tokenizer_of_bytes(tmp_path: Path):
    make(tmp_path, "--tokenizer")
    tokenizer = Tokenizer.from_folder(tmp_path)
    text = "Grüße, 世界 \x00\x7f"
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size <= 300
    chat = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    joined = b"".join(tokenizer.token_bytes(i) for i in chat).decode()
    assert joined == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert len(chat) == 3 + len("user\nHi\nassistant\n")
    assert [tokenizer.token_bytes(i) for i in tokenizer.eos_token_ids] == [b"<|im_end|>"]


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path):
    assert "--experts: qwen3 has no such size" in refused(tmp_path, "--experts", "4")
    assert "--top-groups: qwen3-moe" in refused(
        tmp_path, "--family", "qwen3-moe", "--top-groups", "1"
    )
    assert "--kv-heads: deepseek-v3" in refused(
        tmp_path, "--family", "deepseek-v3", "--kv-heads", "4"
    )
    assert "n_group: 3 does not divide" in refused(
        tmp_path, "--family", "deepseek-v3", "--groups", "3"
    )
    output = refused(tmp_path, "--vocab", "258", "--tokenizer")
    assert "vocab: 258 is too small for a tokenizer of bytes (at least 259)" in output
    assert "files: 500 is not between 1 and" in refused(tmp_path, "--files", "500")
    assert not list(tmp_path.glob("*.safetensors"))


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_folder_is_left_as_it_was_when_nothing_is_written(tmp_path: Path):
    make(tmp_path, "--family", "deepseek-v3", "--tokenizer")
    before = contents(tmp_path)
    other = ("--family", "deepseek-v3", "--groups", "3", "--tokenizer", "--vocab", "400")
    assert "n_group: 3 does not divide" in refused(tmp_path, *other)
    assert contents(tmp_path) == before

    (tmp_path / "native.json").write_text("{}")  # such a folder would be read, not the safetensors
    assert "native form" in refused(tmp_path, "--family", "deepseek-v3")
    assert contents(tmp_path) == {**before, "native.json": b"{}"}


def test_weights_cut_short_are_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make(tmp_path)

    def full(writer: TensorWriter, name: str, array: np.ndarray) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TensorWriter, "write", full)
    assert "No space left on device" in refused(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        load_config(tmp_path)
