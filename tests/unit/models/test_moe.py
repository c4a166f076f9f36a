"""The sharded dispatch to experts: the same sum of experts on every mesh, padding kept out."""

import dataclasses
import functools

import expert_reference as reference
import hlo_guard
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdisagg.mesh import expert_axes, make_mesh
from models.expert_sums import blocked, grouped, ragged, sum_experts
from models.layers import abstract_params
from models.moe import Experts, moe
from models.sharding import make_rules

TOKENS, HIDDEN, FFN, EXPERTS, CHOICES = 32, 40, 24, 16, 3
PADDING = [3, 4, 17, 31]

# (tp, dp, KV heads, ep)
FAST = [(1, 1, 1, 1), (4, 1, 2, 4), (4, 1, 1, 1), (1, 2, 1, 2), (2, 2, 2, 2), (4, 2, 2, 8)]
SLOW = [
    (tp, dp, kv, ep)
    for tp, dp, kv in [(2, 1, 1), (8, 1, 2), (8, 1, 1), (1, 8, 1), (2, 2, 1), (2, 4, 2), (4, 2, 2)]
    for ep in sorted({1, dp, tp, dp * tp})
]
LAYOUTS = FAST + [pytest.param(*m, marks=pytest.mark.slow) for m in SLOW]


@dataclasses.dataclass
class Case:
    """Operands of `moe`; rows of padding are NaN and their ids and weights nonsense."""

    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    live: np.ndarray
    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray
    shared: tuple[np.ndarray, ...] | None = None

    def expected(self) -> np.ndarray:
        return reference.experts(**vars(self))


def make_case(seed: int = 0, *, shared: bool = True) -> Case:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(shape[-2]))

    live = np.ones(TOKENS, bool)
    live[PADDING] = False
    x = rng.standard_normal((TOKENS, HIDDEN), dtype=np.float32)
    weights = rng.random((TOKENS, CHOICES), dtype=np.float32)
    x[~live], weights[~live] = np.nan, np.nan
    ids = np.stack([rng.permutation(EXPERTS)[:CHOICES] for _ in range(TOKENS)]).astype(np.int32)
    wide, narrow = (HIDDEN, 2 * FFN), (2 * FFN, HIDDEN)
    return Case(
        x,
        ids,
        weights,
        live,
        normal(EXPERTS, HIDDEN, FFN),
        normal(EXPERTS, HIDDEN, FFN),
        normal(EXPERTS, FFN, HIDDEN),
        (normal(*wide), normal(*wide), normal(*narrow)) if shared else None,
    )


def compile_and_run(case: Case, mesh, rules, dtype="float32") -> tuple[np.ndarray, str]:
    """The result, and the text of the program."""

    def put(array: np.ndarray, *axes: str | None, dtype=dtype) -> jax.Array:
        return jax.device_put(jnp.asarray(array, dtype), rules.sharding(mesh, axes))

    wide, narrow = ("experts", None, "expert_ffn"), ("experts", "expert_ffn", None)
    operands = (
        put(case.x, "batch"),
        put(case.ids, "batch", dtype="int32"),
        put(case.weights, "batch", dtype="float32"),
        put(case.live, "batch", dtype="bool"),
        put(case.gate, *wide),
        put(case.up, *wide),
        put(case.down, *narrow),
    )
    shared = None
    if case.shared is not None:
        gate, up, down = case.shared
        shared = (put(gate, None, "ffn"), put(up, None, "ffn"), put(down, "ffn", None))
    step = jax.jit(functools.partial(moe, mesh=mesh, rules=rules))
    compiled = step.lower(*operands, shared=shared).compile()
    out = compiled(*operands, shared=shared)
    assert out.sharding.is_equivalent_to(rules.sharding(mesh, ("batch", None)), 2)
    return np.asarray(out, np.float32), compiled.as_text()


def run_on(case: Case, tp: int, dp: int, kv: int, ep: int, **more) -> tuple[np.ndarray, str]:
    mesh = make_mesh(tp=tp, dp=dp, kv_heads=kv)
    rules = make_rules(expert_axes(tp=tp, dp=dp, ep=ep))
    return compile_and_run(case, mesh, rules, **more)


@pytest.mark.parametrize(("tp", "dp", "kv", "ep"), LAYOUTS)
def test_every_layout_gives_the_sum_of_the_chosen_experts(tp: int, dp: int, kv: int, ep: int):
    case = make_case()
    out, text = run_on(case, tp, dp, kv, ep)
    np.testing.assert_allclose(out, case.expected(), atol=2e-6)
    # One sum over the tensor ranks; tokens travel only where experts are cut over dp.
    travels = dp > 1 and ep in (dp, dp * tp)
    assert hlo_guard.count(text, "all-reduce") == (tp > 1)
    assert hlo_guard.count(text, "all-gather") == 2 * travels
    assert hlo_guard.count(text, "reduce-scatter") == travels
    assert hlo_guard.count(text, "all-to-all") == hlo_guard.count(text, "collective-permute") == 0


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_without_a_shared_mlp(ep: int):
    case = make_case(1, shared=False)
    out, _ = run_on(case, 2, 2, 2, ep)
    np.testing.assert_allclose(out, case.expected(), atol=2e-6)


def test_all_tokens_to_one_expert():
    """The worst imbalance: no expert has a capacity that could overflow."""
    case = make_case(2)
    case.ids[:] = [5, 14, 6]
    for layout in [(1, 1, 1, 1), (2, 2, 2, 4)]:
        out, _ = run_on(case, *layout)
        np.testing.assert_allclose(out, case.expected(), atol=2e-6)


def test_an_idle_rank():
    """A dp rank whose rows are all padding still computes its experts for the others."""
    case = make_case(3)
    half = TOKENS // 2
    case.live[half:], case.x[half:] = False, np.nan
    out, _ = run_on(case, 1, 2, 1, 2)
    np.testing.assert_allclose(out, case.expected(), atol=2e-6)
    assert np.abs(out[:half]).max() > 0.1


@pytest.mark.parametrize("ep", [1, 4])
def test_an_expert_that_no_live_token_chose_is_not_read(ep: int):
    case = make_case(4)
    case.ids[case.live] %= 8
    case.ids[~case.live] = [8, 9, 10]
    expected = case.expected()
    for array in (case.gate, case.up, case.down):
        array[8:] = np.nan
    out, _ = run_on(case, 2, 2, 1, ep)
    np.testing.assert_allclose(out, expected, atol=2e-6)


def test_bf16_sums_in_f32():
    case = make_case(5)
    case.ids[case.live] %= 4  # many tokens an expert, many rounds
    for name in ("x", "gate", "up", "down"):
        setattr(case, name, np.asarray(jnp.asarray(getattr(case, name), jnp.bfloat16), np.float32))
    case.shared = None
    out, _ = run_on(case, 1, 1, 1, 1, dtype="bfloat16")
    # Two roundings to bf16, of the inner activations and of the result.
    np.testing.assert_allclose(out, case.expected(), atol=0.02, rtol=0.01)


@pytest.mark.parametrize(
    "overrides",
    [
        {"experts": "kv", "expert_ffn": "rep"},
        {"experts": "dp", "expert_ffn": []},  # copies on the tensor ranks, beside a cut shared MLP
        {"experts": [], "expert_ffn": "dp"},
        {"experts": [], "expert_ffn": []},
        {"experts": ["kv", "rep"], "expert_ffn": [], "ffn": []},
        {"experts": "kv", "expert_ffn": [], "ffn": "rep"},
    ],
    ids=str,
)
def test_layouts_of_a_rule_file(overrides: dict):
    case = make_case(6)
    out, text = compile_and_run(case, make_mesh(tp=4, dp=2, kv_heads=2), make_rules(overrides))
    np.testing.assert_allclose(out, case.expected(), atol=2e-6)
    assert hlo_guard.count(text, "all-reduce") == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"experts": "kv"}, "'experts' and 'expert_ffn' of one array both map to mesh axis 'kv'"),
        ({"ffn": "dp"}, "ffn: shared experts cannot shard over 'dp'"),
    ],
)
def test_rules_that_cannot_work_are_refused(overrides: dict, message: str):
    with pytest.raises(ValueError, match=message):
        compile_and_run(make_case(), make_mesh(tp=2, dp=2, kv_heads=2), make_rules(overrides))


def sorted_operands(case: Case) -> tuple[np.ndarray, ...]:
    flat = np.where(case.live[:, None], case.ids, EXPERTS).reshape(-1)
    sizes = np.bincount(flat, minlength=EXPERTS + 1)[:EXPERTS].astype(np.int32)
    order = np.argsort(flat, kind="stable").astype(np.int32)
    return case.x, case.weights, order, sizes, case.gate, case.up, case.down


@pytest.mark.parametrize("block", [1, 8, 16, 128])
def test_blocks_of_any_size(block: int):
    case = make_case(7, shared=False)
    out = jax.jit(functools.partial(blocked, block=block))(*sorted_operands(case))
    np.testing.assert_allclose(out, case.expected(), atol=2e-6)


def test_grouped_matmuls_give_the_same():
    """The GPU's way, run on this platform."""
    case = make_case(8, shared=False)
    out = jax.jit(ragged)(*sorted_operands(case))
    np.testing.assert_allclose(out, case.expected(), atol=2e-6)


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_the_kernels_sums_are_the_same(backend: str):
    """Of some experts of another device and of rows that are not live, too."""
    case = make_case(8, shared=False)
    x, weights, order, sizes, *experts = sorted_operands(case)
    ours = functools.partial(grouped, backend=backend)
    np.testing.assert_allclose(
        jax.jit(ours)(x, weights, order, sizes, *experts), case.expected(), atol=2e-6
    )
    few = sizes.copy()
    few[2:] = 0  # the pairs of the first two experts come first
    for way in ours, functools.partial(blocked, block=8):
        np.testing.assert_allclose(
            jax.jit(way)(x, weights, order, few, *experts),
            jax.jit(ragged)(x, weights, order, few, *experts),
            atol=2e-6,
        )


@pytest.mark.parametrize(
    ("platform", "dtype", "kernel"),
    [("cuda", "bfloat16", True), ("cuda", "float32", False), ("cpu", "bfloat16", False)],
)
def test_experts_of_published_widths_take_the_kernel(platform: str, dtype: str, kernel: bool):
    shape = jax.ShapeDtypeStruct
    experts = [shape(s, dtype) for s in [(8, 128, 64), (8, 128, 64), (8, 64, 128)]]
    args = shape((512, 128), dtype), shape((512, 4), "int32"), shape((512, 4), "float32"), experts
    step = jax.jit(functools.partial(sum_experts, average=256))
    text = step.trace(*args).lower(lowering_platforms=(platform,)).as_text()
    assert ("mosaic_gpu" in text) == kernel
    assert ("while" in text) == (platform == "cpu")
    assert ("ragged_dot" in text) == (dtype == "float32")


@pytest.mark.parametrize(
    ("platform", "tokens", "grouped"),
    [("cuda", 32, True), ("cuda", 2**17, False), ("cpu", 32, False)],
)
def test_the_platform_and_the_size_choose_how(platform: str, tokens: int, grouped: bool):
    """Of experts that the kernel does not take."""
    case = make_case(shared=False)
    mesh, rules = make_mesh(tp=1, dp=1, kv_heads=1), make_rules()
    rows = [(HIDDEN, "float32"), (CHOICES, "int32"), (CHOICES, "float32")]
    args = [jax.ShapeDtypeStruct((tokens, width), dtype) for width, dtype in rows]
    args += [jax.ShapeDtypeStruct((tokens,), "bool"), case.gate, case.up, case.down]
    step = jax.jit(functools.partial(moe, mesh=mesh, rules=rules))
    text = step.trace(*args).lower(lowering_platforms=(platform,)).as_text()
    assert ("ragged_dot" in text) == grouped
    assert ("while" in text) != grouped


def test_declaration():
    specs = abstract_params(lambda: Experts("m.experts", 8, 6, 3, "bfloat16"))
    assert {name: (s.shape, s.axes, s.dtype, s.stacked) for name, s in specs.items()} == {
        "gate": ((3, 8, 6), ("experts", "embed", "expert_ffn"), "bfloat16", True),
        "up": ((3, 8, 6), ("experts", "embed", "expert_ffn"), "bfloat16", True),
        "down": ((3, 6, 8), ("experts", "expert_ffn", "embed"), "bfloat16", True),
    }
    assert [s.name for s in specs["down"].sources] == [
        f"m.experts.{e}.down_proj.weight" for e in range(3)
    ]
    assert specs["down"].sources[0].shape == (8, 6)  # [outputs, inputs] on disk
