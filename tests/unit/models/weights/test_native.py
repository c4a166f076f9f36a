"""The native form: restored onto other meshes and dtypes, and what is wrong with it named."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from random_checkpoint import write_checkpoint
from repository import REPOSITORY
from tensor_files import load_file

from jaxdisagg.mesh import make_mesh
from models.checkpoint import load_params, weights_fingerprint
from models.interface import Params
from models.registry import load_config, read_json_object
from models.sharding import make_rules
from models.weights.native import save_native

DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "q_lora_rank": 8,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 128,
    "torch_dtype": "float32",
}
DOWN = "layers.1.mlp.experts.down"
MTP = "mtp.projection"


def load(
    folder: Path, *, dtype: str = "float32", mtp: bool = True, tp: int = 1, dp: int = 1, **axes
) -> Params:
    _, config = load_config(folder)
    config = dataclasses.replace(config, dtype=dtype, mtp=mtp)
    return load_params(folder, config, make_mesh(tp=tp, dp=dp, kv_heads=1), make_rules(axes))


def save(folder: Path, source: Path, params: Params, dtype: str = "float32") -> Path:
    hf = read_json_object(source / "config.json")
    save_native(folder, params, hf, dtype=dtype, weights=weights_fingerprint(source))
    return folder


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("native") / "hf"
    write_checkpoint(folder, DEEPSEEK)
    return folder


@pytest.fixture(scope="module")
def native(hf: Path) -> Path:
    """Saved from four devices, experts cut over two of them."""
    params = load(hf, tp=2, dp=2, experts=["dp"])
    return save(hf.parent / "native", hf, params)


@pytest.mark.parametrize(
    ("tp", "dp", "axes"),
    [
        (1, 1, {}),
        (4, 2, {}),
        (2, 2, {"experts": ["dp", "kv", "rep"], "expert_ffn": []}),
    ],
)
def test_it_is_restored_onto_another_mesh(hf: Path, native: Path, tp: int, dp: int, axes: dict):
    stored = load_file(hf / "model.safetensors")
    down = [stored[f"model.layers.1.mlp.experts.{e}.down_proj.weight"].T for e in range(4)]
    expected = {DOWN: np.stack(down), MTP: stored["model.layers.2.eh_proj.weight"].T}
    before, after = load(hf, tp=tp, dp=dp, **axes), load(native, tp=tp, dp=dp, **axes)
    assert before.keys() == after.keys()
    for name, array in after.items():
        assert array.sharding == before[name].sharding, name
        value = expected.get(name, np.asarray(before[name]))
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, value[shard.index], name)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes_are_converted(tmp_path: Path, hf: Path, stored: str, dtype: str):
    save(tmp_path / "n", hf, load(hf, dtype=stored), stored)
    assert load_config(tmp_path / "n")[1].dtype == stored
    params = load(tmp_path / "n", dtype=dtype, tp=2)
    bias = "layers.1.mlp.bias"  # stays in f32
    assert {p.dtype for n, p in params.items() if not n.endswith("mlp.bias")} == {jnp.dtype(dtype)}
    assert params[bias].dtype == jnp.float32
    whole = load_file(hf / "model.safetensors")["model.layers.2.eh_proj.weight"].T
    expected = whole.astype(stored).astype(dtype)
    np.testing.assert_array_equal(np.asarray(params[MTP]), expected)


def test_without_mtp_its_parameters_are_left_out(native: Path):
    params = load(native, mtp=False)
    assert DOWN in params
    assert not any(name.startswith("mtp.") for name in params)


def test_a_folder_without_the_mtp_module(tmp_path: Path, hf: Path):
    save(tmp_path / "n", hf, load(hf, mtp=False))
    assert DOWN in load(tmp_path / "n", mtp=False)
    with pytest.raises(ValueError, match=rf"missing: {MTP} \[64, 32\]"):
        load(tmp_path / "n")


def test_everything_wrong_is_listed_at_once(tmp_path: Path, hf: Path):
    params = load(hf, tp=2)
    del params["norm.scale"]
    params["another"] = params[MTP]
    params[DOWN] = params[DOWN][:, :, :-1]
    params["head.table"] = params["head.table"].astype(jnp.int32)
    save(tmp_path / "n", hf, params)
    with pytest.raises(ValueError, match="4 problems") as error:
        load(tmp_path / "n")
    text = str(error.value)
    assert "missing: norm.scale [32]" in text
    assert "unknown: another [64, 32]" in text
    assert f"misshapen: {DOWN} [4, 16, 31], expected [4, 16, 32]" in text
    assert "dtype int32: head.table" in text


def test_a_mesh_that_does_not_fit_is_refused(native: Path):
    with pytest.raises(ValueError, match="num_attention_heads 4"):
        load(native, tp=8)


def test_the_fingerprint_is_that_of_the_source(hf: Path, native: Path):
    assert weights_fingerprint(native) == weights_fingerprint(hf)


def test_saving_over_parameters_is_refused(hf: Path, native: Path):
    with pytest.raises(ValueError, match="already there"):
        save(native, hf, load(hf))


def copy_of(native: Path, folder: Path) -> Path:
    for file in native.rglob("*"):
        if file.is_file():
            target = folder / file.relative_to(native)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, r"native\.json: version: 2 is not 1"),
        ({"weights": 7}, r"native\.json: weights: expected a text, got 7"),
    ],
)
def test_native_json_is_checked(tmp_path: Path, native: Path, change: dict, message: str):
    file = copy_of(native, tmp_path) / "native.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


LOAD = """
import sys
from jaxdisagg.mesh import make_mesh
from models.checkpoint import load_params
from models.registry import load_config
from models.sharding import DEFAULT_RULES
mesh = make_mesh(tp=1, dp=1, kv_heads=1)
for folder in sys.argv[1:]:
    try:
        load_params(folder, load_config(folder)[1], mesh, DEFAULT_RULES)
    except ValueError as error:
        print(error)
"""


def test_parameters_that_are_gone_or_cut(tmp_path: Path, native: Path):
    damaged = {gone: tmp_path / str(i) for i, gone in enumerate(("*", "_METADATA", "d/*", "cut"))}
    for gone, folder in damaged.items():
        params = copy_of(native, folder) / "params"
        if gone == "cut":
            for file in params.glob("ocdbt.process_0/d/*"):
                file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        for file in params.glob(gone):
            if file.is_file():
                file.unlink()
    # In a process of its own: reads that orbax began beside the failing one complain later.
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *map(str, damaged.values())],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=REPOSITORY,
    )
    said = done.stdout.splitlines()
    assert len(said) == len(damaged), done.stderr
    for line, (gone, folder) in zip(said, damaged.items(), strict=True):
        what = "cannot be read: " if gone == "cut" else "is no checkpoint of orbax"
        assert line.startswith(f"{folder}/params {what}")


def test_no_parameters_at_all(tmp_path: Path, native: Path):
    for name in ("config.json", "native.json"):
        (tmp_path / name).write_bytes((native / name).read_bytes())
    with pytest.raises(FileNotFoundError, match="no params in the native model folder"):
        load(tmp_path)


def test_bits_survive(tmp_path: Path, hf: Path):
    params = load(hf, dtype="bfloat16")
    odd = np.array([np.nan, -0.0, 1e-40, np.inf] * 8, ml_dtypes.bfloat16)
    params["norm.scale"] = jax.device_put(odd, params["norm.scale"].sharding)
    save(tmp_path / "n", hf, params, "bfloat16")
    again = np.asarray(load(tmp_path / "n", dtype="bfloat16", tp=4)["norm.scale"])
    np.testing.assert_array_equal(again.view(np.uint16), odd.view(np.uint16))
