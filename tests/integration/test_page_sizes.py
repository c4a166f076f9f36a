"""Nodes whose pages differ in size: tokens, cache rows, counts, and pages of either side's own."""

from dataclasses import dataclass, field
from typing import Any

import golden_serving
import numpy as np
import pytest
from leases import lent
from nodes import Pair, generate_all, timing_of

from jaxdisagg.api import RequestError
from jaxdisagg.config import BatchConfig, CacheConfig

TOLERANCE = 1e-3
# Chunks end within pages and spans: 40 is a multiple of none of the page sizes.
BATCH = BatchConfig(chunks=(40,), prefill_rows=4, decode_rows=(8,), max_model_len=320)


@dataclass(frozen=True)
class Case:
    """A model, the page sizes of both sides, and their meshes."""

    model: str
    pages: tuple[int, int]
    prefill: dict[str, int] = field(default_factory=dict)
    decode: dict[str, int] = field(default_factory=dict)
    mtp: bool = False

    def __str__(self) -> str:
        meshes = [
            "".join(f"-{k}{v}" for k, v in mesh.items()) for mesh in (self.prefill, self.decode)
        ]
        sides = [f"page{size}{mesh}" for size, mesh in zip(self.pages, meshes, strict=True)]
        return f"{self.model.split('_')[0]}-{'-to-'.join(sides)}{'-mtp' * self.mtp}"


FAST = [
    Case("qwen3_serving", (16, 24), {"tp": 2}, {"tp": 4}),
    Case("deepseek_serving", (64, 16), {"tp": 1}, {"tp": 2}),
]
SLOW = [
    Case("qwen3_serving", (16, 64), {"tp": 4}, {"tp": 1, "dp": 2}),
    Case("qwen3_serving", (64, 16), {"tp": 1, "dp": 2}, {"tp": 2}),
    Case("deepseek_serving", (24, 16), {"tp": 2}, {"tp": 2, "dp": 2}),
    Case("deepseek_serving", (16, 40), {"tp": 2}, {"tp": 1}, mtp=True),
]


def page_size(size: int) -> dict[str, Any]:
    return {"cache": CacheConfig(page_size=size, pages=4096 // size)}


@pytest.fixture(
    scope="module",
    params=[*FAST, *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW)],
    ids=str,
)
def nodes(request, golden_folder):
    case: Case = request.param
    folder = golden_folder(case.model)
    golden = golden_serving.load(case.model, folder)
    assert golden.gap > TOLERANCE, "a flip would prove nothing"
    sides = {
        "prefill": {**case.prefill, **page_size(case.pages[0])},
        "decode": {**case.decode, **page_size(case.pages[1])},
    }
    with Pair(folder, shuffle=True, batch=BATCH, mtp=case.mtp, **sides) as pair:
        yield case, pair, golden


def test_tokens_are_those_of_transformers(nodes):
    _, pair, golden = nodes
    new = golden.tokens.shape[1]
    found = generate_all(pair.decode.node, golden.prompts, new, at_once=8, prefix="t")
    for i, generated in enumerate(found):
        where = f"prompt {i} of {len(golden.prompts[i])} tokens"
        assert generated.tokens == golden.tokens[i, :new].tolist(), where
        np.testing.assert_allclose(
            generated.logprobs, golden.logprobs[i, :new], atol=TOLERANCE, err_msg=where
        )
    pair.idle()


def rows_of(cache, dp_rank, layer, pages, count):
    """[count, K, planes, H] of the first tokens in `pages`: the heads of all tp ranks together."""
    tp = cache.mesh.size // cache.mesh.shape["dp"]
    kv = cache.mesh.shape["kv"]
    parts = []
    for rank in range(0, tp, tp // kv):
        read = cache.read_pages(dp_rank * tp + rank, layer, pages)
        if cache.spec.kind == "mla":
            read = read[:, None, None]
        parts.append(np.moveaxis(read, 3, 1).reshape(-1, *read.shape[1:3], read.shape[4])[:count])
    return np.concatenate(parts, axis=1)


def test_rows_arrive_byte_for_byte_and_each_side_counts_its_own_pages(nodes):
    case, pair, golden = nodes
    prompts = [p for p in golden.prompts if len(p) > 1]
    for i, prompt in enumerate(prompts):
        name, rows = f"rows-{i}", len(prompt) - 1
        sent, got = lent(pair.prefill.node), lent(pair.decode.node)
        generate_all(pair.decode.node, [prompt], 1, prefix=name)
        pair.idle()
        (source,), (target,) = sent, got
        assert len(source.pages) == -(-rows // case.pages[0])
        timing = timing_of(pair.decode.node, f"{name}-0")
        assert timing.pages == -(-rows // case.pages[1])
        prefill, decode = pair.prefill.runner.cache, pair.decode.runner.cache
        for layer in range(len(prefill.layers)):
            # The decoder has written the MTP module's last row once more, from the context.
            known = rows - (case.mtp and layer == len(prefill.layers) - 1)
            ours = rows_of(prefill, source.rank, layer, source.pages, known)
            theirs = rows_of(decode, target.rank, layer, target.pages, known)
            assert ours.any(axis=(1, 2, 3)).all(), "an empty row proves nothing"
            np.testing.assert_array_equal(ours, theirs, err_msg=f"{name}, layer {layer}")


def moved(case, cache, rows):
    """Units and bytes, from the cuts alone: the runs of rows within one page of either side, the
    last one whole, for each head and K/V plane that a decode rank holds; and its context.
    """
    tokens = np.arange(rows)
    cuts = np.unique(np.stack([tokens // size for size in case.pages]), axis=1).shape[1]
    sent = min(-(-rows // size) * size for size in case.pages)
    spec, mesh = cache.spec, cache.mesh
    tp = mesh.size // mesh.shape["dp"]
    held = spec.num_kv_heads // mesh.shape["kv"]
    planes = held * spec.num_layers * (1 if spec.kind == "mla" else 2)
    row = spec.head_dim * np.dtype(spec.dtype).itemsize
    return tp * (cuts * planes + 1), tp * (sent * planes * row + cache.context_bytes)


def test_pushed_counted_and_planned_agree(nodes):
    case, pair, golden = nodes
    sides = (pair.prefill.node, pair.decode.node)
    for i, prompt in enumerate(sorted(golden.prompts, key=len)[-4:]):
        before = [node.state()["page_writes"] for node in sides]
        generate_all(pair.decode.node, [prompt], 1, prefix=f"count-{i}")
        timing = timing_of(pair.decode.node, f"count-{i}-0")
        pair.idle()
        after = [node.state()["page_writes"] for node in sides]
        expected, size = moved(case, pair.decode.runner.cache, len(prompt) - 1)
        assert (timing.page_writes, timing.bytes) == (expected, size)
        assert [b - a for a, b in zip(before, after, strict=True)] == [expected, expected]


def test_a_prompt_is_refused_by_the_pages_of_the_side_that_lacks_them(golden_folder):
    """100 tokens are 13 pages of 8 at the prefill node, which has 9, and 4 of 32 at the other."""
    few = BatchConfig(chunks=(16,), decode_rows=(2,), max_model_len=256)
    sides = {
        "prefill": {"cache": CacheConfig(page_size=8, pages=10)},
        "decode": {"cache": CacheConfig(page_size=32, pages=10)},
    }
    with Pair(golden_folder("qwen3_untied"), batch=few, **sides) as pair:
        with pytest.raises(RequestError, match="13 source pages, prefill-0 has 9") as caught:
            generate_all(pair.decode.node, [list(range(100))], 2)
        assert caught.value.status == 400
        fits = generate_all(pair.decode.node, [list(range(70))], 2, prefix="fits")
        assert fits[0].finish_reason == "length"
        pair.idle()
