"""DeepSeek-V3's step programs leave cache and weights in place, and their collectives are few."""

import functools
from pathlib import Path
from typing import Any

import hlo_guard
import jax
import jax.numpy as jnp
import pytest
from paged_model import PagedModel
from random_checkpoint import write_checkpoint

from models import mla

LAYERS = 2  # one dense, one with experts
# Large, and unlike each other, so that no activation has as many elements as a cache shard or a
# weight.
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 1504,
    "hidden_size": 320,
    "intermediate_size": 1088,
    "moe_intermediate_size": 272,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 208,
    "kv_lora_rank": 176,
    "qk_nope_head_dim": 72,
    "qk_rope_head_dim": 16,
    "v_head_dim": 56,
    "n_routed_experts": 24,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 512,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
MODES = ["prefill", "decode"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guard")
    write_checkpoint(folder, CONFIG)
    return folder


def compile_steps(model: PagedModel, mode: str) -> tuple[str, str]:
    """The model's step and its module's as HLO; AssertionError if they move a cache or a weight."""
    where = {"mesh": model.mesh, "rules": model.rules}
    work = {0: [1]} if mode == "decode" else {0: [1, 2, 3], 1: [4]}
    batch, _ = model.batch(work, mode)
    *main, last = model.caches

    def step(params, batch, caches):
        return model.forward(params, batch, caches, mode)

    def draft(params, batch, hidden, cache):
        state, cache = model.family.draft(
            model.config, params, batch, hidden, batch.tokens, cache, mode=mode, **where
        )
        return model.family.draft_logits(model.config, params, state, **where), cache

    tokens = batch.tokens.shape[0]
    hidden = jax.ShapeDtypeStruct(
        (tokens, model.config.hidden_size), model.config.dtype, sharding=model.by_rank
    )
    texts = []
    for run, args, caches in (
        (step, (model.params, batch, tuple(main)), main),
        (draft, (model.params, batch, hidden, last), [last]),
    ):
        compiled = jax.jit(run, donate_argnums=len(args) - 1).lower(*args).compile()
        # 4 MB hold the largest activations of a step; the caches of a real pool are far larger.
        hlo_guard.check_in_place(compiled, caches, model.params.values(), temp_bytes=4 << 20)
        texts.append(compiled.as_text())
    return texts[0], texts[1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("dtype", "tp", "dp", "ep"),
    [
        ("float32", 1, 1, 1),
        ("bfloat16", 2, 2, 4),
        *(
            pytest.param(*mesh, marks=pytest.mark.slow)
            for mesh in [
                ("bfloat16", 1, 1, 1),
                ("bfloat16", 4, 1, 1),
                ("float32", 8, 1, 1),
                ("float32", 1, 4, 4),
                ("float32", 4, 2, 4),  # experts over tp
                ("float32", 2, 2, 1),
            ]
        ),
    ],
)
def test_no_cache_or_weight_is_moved(
    dtype: str, tp: int, dp: int, ep: int, mode: str, folder: Path
) -> None:
    model = PagedModel(folder, tp=tp, dp=dp, ep=ep, dtype=dtype, mtp=True)
    count = [functools.partial(hlo_guard.count, text) for text in compile_steps(model, mode)]
    # The embedding's and two a layer, experts and shared expert summed by one; the same in the
    # module. Experts over dp have tokens, then ids and weights gathered, in the one such layer of
    # each program, and their sums scattered back.
    assert [n("all-reduce") for n in count] == ([2 * LAYERS + 1, 3] if tp > 1 else [0, 0])
    over_dp = ep in (dp, dp * tp) and dp > 1
    assert [n("all-gather") for n in count] == ([2, 2] if over_dp else [0, 0])
    assert [n("reduce-scatter") for n in count] == ([1, 1] if over_dp else [0, 0])


def test_the_guard_sees_a_converted_weight(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a batched product of bf16 matrices, heads first, makes of w_uk on a CPU."""

    def at_once(q: jax.Array, w_uk: jax.Array) -> jax.Array:
        return jnp.matmul(q.transpose(1, 0, 2), w_uk).transpose(1, 0, 2)

    model = PagedModel(folder, dtype="bfloat16", mtp=True)
    monkeypatch.setattr(mla, "absorb", at_once)
    with pytest.raises(AssertionError, match="whole caches or weights"):
        compile_steps(model, "decode")
