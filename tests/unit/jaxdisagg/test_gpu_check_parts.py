"""The parts of the prepared GPU run, on CPUs: numerics, transfers, and how answers are compared."""

import json

import jax
import numpy as np
import pytest

from ffi_transport.types import PageUnit
from jaxdisagg.bench.gpu import cases, kernel_cases, numerics, transfers
from jaxdisagg.bench.gpu.serving import Answer, compare, times_of

# ---- numerics --------------------------------------------------------------------------------


def test_plain_attention_is_jaxs():
    rng = np.random.default_rng(0)
    q, k, v = (cases.uniform(rng, n, 16) for n in (5, 9, 9))
    upto = np.array([1, 9, 4, 5, 2])
    mask = np.arange(9) < upto[:, None]
    expected = jax.nn.dot_product_attention(
        q[:, None], k[:, None], v[:, None], scale=0.3, mask=mask[None]
    )
    found = cases.attend(q, k, v, 0.3, upto)
    np.testing.assert_allclose(found, expected[:, 0], atol=1e-6)
    assert not cases.attend(q, k[:0], v[:0], 0.3).any()


def test_pages_are_scattered_and_all_else_is_poison():
    lengths = cases.lengths_for(8, 61)
    assert {0, 1, 7, 8, 9, 61} <= set(lengths.tolist())
    paged = cases.scatter(lengths, 8, np.random.default_rng(0))
    assert paged.live.sum() == lengths.sum()
    assert (~paged.live).all(axis=1).sum() == 1  # the page that nobody has
    own = [paged.table[row, : -(-n // 8)].tolist() for row, n in enumerate(lengths)]
    used = [page for pages in own for page in pages]
    assert len(used) == len(set(used)) == len(paged.live) - 1
    assert set(paged.table[0]) <= set(cases.OUTSIDE)
    values = np.arange(paged.live.size, dtype=np.float32).reshape(*paged.live.shape, 1)
    held = cases.poison(values, paged.live[:, :, None])
    assert np.isnan(held).sum() == (~paged.live).sum()
    for row, length in enumerate(lengths):
        assert not np.isnan(cases.rows_of(held, paged, row, int(length))).any()


def test_the_cpus_kernel_passes_and_a_wrong_one_does_not(monkeypatch):
    make = lambda: kernel_cases.gqa_case(4, 2, 64, 8, 61, fp8=False)  # noqa: E731
    row = numerics.measure(make, "xla")
    assert row["passed"] is True, row
    assert row["max_error"] < numerics.LIMIT
    right = kernel_cases.gqa_decode

    def wrong(q, cache, table, lengths, **more):  # one token too many: poison, or a page outside
        return right(q, cache, table, lengths + 1, **more)

    monkeypatch.setattr(kernel_cases, "gqa_decode", wrong)
    row = numerics.measure(make, "xla")
    assert row["passed"] is False
    row = numerics.measure(make, "of nobody")
    assert row["passed"] is False
    assert "'of nobody' is not one of" in row["error"]


FULL = [
    pytest.param(make, id=f"{op}-{i}", marks=[pytest.mark.slow] if i else [])
    for op in kernel_cases.OPS
    for i, make in enumerate(kernel_cases.cases(op, small=False))
]


@pytest.mark.parametrize("make", FULL)
def test_the_kernels_take_what_they_are_given_on_a_gpu(make):
    case = make()
    program = jax.jit(case.call("mosaic_gpu")).trace(*case.operands)
    assert "mosaic_gpu" in program.lower(lowering_platforms=("cuda",)).as_text()


def test_an_operation_that_hangs_or_dies_takes_no_other_with_it(monkeypatch, tmp_path):
    python = tmp_path / "python"  # in the place of a child
    python.write_text(
        """#!/bin/sh
        [ $4 != says-nothing ] || exit 0
        echo '{"op": "'$4'", "passed": true}'
        [ $4 != dies ] || kill -9 $$
        [ $4 != hangs ] || exec sleep 600
        """
    )
    python.chmod(0o755)
    monkeypatch.setattr(numerics.sys, "executable", str(python))
    told: list[dict] = []
    for op in ("dies", "hangs", "ends", "says-nothing"):
        numerics.measure_apart(op, [], 2.0 if op == "hangs" else 60.0, told.append)
    assert [(row["op"], row["passed"]) for row in told] == [
        ("dies", True), ("dies", False), ("hangs", True), ("hangs", False), ("ends", True),
        ("says-nothing", False),
    ]  # fmt: skip
    assert [row["error"] for row in told if not row["passed"]] == [
        "ended with status -9", "no answer within 2 s", "ended without a row",
    ]  # fmt: skip


def test_what_is_raised_beside_the_operations_ends_the_numerics(monkeypatch):
    begun: list[str] = []

    def fails(op, *_):
        begun.append(op)
        raise OSError("no more processes")

    monkeypatch.setattr(numerics, "measure_apart", fails)
    monkeypatch.setattr(numerics, "take_stdout", lambda: begun.append)
    monkeypatch.setattr(numerics.sys, "argv", ["numerics", "--small"])
    with pytest.raises(OSError, match="no more processes"):
        numerics.main()
    assert set(begun) == set(kernel_cases.OPS)


# ---- transfers -------------------------------------------------------------------------------


def test_pages_arrive_in_the_memory_of_a_device_that_is_played(fake_cuda, monkeypatch):
    def register(engine, array):
        address = array.unsafe_buffer_pointer()
        fake_cuda.set_pointer(address, array.nbytes, 0)
        return engine.register_memory(address, array.nbytes, device=0)

    monkeypatch.setattr(transfers, "register", register)
    row = transfers.move(12, 4096)
    assert (row["source"], row["target"], row["passed"]) == ("staged", "staged", True), row
    assert row["why_staged"]


def test_pages_that_went_astray_are_seen(monkeypatch):
    def astray(page: int, source: int, there: int, target: int, length: int) -> PageUnit:
        return PageUnit(page, source + 1, there, target, length - 1)

    monkeypatch.setattr(transfers, "PageUnit", astray)
    row = transfers.move(12, 4096)
    assert (row["source"], row["passed"]) == ("host", False)


# ---- serving ---------------------------------------------------------------------------------


def answer(tokens: str, logprobs: list[float], top: dict[str, float] | None = None) -> Answer:
    times = [0.0, *(0.5 + i for i in range(len(tokens)))]
    return Answer(list(tokens), logprobs, [top or {}] * len(tokens), times)


def chose(token: str, **others: float) -> Answer:
    """`a` and a token of logprob -1, and those of the others in its place."""
    return answer("a" + token, [-1, -1], others)


@pytest.mark.parametrize(
    ("apart", "whole", "dtype", "passed", "same"),
    [
        (answer("ab", [-1, -1]), answer("ab", [-1, -1]), "float32", True, 2),
        (answer("ab", [-1, -1]), answer("ac", [-1, -1]), "float32", False, 1),
        (answer("", []), answer("", []), "float32", False, 0),
        (answer("", []), answer("", []), "bfloat16", False, 0),
        (chose("b", c=-1.2), chose("c", b=-1.1), "bfloat16", True, 1),
        (chose("b", c=-1.2), chose("c", b=-4.0), "bfloat16", False, 1),
        (chose("b", c=-4.0), chose("c", b=-1.1), "bfloat16", False, 1),
        (chose("b", c=-1.2), chose("c", d=-1.1), "bfloat16", False, 1),
        (chose("b", d=-1.2), chose("c", b=-1.1), "bfloat16", False, 1),
        (answer("ab", [-1, -1]), answer("abc", [-1, -1, -1]), "bfloat16", False, 2),
        (answer("ab", [-1, -1]), answer("ab", [-2, -1]), "bfloat16", False, 2),
    ],
)
def test_how_far_answers_agree(apart, whole, dtype, passed, same):
    row = compare(apart, whole, dtype)
    assert (row["passed"], row["equal_tokens"]) == (passed, same)
    json.dumps(row, allow_nan=False)


def test_times_of_an_answer():
    assert times_of(answer("abc", [0, 0, 0])) == {"ttft_ms": 500.0, "itl_ms": 1000.0}
    assert times_of(answer("", [])) == {"ttft_ms": None, "itl_ms": None}
