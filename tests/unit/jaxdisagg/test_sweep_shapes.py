"""The kept configs are the published models; their cache and work against figures by hand."""

import json
import math
from pathlib import Path

import pytest
from repository import REPOSITORY

from jaxdisagg.config import NodeConfig
from jaxdisagg.sweep.compute import Device, active_parameters, layer_work
from jaxdisagg.sweep.predict import check_tokens, fit_side
from jaxdisagg.sweep.shapes import find_config, known_names, read_shapes
from jaxdisagg.sweep.words import headline

CONFIGS = REPOSITORY / "scripts" / "model_configs"
BASE = NodeConfig(role="mixed", model=Path("none"))


def side(name: str, mesh: str, **more):
    return fit_side(mesh, BASE, read_shapes(find_config(name, CONFIGS), **more))


# What the model cards say, in 10^9: all parameters, and those that are activated for a token.
PUBLISHED = {
    "deepseek-r1": (671, 37),
    "qwen3-coder-480b": (480, 35),
    "qwen3-235b": (235, 22),
    "qwen3-30b": (30.5, 3.3),
    "smollm2-135m": (0.135, 0.135),
}


def test_every_kept_config_has_the_published_number_of_parameters():
    assert known_names(CONFIGS) == sorted(PUBLISHED)
    for name, (everything, met) in PUBLISHED.items():
        found = active_parameters(side(name, "tp=1").fit)
        assert found[0] / 1e9 == pytest.approx(everything, rel=0.005), name
        assert found[1] / 1e9 == pytest.approx(met, rel=0.02), name


@pytest.mark.parametrize(
    ("name", "mesh", "expected"),
    [
        # layers x KV heads x (K and V) x head_dim x 2 bytes
        ("qwen3-coder-480b", "tp=1", 62 * 8 * 2 * 128 * 2),  # 253,952
        ("qwen3-coder-480b", "tp=4,dp=2", 62 * 2 * 2 * 128 * 2),
        ("qwen3-coder-480b", "tp=8", 31_744),
        ("qwen3-coder-480b", "tp=32", 31_744),  # copies: no device has less than a head
        ("qwen3-235b", "tp=4", 94 * 1 * 2 * 128 * 2),
        ("qwen3-30b", "tp=1", 48 * 4 * 2 * 128 * 2),
        ("smollm2-135m", "tp=3", 30 * 1 * 2 * 64 * 2),
        # layers x (latent + rope) x 2 bytes, on every rank
        ("deepseek-r1", "tp=1", 61 * (512 + 64) * 2),  # 70,272
        ("deepseek-r1", "tp=8", 70_272),
        ("deepseek-r1", "tp=4,dp=8,ep=8,page_size=64", 70_272),
    ],
)
def test_cache_bytes_of_a_token_on_a_device(name, mesh, expected):
    assert side(name, mesh).fit.layout.token_bytes == expected


def test_dtype_and_mtp_change_the_cache_as_they_do_a_nodes():
    assert side("qwen3-30b", "tp=1", dtype="float32").fit.layout.token_bytes == 2 * 98_304
    assert side("deepseek-r1", "tp=8", mtp=True).fit.layout.token_bytes == 62 * 576 * 2


def test_the_headline_says_what_the_model_is():
    text = headline(side("qwen3-coder-480b", "tp=8").fit, "qwen3-coder-480b")
    assert "62 layers with 8 KV heads of 128, bfloat16: 253,952 cache bytes a token" in text
    assert "480 B parameters (35.5 B for a token)" in text
    assert "61 layers with a latent of 576" in headline(
        side("deepseek-r1", "tp=8").fit, "deepseek-r1"
    )


def test_the_work_of_a_layer_is_that_of_its_matrices():
    works = layer_work(side("qwen3-coder-480b", "tp=8").fit)
    assert len(works) == 62
    q, kv = 6144 * 96 * 128, 6144 * 8 * 128
    assert works[5].attention == 2 * (q + 2 * kv + q) / 8
    router, expert = 6144 * 160, 3 * 6144 * 2560
    assert works[5].mlp == 2 * (router + 8 * expert / 8)  # the router on every rank
    assert works[5].pair == 2 * (128 + 128) * 96 / 8
    wide = layer_work(side("qwen3-coder-480b", "tp=16").fit)[5]
    assert wide.attention == 2 * (q / 16 + 2 * kv / 8 + q / 16)  # two ranks repeat a KV head


def test_the_work_of_a_latent_layer_repeats_the_low_ranks():
    works = layer_work(side("deepseek-r1", "tp=8").fit)
    on_all = 7168 * 1536 + 7168 * 576  # down to the latents
    cut = 1536 * 128 * 192 + 2 * 128 * 128 * 512 + 128 * 128 * 7168
    assert works[0].attention == works[60].attention == 2 * (on_all + cut / 8)
    assert works[0].pair == 2 * (192 + 128) * 128 / 8
    assert works[2].mlp == 2 * 3 * 7168 * 18432 / 8  # of the three dense layers
    expert = 3 * 7168 * 2048
    assert works[3].mlp == 2 * (7168 * 256 + 8 * expert / 8 + expert / 8)


def test_mtp_adds_a_layer_with_its_projection():
    works = layer_work(side("deepseek-r1", "tp=8", mtp=True).fit)
    assert len(works) == 62
    assert works[61].attention == works[60].attention + 2 * 2 * 7168 * 7168
    assert works[61].mlp == works[60].mlp


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_experts_over_dp_meet_the_tokens_of_all_dp_ranks(ep):
    base = layer_work(side("qwen3-30b", "tp=4").fit)[0]
    assert layer_work(side("qwen3-30b", f"tp=4,dp=2,ep={ep}").fit)[0] == base


def test_pairs_are_causal_and_chunks_add_up_to_the_whole():
    work = layer_work(side("smollm2-135m", "tp=1").fit)[0]
    pairs = sum(range(1, 101))  # token i attends to i others and itself
    assert work.before_pages(0, 100) == 100 * work.attention + pairs * work.pair
    parts = work.before_pages(0, 64) + work.before_pages(64, 100)
    assert parts == work.before_pages(0, 100)
    assert work.after_pages(64, 100) == 36 * work.mlp


def test_a_device_needs_the_share_that_it_reaches():
    assert Device(100, 0.5).seconds(5e13) == 1.0
    for field, values in (("tflops", (0, -1, math.inf)), ("mfu", (0, 1.5))):
        for value in values:
            with pytest.raises(ValueError, match=f"^{field}: "):
                Device(**({"tflops": 1, "mfu": 1} | {field: value}))


def test_a_config_is_a_file_a_folder_or_a_name(tmp_path: Path):
    kept = (CONFIGS / "qwen3-30b.json").read_text()
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text(kept)
    (tmp_path / "other.json").write_text(kept)
    for text, name in (("my-model", "my-model"), ("other.json", "other")):
        shapes = read_shapes(find_config(str(tmp_path / text), CONFIGS))
        assert (shapes.name, shapes.config.num_layers) == (name, 48)
    assert find_config("deepseek-r1", CONFIGS) == CONFIGS / "deepseek-r1.json"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"config: no config\.json in the model folder"):
        find_config(str(tmp_path / "empty"), CONFIGS)
    with pytest.raises(ValueError, match=r"config: 'gpt-5' is no file.*deepseek-r1, qwen3-235b"):
        find_config("gpt-5", CONFIGS)


def test_what_no_family_reads_is_refused_with_file_and_field(tmp_path: Path):
    fields = json.loads((CONFIGS / "qwen3-30b.json").read_text())
    file = tmp_path / "bad.json"
    for change, message in (
        ({"num_hidden_layers": "many"}, "bad.json: num_hidden_layers: expected an integer"),
        ({"architectures": ["Mamba"]}, "bad.json: architectures: Mamba is not supported"),
    ):
        file.write_text(json.dumps(fields | change))
        with pytest.raises(ValueError, match=message):
            read_shapes(file)
    file.write_text("{")
    with pytest.raises(ValueError, match=r"^\S*bad.json is not valid JSON"):
        read_shapes(file)
    with pytest.raises(ValueError, match="dtype: 'int8'"):
        read_shapes(CONFIGS / "qwen3-30b.json", dtype="int8")
    with pytest.raises(ValueError, match="mtp: this model has no MTP module"):
        read_shapes(CONFIGS / "qwen3-30b.json", mtp=True)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("tp=3", "tp=3 does not fit 4 KV heads"),
        ("tp=64", "num_attention_heads 32 does not divide into 64 shards"),
        ("tp=2,ep=4", "ep=4 must be 1"),
        ("tp=0", "tp=0 must be at least 1"),
        ("pp=2", "'pp=2': expected tp="),
        ("tp=2,page_size=0", "page_size=0 must be at least 1"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_by_field(mesh, message):
    with pytest.raises(ValueError, match=message):
        side("qwen3-30b", mesh)


@pytest.mark.parametrize("length", [0, 1, 40_961])
def test_a_prompt_that_moves_nothing_or_is_too_long_is_refused(length):
    shapes = read_shapes(find_config("qwen3-30b", CONFIGS))
    check_tokens([2, 40_960], shapes)
    with pytest.raises(ValueError, match=f"tokens: {length}, must be 2 to 40960"):
        check_tokens([100, length], shapes)
