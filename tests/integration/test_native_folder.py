"""A prefill node on safetensors and a decode node on the native form of the same weights."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import golden_serving
import jax
from convert_checkpoint import convert
from nodes import CHUNK, Pair, generate_all

from jaxdisagg.config import BatchConfig, MeshConfig, NodeConfig
from jaxdisagg.model_loading import LoadedModel, load_model

MODEL = "deepseek_serving"
TOKENS = 8


def test_two_forms_of_one_model_serve_together(golden_folder: Callable[[str], Path], tmp_path):
    golden = golden_serving.load(MODEL, golden_folder(MODEL))
    native = tmp_path / "native"
    # Written from a mesh that neither node has.
    convert(golden_folder(MODEL), native, mesh=MeshConfig(tp=4, dp=2, ep=2))

    def load(node: NodeConfig, devices: Sequence[jax.Device]) -> LoadedModel:
        model = native if node.role == "decode" else node.model
        return load_model(replace(node, model=model), devices)

    batch = BatchConfig(chunks=(CHUNK,), decode_rows=(8,), max_model_len=256)
    decode = {"tp": 2}
    with Pair(golden_folder(MODEL), decode=decode, load=load, mtp=True, batch=batch) as pair:
        found = generate_all(pair.decode.node, golden.prompts[:8], TOKENS, at_once=8)
        pair.idle()
    assert [one.tokens for one in found] == golden.tokens[:8, :TOKENS].tolist()
