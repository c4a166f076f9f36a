"""The kernels' benchmark: what it writes, its ratio and shares, and what it compares with."""

import json

import bench_kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer import Typer
from typer.testing import CliRunner, Result

from jaxdisagg import gpu_setup
from jaxdisagg.bench import kernels, page_loop
from jaxdisagg.bench.timing import interleaved, median_ci
from pallas_kernels.cost import Cost


def run(*arguments: str) -> Result:
    app = Typer()
    app.command()(bench_kernels.main)
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, list(arguments))


def test_rows_of_a_small_run(tmp_path):
    file = tmp_path / "rows.json"
    shown = run(
        "--small", "--repeats", "3", "--ops", "gqa_decode, grouped_matmul", "--json", str(file)
    )
    assert shown.exit_code == 0, shown.output
    document = json.loads(file.read_text())
    assert document["environment"]["platform"] == "cpu"
    ways = [(row["op"], row["backend"]) for row in document["rows"]]
    assert ways == [("gqa_decode", "xla"), ("gqa_decode", "page loop"), ("grouped_matmul", "xla")]
    xla, loop, matmul = document["rows"]
    assert loop["largest_difference"] < 1e-2
    assert loop["ratio"] > 0
    assert loop["ratio_ci95"][0] <= loop["ratio"] <= loop["ratio_ci95"][1]
    assert "ratio" not in xla
    assert "ratio" not in matmul
    for row in document["rows"]:
        assert row["us_ci95"][0] <= row["us"] <= row["us_ci95"][1]
    # 24 rows of 64 times one of four [64, 64].
    assert matmul["tflops_per_s"] * matmul["us"] * 1e6 == pytest.approx(2 * 24 * 64 * 64)
    assert matmul["gbytes_per_s"] * matmul["us"] * 1e3 == pytest.approx(
        2 * (24 * 128 + 4 * 64 * 64)
    )
    assert "gqa_decode bfloat16" in shown.output
    assert "page loop" in shown.output


def test_the_file_is_written_after_each_case(tmp_path, monkeypatch):
    file = tmp_path / "rows.json"
    measure, seen = bench_kernels.measure, []

    def counting(case, *rest):
        seen.append(len(json.loads(file.read_text())["rows"]) if file.exists() else 0)
        return measure(case, *rest)

    monkeypatch.setattr(bench_kernels, "measure", counting)
    run("--small", "--repeats", "1", "--ops", "gqa_decode,grouped_matmul", "--json", str(file))
    assert seen == [0, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ops", "gqa_decode, conv"], "--ops='gqa_decode, conv': 'conv' not among gqa_decode, "),
        (["--ops", ","], "--ops=',': '' not among gqa_decode, grouped_matmul, mla_"),
        (["--json", "nowhere/rows.json"], "--json: no folder nowhere"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    shown = run("--small", *arguments)
    assert shown.exit_code == 2
    assert message in shown.output


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (AssertionError(), "JAX_PLATFORMS=cuda: this jax is for CPUs alone; install jaxdisagg[cud"),
        (RuntimeError("no\ndriver"), "no driver"),
    ],
)
def test_a_back_end_that_does_not_start_is_refused(raised, message, monkeypatch):
    def fail() -> str:
        raise raised

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(gpu_setup, "cuda_plugins", list)
    monkeypatch.setattr(jax, "default_backend", fail)
    shown = run("--small")
    assert shown.exit_code == 2
    assert f"jax finds no devices: {message}" in " ".join(shown.output.split())
    assert "Traceback" not in shown.output


def test_shares_and_ratio_of_made_up_times(monkeypatch):
    """A call of 2 us and one of 4, of work that a copy does in 1 us and a matmul in half of one."""
    one = (lambda x: x, (jnp.ones(4),))
    ways = {"mosaic_gpu": one, "xla": one, "page loop": one}
    case = kernels.Case("op", "shape", "bfloat16", Cost(bytes=1000, flops=500), lambda _: ways)
    seconds = [[2e-6 * 20] * 5, [4e-6 * 20] * 5]  # of the 20 calls of a turn on a GPU
    monkeypatch.setattr(bench_kernels, "LOOK_SECONDS", 1e9)
    monkeypatch.setattr(bench_kernels, "interleaved", lambda runs, repeats: seconds)
    first, last = bench_kernels.measure(case, "gpu", 5, (1e9, 1e9))
    assert (first["us"], last["us"]) == (pytest.approx(2), pytest.approx(4))
    assert first["us_roofline"] == pytest.approx(1)
    assert first["share_of_roofline"] == pytest.approx(0.5)
    assert last["share_of_roofline"] == pytest.approx(0.25)
    assert last["ratio"] == pytest.approx(0.5)
    assert first["gbytes_per_s"] == pytest.approx(0.5)


def test_long_calls_are_not_taken_by_the_score():
    calls = {seconds: bench_kernels.calls_of(seconds, "gpu") for seconds in (1e-5, 5e-3, 0.06)}
    assert calls == {1e-5: 20, 5e-3: 4, 0.06: 1}
    assert bench_kernels.calls_of(1e-5, "cpu") == 1


def test_a_case_that_fails_takes_no_other_with_it(tmp_path, monkeypatch):
    file = tmp_path / "rows.json"
    measure = bench_kernels.measure

    def failing(case, *rest):
        if case.op == "gqa_decode":
            raise RuntimeError("no such [instruction]")
        return measure(case, *rest)

    monkeypatch.setattr(bench_kernels, "measure", failing)
    shown = run("--small", "--repeats", "1", "--ops", "gqa_decode,grouped_matmul", "--json",
                str(file))  # fmt: skip
    assert shown.exit_code == 1
    assert "no such [instruction]" in shown.output
    failed, matmul = json.loads(file.read_text())["rows"]
    assert (failed["op"], failed["passed"]) == ("gqa_decode", False)
    assert failed["error"] == "RuntimeError: no such [instruction]"
    assert matmul["backend"] == "xla"


def test_each_operation_is_measured_on_a_gpu():
    """Shapes of gigabytes, so only their names and costs."""
    on_gpu = list(kernels.cases("gpu", small=False))
    assert {case.op for case in on_gpu} == {c.op for c in kernels.cases("cpu", small=False)}
    assert {case.op for case in on_gpu} == {
        "gqa_decode", "mla_decode", "paged_prefill", "mla_prefill", "grouped_matmul",
    }  # fmt: skip
    # 64 rows of 8,192 tokens, one KV head of 128: K and V in bytes of e4m3.
    (fp8,) = (c for c in on_gpu if (c.op, c.dtype) == ("gqa_decode", "e4m3") and "8192" in c.shape)
    assert fp8.cost.bytes == pytest.approx(64 * 8192 * 2 * 128, rel=0.01)


def test_ways_of_e4m3_caches_agree_with_plain_ones():
    """The same numbers, rounded to e4m3 first."""
    e4m3 = kernels.decode_gqa(2, 4, 2, 64, 16, 40, kernels.E4M3).ways(("xla", "reference"))
    results = [np.asarray(f(*operands), np.float32) for f, operands in e4m3.values()]
    np.testing.assert_allclose(results[0], results[1], atol=1e-2)
    _, (q, cache, *where) = e4m3["xla"]
    assert cache.dtype == jnp.uint8
    wide = jax.lax.bitcast_convert_type(cache, jnp.float8_e4m3fn).astype(jnp.bfloat16)
    plain, _ = kernels.decode_gqa(2, 4, 2, 64, 16, 40, "bfloat16").ways(("xla",))["xla"]
    np.testing.assert_allclose(results[0], plain(q, wide, *where), atol=1e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_page_loops_are_attention(dtype):
    """In f64, one row and head at a time."""
    rng = np.random.default_rng(0)
    lengths = np.array([1, 31, 200], np.int32)
    table = rng.permutation(3 * 13).reshape(3, 13).astype(np.int32)
    atol = 1e-5 if dtype == "float32" else 2e-2

    def values(*shape):
        return np.asarray(jnp.asarray(rng.standard_normal(shape), dtype), np.float64)

    def attend(q, k, v):
        scores = k @ q * 0.2
        weights = np.exp(scores - scores.max())
        return weights @ v / weights.sum()

    q, k, v = values(3, 4, 16), values(39, 2, 16, 16), values(39, 2, 16, 16)
    ours = page_loop.gqa_decode(
        *(jnp.asarray(a, dtype) for a in (q, k, v)), table, lengths, scale=0.2
    )
    for b, length in enumerate(lengths):
        for n in range(4):
            rows = [pages[table[b], n // 2].reshape(-1, 16)[:length] for pages in (k, v)]
            np.testing.assert_allclose(ours[b, n], attend(q[b, n], *rows), atol=atol)
    q, cache = values(3, 4, 16), values(39, 16, 16)
    ours = page_loop.mla_decode(
        *(jnp.asarray(a, dtype) for a in (q, cache)), table, lengths, scale=0.2, latent=12
    )
    for b, length in enumerate(lengths):
        kept = cache[table[b]].reshape(-1, 16)[:length]
        for n in range(4):
            np.testing.assert_allclose(ours[b, n], attend(q[b, n], kept, kept[:, :12]), atol=atol)


def test_turns_and_medians():
    order: list[str] = []
    times = interleaved([lambda: order.append("a"), lambda: order.append("b")], 3)
    assert order == ["a", "b"] * 3
    assert [len(t) for t in times] == [3, 3]
    assert median_ci([3, 1, 2]) == (2, 1, 3)
    median, low, high = median_ci(range(101))
    assert (median, low, high) == (50, 40, 60)  # 50.5 -+ 0.98 * sqrt(101)
