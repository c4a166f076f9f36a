"""Step programs with experts: no weight is moved whole, and only the collectives that are meant."""

from pathlib import Path

import hlo_guard
import jax
import pytest
from golden_cases import MODELS
from paged_model import PagedModel
from random_checkpoint import write_checkpoint

LAYERS = 2
# Large enough that no activation has as many elements as a cache shard or a weight.
CONFIG = {
    **MODELS["qwen3_untied"][0],
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": LAYERS,
    "hidden_size": 320,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "vocab_size": 1504,
    "moe_intermediate_size": 224,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}
# (tp, dp, ep)
FAST = [(1, 1, 1), (4, 1, 1), (2, 2, 2)]
SLOW = [(4, 1, 4), (1, 2, 1), (1, 2, 2), (2, 2, 1), (2, 2, 4)]
MESHES = FAST + [pytest.param(*m, marks=pytest.mark.slow) for m in SLOW]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guard") / "experts"
    write_checkpoint(folder, CONFIG)
    return folder


@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("tp", "dp", "ep"), MESHES)
def test_no_cache_or_weight_is_moved(
    tp: int, dp: int, ep: int, dtype: str, mode: str, folder: Path
) -> None:
    model = PagedModel(folder, tp=tp, dp=dp, ep=ep, dtype=dtype)
    batch, _ = model.batch({0: [1]} if mode == "decode" else {0: [1, 2, 3], 1: [4]}, mode)

    def step(params, batch, caches):
        return model.forward(params, batch, caches, mode)

    compiled = jax.jit(step, donate_argnums=2).lower(model.params, batch, model.caches).compile()
    # 4 MB hold the largest activations and one expert; all experts of a layer are far larger.
    params = model.params.values()
    hlo_guard.check_in_place(compiled, model.caches, params, temp_bytes=4 << 20)
    text = compiled.as_text()
    travels = dp > 1 and ep in (dp, dp * tp)
    assert hlo_guard.count(text, "all-reduce") == (2 * LAYERS + 1 if tp > 1 else 0)
    assert hlo_guard.count(text, "all-gather") == 2 * LAYERS * travels
    assert hlo_guard.count(text, "reduce-scatter") == LAYERS * travels
