"""Every step program leaves cache and weights in place; and the guard that says so can fail."""

from collections.abc import Callable

import hlo_guard
import jax
import jax.numpy as jnp
import pytest
from golden_cases import MODELS
from paged_model import PagedModel
from random_checkpoint import write_checkpoint

LAYERS = 2
# Large enough that no activation has as many elements as a cache shard or a weight.
CONFIG = {
    **MODELS["qwen3_untied"][0],
    "num_hidden_layers": LAYERS,
    "hidden_size": 320,
    "intermediate_size": 1088,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "vocab_size": 1504,
}
MODES = ["prefill", "decode"]
# (tied, tp, dp); of the tied models the head is all that differs
MESHES = [(False, *m) for m in [(1, 1), (2, 1), (4, 1), (1, 2)]] + [(True, 1, 1)]
MESHES += [pytest.param(*m, marks=pytest.mark.slow) for m in [(False, 2, 2), (True, 4, 1)]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., PagedModel]:
    folders = {}
    for tied in (False, True):
        folders[tied] = tmp_path_factory.mktemp("guard") / f"tied-{tied}"
        config = {**CONFIG, "tie_word_embeddings": tied}
        write_checkpoint(folders[tied], config)

    def build(*, tied: bool = False, **kwargs) -> PagedModel:
        return PagedModel(folders[tied], **kwargs)

    return build


def compile_step(step: Callable, model: PagedModel, mode: str) -> jax.stages.Compiled:
    """`step(params, batch, caches) -> (anything, caches)`, caches donated."""
    work = {0: [1]} if mode == "decode" else {0: [1, 2, 3], 1: [4]}
    batch, _ = model.batch(work, mode)
    return jax.jit(step, donate_argnums=2).lower(model.params, batch, model.caches).compile()


def check(compiled: jax.stages.Compiled, model: PagedModel) -> None:
    # 4 MB hold the largest activations of a step; the caches of a real pool are far larger.
    hlo_guard.check_in_place(compiled, model.caches, model.params.values(), temp_bytes=4 << 20)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("tied", "tp", "dp"), MESHES)
def test_no_cache_or_weight_is_moved(
    tied: bool, tp: int, dp: int, dtype: str, mode: str, model: Callable[..., PagedModel]
) -> None:
    m = model(tied=tied, tp=tp, dp=dp, dtype=dtype)
    compiled = compile_step(lambda *args: m.forward(*args, mode), m, mode)
    check(compiled, m)
    text = compiled.as_text()
    # The embedding's and two a layer; nothing is gathered, and dp alone reduces nothing.
    assert hlo_guard.count(text, "all-reduce") == (2 * LAYERS + 1 if tp > 1 else 0)
    assert hlo_guard.count(text, "all-gather") == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_hook_moves_nothing(mode: str, model: Callable[..., PagedModel]) -> None:
    m = model(tp=4)
    step_number = jnp.int32(3)

    def hook(step, x, cache, layer):
        return x + (step * 0 + layer * 0).astype(x.dtype) * cache[0, 0, 0, 0, 0]

    def step(params, batch, caches):
        return m.forward(params, batch, caches, mode, hook, (step_number,))

    compiled = compile_step(step, m, mode)
    check(compiled, m)
    assert hlo_guard.count(compiled.as_text(), "all-reduce") == 2 * LAYERS + 1


def rewrite(cache: jax.Array, page: jax.Array) -> jax.Array:
    """What must never be done: touch every page to change one."""
    pages = jnp.arange(cache.shape[0])[:, None, None, None, None]
    return jnp.where(pages == page, 0, cache)


def test_the_guard_sees_a_rewritten_cache(model: Callable[..., PagedModel]) -> None:
    m = model()

    def step(params, batch, caches):
        hidden, caches = m.forward(params, batch, caches, "decode")
        return hidden, tuple(rewrite(c, batch.slots[0]) for c in caches)

    with pytest.raises(AssertionError, match="whole caches or weights"):
        check(compile_step(step, m, "decode"), m)


def test_the_guard_sees_a_copied_cache(model: Callable[..., PagedModel]) -> None:
    m = model()
    batch, _ = m.batch({0: [1]}, "decode")
    step = jax.jit(lambda *args: m.forward(*args, "decode"))  # not donated
    compiled = step.lower(m.params, batch, m.caches).compile()
    with pytest.raises(AssertionError, match=r"whole caches or weights|aliased"):
        check(compiled, m)


def test_the_guard_sees_a_converted_head(model: Callable[..., PagedModel]) -> None:
    m = model(dtype="bfloat16")

    def step(params, batch, caches):
        logits, caches = m.forward(params, batch, caches, "decode")
        return logits @ params["head.table"].astype(jnp.float32), caches

    with pytest.raises(AssertionError, match="whole caches or weights"):
        check(compile_step(step, m, "decode"), m)
