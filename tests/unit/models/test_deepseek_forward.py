"""What DeepSeek-V3's forward pass and drafting promise around the model: hook, padding, copies."""

import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_cases import CASES
from paged_model import PAGE_SIZE, PagedModel

from models.interface import Caches, Hook

NAME = "deepseek_yarn"
WIDTH = CASES[NAME][0]["kv_lora_rank"] + CASES[NAME][0]["qk_rope_head_dim"]
LAYERS = CASES[NAME][0]["num_hidden_layers"]
PROMPTS = [[5, 6, 7, 8, 9] * 4, [11, 12, 13]]


@pytest.fixture(scope="module")
def folder(golden_folder: Callable[[str], Path]) -> Path:
    return golden_folder(NAME)


def run(
    model: PagedModel, hook: Hook | None = None, operands: tuple[jax.Array, ...] = ()
) -> tuple[np.ndarray, np.ndarray, Caches]:
    """A prefill step of the prompts and the module's on the same rows: logits, state, caches."""
    batch, _ = model.batch(dict(enumerate(PROMPTS)), "prefill")
    where = {"mesh": model.mesh, "rules": model.rules}

    @functools.partial(jax.jit, donate_argnums=2)
    def step(params, batch, caches, operands):
        how = {**where, "mode": "prefill", "hook": hook, "hook_operands": operands}
        hidden, new = model.family.forward(model.config, params, batch, caches[:-1], **how)
        state, last = model.family.draft(
            model.config, params, batch, hidden, batch.tokens, caches[-1], **how
        )
        return model.family.logits(model.config, params, hidden, **where), state, (*new, last)

    logits, state, caches = step(model.params, batch, model.caches, operands)
    return np.asarray(logits), np.asarray(state), caches


def test_the_hook_sees_the_latents_of_the_layer_just_written(folder: Path):
    tp = dp = 2
    model = PagedModel(folder, tp=tp, dp=dp, mtp=True)
    model.caches = tuple(jnp.zeros_like(c, device=c.sharding) for c in model.caches)
    traced, seen = [], []

    def hook(step, x, cache, layer):
        traced.append((layer, cache.shape))
        report = functools.partial(lambda *args: seen.append([layer, *map(float, args)]))
        jax.debug.callback(report, step, jnp.abs(cache).sum())
        return x

    _, _, caches = run(model, hook, (jnp.int32(41),))
    jax.effects_barrier()
    pages = model.caches[0].shape[0] // dp
    # The module's layer comes after the last.
    assert traced == [(layer, (pages, PAGE_SIZE, WIDTH)) for layer in range(LAYERS + 1)]
    assert len(seen) == (LAYERS + 1) * tp * dp
    for layer, cache in enumerate(caches):
        written = sorted(float(np.abs(s.data).sum()) for s in cache.addressable_shards)
        ours = sorted(total for at, step, total in seen if at == layer and step == 41)
        np.testing.assert_allclose(ours, written, rtol=1e-5)
        assert min(written) > 0


def test_the_hook_stands_in_the_residual_stream(folder: Path):
    """A hook that changes the module's x changes the draft, and nothing before it."""
    model = PagedModel(folder, mtp=True)
    plain, drafted, _ = run(model)
    model.reset()
    other, other_draft, _ = run(model, lambda x, cache, layer: x + (layer == LAYERS))
    np.testing.assert_array_equal(other, plain)
    assert np.abs(other_draft[:20] - drafted[:20]).max() > 1e-2


def test_padding_touches_the_scratch_page_alone(folder: Path):
    model = PagedModel(folder, mtp=True)
    logits, state, caches = run(model)
    assert np.isfinite(logits).all()
    assert np.isfinite(state).all()
    used = {int(model.table[0, 0, 0]), int(model.table[0, 0, 1]), int(model.table[0, 1, 0]), 0}
    for cache in caches:
        host = np.asarray(cache)
        written = {int(page) for page in np.unique(np.nonzero(np.isfinite(host))[0])}
        assert written == used
        assert np.isfinite(host[model.table[0, 1, 0], :3]).all()
        assert np.isnan(host[model.table[0, 1, 0], 3:]).all()


def test_the_copies_of_the_cache_stay_equal(folder: Path):
    """So that any rank of a prefill node can send what any rank of a decode node needs."""
    model = PagedModel(folder, tp=4, mtp=True)
    _, _, caches = run(model)
    for cache in caches:
        first, *others = [np.asarray(shard.data) for shard in cache.addressable_shards]
        assert len(others) == 3
        for other in others:
            np.testing.assert_array_equal(other, first)


def test_without_mtp_the_module_is_neither_loaded_nor_cached(folder: Path):
    """The checkpoint holds it all the same."""
    off, on = PagedModel(folder), PagedModel(folder, mtp=True)
    assert (len(off.caches), len(on.caches)) == (LAYERS, LAYERS + 1)
    module = set(on.params) - set(off.params)
    assert module
    assert all(name.startswith("mtp.") for name in module)
    assert set(off.params) < set(on.params)
    work = dict(enumerate(PROMPTS))
    plain = off.append(work, "prefill")
    drafting, _, _ = run(on)
    np.testing.assert_allclose(drafting[: len(PROMPTS[0])], plain[0], atol=1e-5)


def test_decode_is_not_told_apart_from_prefill_by_the_cache(folder: Path):
    """Either form of the attention writes the same rows, and reads those of the other."""
    one, other = PagedModel(folder), PagedModel(folder)
    one.append({0: PROMPTS[0]}, "prefill")
    for token in PROMPTS[0]:
        other.append({0: [token]}, "decode")
    for a, b in zip(one.caches, other.caches, strict=True):
        page = one.table[0, 0, 0]
        np.testing.assert_allclose(a[page], b[page], atol=2e-4)
    one_next, other_next = (m.append({0: [7]}, "decode")[0] for m in (one, other))
    np.testing.assert_allclose(one_next, other_next, atol=2e-4)
