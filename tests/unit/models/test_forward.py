"""What the forward pass promises around the model: the hook, padding, replicas, the interface."""

import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_model import PAGE_SIZE, PagedModel

from models.registry import FAMILIES

PROMPTS = [[5, 6, 7, 8, 9] * 4, [11, 12, 13]]


@pytest.fixture(scope="module")
def folder(golden_folder: Callable[[str], Path]) -> Path:
    return golden_folder("qwen3_tied")  # 8 heads over 2 KV heads


def run_with(model: PagedModel, hook, operands=()) -> tuple[np.ndarray, tuple[jax.Array, ...]]:
    batch, _ = model.batch(dict(enumerate(PROMPTS)), "prefill")
    step = jax.jit(
        functools.partial(model.forward, mode="prefill", hook=hook), donate_argnames="caches"
    )
    logits, caches = step(model.params, batch, model.caches, hook_operands=operands)
    return np.asarray(logits), caches


@pytest.mark.parametrize(("tp", "dp"), [(4, 1), (2, 2)])
def test_the_hook_sees_local_shards_of_the_layer_just_written(tp: int, dp: int, folder: Path):
    model = PagedModel(folder, tp=tp, dp=dp)
    model.caches = tuple(jnp.zeros_like(c, device=c.sharding) for c in model.caches)
    traced, seen = [], []

    def hook(step, x, cache, layer):
        traced.append((layer, x.shape, cache.shape))
        report = functools.partial(lambda *args: seen.append([layer, *map(float, args)]))
        jax.debug.callback(report, step, jnp.abs(cache).sum())
        return x

    _, caches = run_with(model, hook, (jnp.int32(41),))
    jax.effects_barrier()
    pages, kv_heads = model.caches[0].shape[0] // dp, 1
    assert traced == [(layer, (128, 64), (pages, kv_heads, 2, PAGE_SIZE, 24)) for layer in range(3)]
    assert len(seen) == 3 * tp * dp
    for layer, cache in enumerate(caches):
        written = sorted(float(np.abs(s.data).sum()) for s in cache.addressable_shards)
        ours = sorted(total for at, step, total in seen if at == layer and step == 41)
        np.testing.assert_allclose(ours, written, rtol=1e-5)
        assert min(written) > 0


def test_the_hook_stands_in_the_residual_stream(folder: Path):
    """A hook that changes x changes the result; one that returns it does not."""
    plain, _ = run_with(PagedModel(folder, tp=2), None)
    same, _ = run_with(PagedModel(folder, tp=2), lambda x, cache, layer: x)
    other, _ = run_with(PagedModel(folder, tp=2), lambda x, cache, layer: x + (layer == 1))
    np.testing.assert_array_equal(same, plain)
    assert np.abs(other[:20] - plain[:20]).max() > 1e-2


def test_padding_touches_the_scratch_page_alone(folder: Path):
    model = PagedModel(folder)
    logits, caches = run_with(model, None)
    assert np.isfinite(logits).all()
    used = {int(model.table[0, 0, 0]), int(model.table[0, 0, 1]), int(model.table[0, 1, 0]), 0}
    for cache in caches:
        host = np.asarray(cache)
        written = {int(page) for page in np.unique(np.nonzero(np.isfinite(host))[0])}
        assert written == used
        assert np.isfinite(host[model.table[0, 1, 0], :, :, :3]).all()
        assert np.isnan(host[model.table[0, 1, 0], :, :, 3:]).all()


def test_replicas_of_a_kv_head_stay_equal(folder: Path):
    model = PagedModel(folder, tp=4)  # two KV heads, two replicas of each
    _, caches = run_with(model, None)
    for cache in caches:
        by_head: dict[tuple, list[np.ndarray]] = {}
        for shard in cache.addressable_shards:
            by_head.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        assert [len(group) for group in by_head.values()] == [2, 2]
        for first, second in by_head.values():
            np.testing.assert_array_equal(first, second)


def test_addresses_are_stable_over_steps(folder: Path):
    model = PagedModel(folder, tp=4)

    def addresses():
        shards = (s for c in model.caches for s in c.addressable_shards)
        return [s.data.unsafe_buffer_pointer() for s in shards]

    model.append({0: PROMPTS[0]}, "prefill")
    before = addresses()
    for token in range(20):
        model.append({0: [token]}, "decode")
    assert addresses() == before


def test_every_parameter_has_axes_and_an_origin(folder: Path):
    model = PagedModel(folder)
    assert model.family in FAMILIES
    specs = model.family.abstract_params(model.config)
    assert len({spec.sources[0].name for spec in specs.values()}) == len(specs)
    for spec in specs.values():
        assert len(spec.axes) == len(spec.shape)
        (source,) = spec.sources
        assert np.prod(source.shape) == np.prod(spec.shape)
        permuted = tuple(source.view[i] for i in source.order)
        assert permuted == spec.shape
