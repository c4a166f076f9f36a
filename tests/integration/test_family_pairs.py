"""DeepSeek-V3 and Qwen3-MoE with prefill and decode apart: tokens, pages, contexts and counts.

f32, against transformers' tokens and logprobs, for prompts on both sides of every edge of pages and
chunks. A latent cache goes from any tp to any tp; the MTP module's layer travels as one more.
"""

import zlib
from dataclasses import dataclass, field
from typing import Any

import golden_serving
import jax
import numpy as np
import pytest
from leases import lent
from nodes import CHUNK, PAGE, Pair, generate_all, mixed, timing_of, wait_until

from jaxdisagg.config import BatchConfig, Timeouts
from jaxdisagg.page_spans import pages_for

TOLERANCE = 1e-3
FEW = BatchConfig(chunks=(CHUNK,), decode_rows=(8,), max_model_len=256)
LENGTHS = (1, 2, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 1)
DEEPSEEK, MOE = "deepseek_serving", "qwen3_moe_serving"


@dataclass(frozen=True)
class Case:
    """A model and the meshes of its nodes."""

    model: str
    prefill: dict[str, int] = field(default_factory=dict)
    decode: dict[str, int] = field(default_factory=dict)
    mtp: bool = False
    more: dict[str, Any] = field(default_factory=lambda: {"batch": FEW})

    def __str__(self) -> str:
        sides = ["-".join(f"{k}{v}" for k, v in m.items()) for m in (self.prefill, self.decode)]
        return f"{self.model.split('_')[0]}-{sides[0]}-to-{sides[1]}{'-mtp' * self.mtp}"


FAST = [
    Case(DEEPSEEK, {"tp": 2}, {"tp": 1}),
    Case(DEEPSEEK, {"tp": 1}, {"tp": 2}, mtp=True),
    Case(MOE, {"tp": 2, "ep": 2}, {"tp": 2, "ep": 2}),
]
SLOW = [
    Case(DEEPSEEK, {"tp": 1}, {"tp": 2}),
    Case(DEEPSEEK, {"tp": 2}, {"tp": 1}, mtp=True, more={}),
    Case(DEEPSEEK, {"tp": 2}, {"tp": 2}, more={}),
    Case(DEEPSEEK, {"tp": 4}, {"tp": 4}, mtp=True),
    Case(DEEPSEEK, {"tp": 2}, {"tp": 1, "dp": 2, "ep": 2}),
    Case(DEEPSEEK, {"tp": 4}, {"tp": 1, "dp": 2}, mtp=True),
    Case(DEEPSEEK, {"tp": 2, "dp": 2, "ep": 4}, {"tp": 4, "ep": 4}, mtp=True),
    Case(MOE, {"tp": 1}, {"tp": 1}, more={}),
    Case(MOE, {"tp": 4, "ep": 4}, {"tp": 4}, more={}),
    Case(MOE, {"tp": 2, "dp": 2, "ep": 4}, {"tp": 2, "ep": 2}),
]


@pytest.fixture(scope="module")
def golden(golden_folder):
    """From a model's name to its golden; its best tokens stand clear of the tolerance."""

    def load(model: str) -> golden_serving.ServingGolden:
        found = golden_serving.load(model, golden_folder(model))
        assert found.gap > TOLERANCE, "a flip would prove nothing"
        assert set(map(len, found.prompts)) >= set(LENGTHS)
        return found

    return load


@dataclass
class Nodes:
    """The pair of a case, and what transformers answers."""

    case: Case
    pair: Pair
    golden: golden_serving.ServingGolden

    @property
    def written(self) -> int:
        """tp ranks of the decode node that a request's pages and context are written to."""
        return self.case.decode.get("tp", 1)


@pytest.fixture(
    scope="module",
    params=[*FAST, *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW)],
    ids=str,
)
def nodes(request, golden, golden_folder):
    c = request.param
    sides = {"prefill": c.prefill, "decode": c.decode}
    with Pair(golden_folder(c.model), shuffle=True, mtp=c.mtp, **sides, **c.more) as pair:
        yield Nodes(c, pair, golden(c.model))


def check(found, golden, new, only=None):
    indices = range(len(golden.prompts)) if only is None else only
    for i, generated in zip(indices, found, strict=True):
        where = f"prompt {i} of {len(golden.prompts[i])} tokens"
        assert generated.tokens == golden.tokens[i, :new].tolist(), where
        np.testing.assert_allclose(
            generated.logprobs, golden.logprobs[i, :new], atol=TOLERANCE, err_msg=where
        )


def drafts(node):
    return np.array([node.state()["drafts"][key] for key in ("proposed", "accepted")])


@pytest.mark.parametrize("at_once", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_tokens_apart_are_those_of_transformers(nodes, at_once):
    golden, node = nodes.golden, nodes.pair.decode.node
    new = golden.tokens.shape[1]
    before = drafts(node) if nodes.case.mtp else None
    found = generate_all(node, golden.prompts, new, at_once=at_once, prefix=f"t{at_once}")
    check(found, golden, new)
    nodes.pair.idle()
    if before is not None:  # a missing page of the module's layer, or a context, would show here
        right = np.sum([golden.accepted(i) for i in range(len(golden.prompts))], axis=0)
        assert (drafts(node) - before).tolist() == right.tolist()


@pytest.mark.parametrize("length", LENGTHS)
def test_pages_and_contexts_arrive_byte_for_byte(nodes, length):
    tokens = next(p for p in nodes.golden.prompts if len(p) == length)
    check_pages(nodes.pair, tokens, nodes.case.mtp, atol=1e-4)


@pytest.mark.slow
def test_pages_and_contexts_of_bfloat16_arrive_byte_for_byte(golden, golden_folder):
    sides = {"prefill": {"tp": 2}, "decode": {"tp": 4}}
    with Pair(golden_folder(DEEPSEEK), shuffle=True, mtp=True, dtype="bfloat16", **sides) as pair:
        for prompt in golden(DEEPSEEK).prompts[::4]:
            check_pages(pair, prompt, mtp=True, atol=1.0)


def check_pages(pair, tokens, mtp, atol):
    """Serve one prompt, then compare the pages and context rows of every device by checksum."""
    length = len(tokens)
    sent, got = lent(pair.prefill.node), lent(pair.decode.node)
    buffers = [
        [free[-1] for free in holder._contexts]  # the next to be lent on each dp rank
        for holder in (pair.prefill.node, pair.decode.messenger._attempts)
    ]
    generate_all(pair.decode.node, [tokens], 1, prefix=f"pages-{length}")
    pair.idle()
    if length == 1:
        assert not sent
        return
    (source,), (target,) = sent, got
    count = pages_for(length, PAGE)
    assert len(source.pages) == count
    prefill, decode = pair.prefill.runner.cache, pair.decode.runner.cache
    layers = len(prefill.layers)
    for layer in range(layers):
        ours = copies(prefill, source.rank, layer, source.pages)
        theirs = copies(decode, target.rank, layer, target.pages[:count])
        if prefill.spec.kind == "mla":
            assert len({zlib.crc32(o[: length - 1].tobytes()) for o in ours}) == 1
            ours = ours[:1] * len(theirs)
        # The decoder runs the last prompt token itself; with MTP it has also written the module's
        # row before that once more, from the context, on its own mesh.
        known = length - 1 - (mtp and layer == layers - 1)
        for rank, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
            equal = zlib.crc32(mine[:known].tobytes()) == zlib.crc32(its[:known].tobytes())
            assert equal, f"layer {layer} rank {rank}"
            np.testing.assert_allclose(mine[: length - 1], its[: length - 1], atol=atol)
            assert mine[: length - 1].any(axis=1).all(), "an empty row proves nothing"
    rows = [
        row
        for cache, lease, free in zip((prefill, decode), (source, target), buffers, strict=True)
        for row in copies(cache, lease.rank, layers, np.array([free[lease.rank]]))
    ]
    assert rows[0].any()
    assert len({zlib.crc32(row.tobytes()) for row in rows}) == 1, "a context for each device"


def copies(cache, dp_rank, layer, pages):
    """f32 [tokens, values], a row per token, of each tp rank of a dp rank."""
    tp = cache.mesh.size // cache.mesh.shape["dp"]
    found = []
    for rank in range(dp_rank * tp, (dp_rank + 1) * tp):
        read = cache.read_pages(rank, layer, pages).astype(np.float32)
        read = np.moveaxis(read, -2, 1) if read.ndim > 2 else read
        found.append(read.reshape(-1, read.shape[-1] if read.ndim == 2 else read[0, 0].size))
    return found


def test_pushed_counted_and_planned_agree(nodes):
    pair, case = nodes.pair, nodes.case
    sides = (pair.prefill.node, pair.decode.node)
    before = [node.state()["page_writes"] for node in sides]
    compiled = pair.decode.runner.compiles.count
    tokens = next(p for p in nodes.golden.prompts if len(p) == 3 * CHUNK + 1)
    generate_all(pair.decode.node, [tokens], 2, prefix="count")
    timing = timing_of(pair.decode.node, "count-0")
    pair.idle()
    after = [node.state()["page_writes"] for node in sides]
    # By hand: 192 rows are 12 pages of 16, of 3 layers and perhaps the module's; and the context.
    ranks, layers = case.decode.get("tp", 1), 3 + case.mtp
    expected = (12 * layers + 1) * ranks
    assert timing.page_writes == expected
    assert [b - a for a, b in zip(before, after, strict=True)] == [expected, expected]
    cache = pair.decode.runner.cache
    assert timing.bytes == ranks * (12 * layers * cache.page_bytes + cache.context_bytes)
    assert pair.decode.runner.compiles.count == compiled, "of both nodes: they share a process"
    assert pair.decode.engine.counters()["overshoots"] == 0


@pytest.mark.parametrize("layer", [0, -1])
def test_a_damaged_page_is_seen(nodes, layer, monkeypatch):
    """The control: with one page zeroed before decode, tokens or logprobs differ.

    But for the module's layer: its drafts are verified, so they cost time and never a token.
    """
    pair, golden = nodes.pair, nodes.golden
    node, cache = pair.decode.node, pair.decode.runner.cache
    harmless = nodes.case.mtp and layer == -1
    original = node.prefilled

    def damage(active, now):
        page = int(active.lease.pages[3]) + active.rank * cache.pages
        layers = list(cache.layers)
        layers[layer] = jax.jit(lambda c: c.at[page].set(0), donate_argnums=0)(layers[layer])
        cache.layers = tuple(layers)
        original(active, now)

    monkeypatch.setattr(node, "prefilled", damage)
    last, new = len(golden.prompts) - 1, golden.tokens.shape[1]
    found = generate_all(node, [golden.prompts[last]], new, prefix=f"damage{layer}")
    pair.idle()
    if harmless:
        check(found, golden, new, [last])
    else:
        with pytest.raises(AssertionError):
            check(found, golden, new, [last])


@pytest.mark.parametrize("nodes", FAST[:1], indirect=True, ids=str)
def test_one_source_device_after_another_serves_a_narrow_decode_node(nodes, monkeypatch):
    """The draw of each request: over several, every source rank writes (M17)."""
    pair = nodes.pair
    written: set[int] = set()
    original = pair.prefill.engine.add_plan

    def add_plan(step, ordinals, layers, writes, *more):
        written.update(w.ordinal for w in writes)
        return original(step, ordinals, layers, writes, *more)

    monkeypatch.setattr(pair.prefill.engine, "add_plan", add_plan)
    generate_all(pair.decode.node, nodes.golden.prompts[-24:], 1, at_once=8, prefix="draw")
    pair.idle()
    ordinals = {shard.ordinal for shard in pair.prefill.runner.cache.shards()}
    assert written == ordinals, "a source device never wrote"


# With drafts, and how many are right: test_deepseek_drafts.py.
TOGETHER = [
    (DEEPSEEK, {"batch": FEW}),
    (MOE, {"tp": 2, "ep": 2, "batch": FEW}),
    *(
        pytest.param(model, more, marks=pytest.mark.slow)
        for model, more in [
            (DEEPSEEK, {"mtp": True}),
            (DEEPSEEK, {"tp": 2, "dp": 2, "ep": 4}),
            (MOE, {}),
            (MOE, {"tp": 4, "dp": 2, "ep": 2}),
        ]
    ),
]


@pytest.mark.parametrize(("model", "more"), TOGETHER)
def test_tokens_in_one_process_are_those_of_transformers(golden, golden_folder, model, more):
    expected = golden(model)
    new = expected.tokens.shape[1]
    parts = mixed(golden_folder(model), **more)
    try:
        check(generate_all(parts.node, expected.prompts, new, at_once=8), expected, new)
    finally:
        parts.stop(10.0)


@pytest.mark.slow
def test_nodes_of_which_one_drafts_refuse_each_other_by_name(golden_folder):
    sides = {"prefill": {"mtp": True}, "decode": {"mtp": False}}
    few = {"batch": FEW, "timeouts": Timeouts(connect=1.0), "connected": False}
    with Pair(golden_folder(DEEPSEEK), **sides, **few) as pair:
        wait_until(
            lambda: "refused" in (pair.decode.messenger.unavailable() or ""), "it was refused"
        )
        assert "refused: mtp: off at decode-0, on at prefill-0)" in pair.decode.node.ready()[1]
