"""The prepared GPU run, on CPUs: steps that fail or hang, what is written, and its own parts."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from repository import REPOSITORY, load_script

from ffi_transport import _native
from ffi_transport.types import PageUnit
from jaxdisagg.bench.gpu import cases, kernel_cases, numerics, report, steps, transfers
from jaxdisagg.bench.gpu.rows import findings_in, read_rows, rows_in
from jaxdisagg.bench.gpu.serving import Answer, compare, times_of
from jaxdisagg.bench.gpu.steps import Outcome, Step, run_step, run_steps

SCRIPT = REPOSITORY / "scripts" / "gpu_check.py"


def program(name: str, code: str, seconds: float = 60.0) -> Step:
    return Step(name, (sys.executable, "-c", code), seconds, {"GREETING": "hello"})


# ---- steps -----------------------------------------------------------------------------------


def test_rows_of_a_step_that_passes(tmp_path):
    code = "import os; print('noise'); print('{\"a\": \"' + os.environ['GREETING'] + '\"}')"
    outcome = run_step(program("one", code), tmp_path, 60)
    assert (outcome.state, outcome.rows, outcome.said) == ("passed", [{"a": "hello"}], "")


@pytest.mark.parametrize(
    ("code", "rows", "said"),
    [
        ('print(\'{"n": 1, "passed": false}\')', 1, ""),
        ("print('{\"n\": 1}'); raise SystemExit('no such kernel')", 1, "no such kernel"),
        ("import os; os.abort()", 0, ""),
    ],
)
def test_a_step_that_fails(tmp_path, code, rows, said):
    outcome = run_step(program("one", code), tmp_path, 60)
    assert (outcome.state, len(outcome.rows)) == ("failed", rows)
    assert said in outcome.said


def test_a_command_that_is_not_there(tmp_path):
    outcome = run_step(Step("one", (str(tmp_path / "none"),), 5), tmp_path, 5)
    assert (outcome.state, outcome.rows) == ("failed", [])
    assert "No such file" in outcome.said


def test_a_step_that_hangs_leaves_its_rows_and_no_process(tmp_path):
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('{\"child\": %d}' % child.pid, flush=True)\n"
        "print('{\"cut', end='', flush=True)\n"
        "time.sleep(600)"
    )
    outcome = run_step(program("one", code), tmp_path, 3)
    assert outcome.state == "timeout"
    [row] = outcome.rows
    deadline = time.monotonic() + 10
    while _runs(row["child"]):
        assert time.monotonic() < deadline, "the step's child lives on"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_steps_share_their_time(tmp_path, monkeypatch):
    now, given, seen = [0.0], [], []

    def play(step: Step, logs: Path, seconds: float) -> Outcome:
        given.append(seconds)
        now[0] += seconds
        return Outcome(step.name, "passed", seconds, [])

    monkeypatch.setattr(steps.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(steps, "run_step", play)
    plan = [program(name, "", seconds) for name, seconds in (("a", 4.0), ("b", 50.0), ("c", 5.0))]
    outcomes = run_steps(plan, tmp_path, 12.0, lambda so_far: seen.append(len(so_far)))
    assert given == [4.0, 8.0]  # its own budget, then what is left
    assert [o.state for o in outcomes] == ["passed", "passed", "skipped"]
    assert outcomes[2].said == "no time was left"
    assert seen == [1, 2, 3]


# ---- what is written -------------------------------------------------------------------------


def test_the_report_holds_what_there_was(tmp_path):
    outcomes = [
        Outcome("a", "passed", 1.5, [{"op": "x|y", "error": 0.00123456, "passed": True}]),
        Outcome("b", "timeout", 2.0, [{"n": 1, "deep": {"k": 2}}, {"other": None}], "it hung"),
        Outcome("c", "skipped", 0.0, [], "no time was left"),
    ]
    report.write(tmp_path, outcomes, {"jax": "0.12"})
    document = json.loads((tmp_path / "gpu_check.json").read_text())
    assert document["passed"] is False
    assert document["steps"][1]["rows"][0]["deep"] == {"k": 2}
    text = (tmp_path / "gpu_check.md").read_text()
    for line in ("jax 0.12", "| b | timeout | 2 | 2/2 |", "| x/y | 0.001235 | yes |", "it hung"):
        assert line in text
    assert "| n |\n|---|\n| 1 |" in text  # rows of another form have a table of their own
    assert report.document(outcomes[:1], {})["passed"] is True
    assert report.document([], {})["passed"] is False


def test_rows_from_files_and_from_the_doctor(tmp_path):
    file = tmp_path / "rows.json"
    assert rows_in(file)("") == []
    file.write_text('{"rows": [{"a": 1}]}')
    assert rows_in(file)("printed") == [{"a": 1}]
    file.write_text('{"rows": [')
    assert rows_in(file)("") == []
    assert read_rows('[1]\n{"a": 1}\n{"b"') == [{"a": 1}]
    found = findings_in('{"findings": [{"state": "missing"}, {"state": "absent"}]}')
    assert [row["passed"] for row in found] == [False, True]
    assert findings_in("Traceback") == []


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
        echo '{"op": "'$4'", "passed": true}'
        [ $4 != dies ] || kill -9 $$
        [ $4 != hangs ] || exec sleep 600
        """
    )
    python.chmod(0o755)
    monkeypatch.setattr(numerics.sys, "executable", str(python))
    told: list[dict] = []
    for op in ("dies", "hangs", "ends"):
        numerics.measure_apart(op, [], 2.0 if op == "hangs" else 60.0, told.append)
    assert [(row["op"], row["passed"]) for row in told] == [
        ("dies", True), ("dies", False), ("hangs", True), ("hangs", False), ("ends", True),
    ]  # fmt: skip
    assert [row["error"] for row in told if not row["passed"]] == [
        "ended with status -9", "no answer within 2 s",
    ]  # fmt: skip


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


@pytest.mark.parametrize(
    ("apart", "whole", "dtype", "passed", "same"),
    [
        (answer("ab", [-1, -1]), answer("ab", [-1, -1]), "float32", True, 2),
        (answer("ab", [-1, -1]), answer("ac", [-1, -1]), "float32", False, 1),
        (answer("", []), answer("", []), "float32", False, 0),
        (answer("", []), answer("", []), "bfloat16", False, 0),
        (answer("ab", [-1, -1]), answer("ac", [-1, -1], {"b": -1.1}), "bfloat16", True, 1),
        (answer("ab", [-1, -1]), answer("ac", [-1, -1], {"b": -4.0}), "bfloat16", False, 1),
        (answer("ab", [-1, -1]), answer("ac", [-1, -1], {"d": -1.1}), "bfloat16", False, 1),
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


# ---- the scripts -----------------------------------------------------------------------------


def run(*command: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command], env=os.environ | variables, text=True,
        capture_output=True, timeout=1500, check=False,
    )  # fmt: skip


def test_all_steps_are_programs_that_are_there(tmp_path):
    script = load_script("gpu_check")
    for cpu in (True, False):
        for step in script.steps_for(tmp_path, cpu=cpu):
            file = Path(step.command[1])
            assert step.command[1] == "-m" or file.is_file(), step.command
            assert cpu or step.seconds <= 120  # no two may take all of the time


def test_the_run_writes_what_it_found(tmp_path):
    done = run(sys.executable, SCRIPT, "--cpu", "--out", tmp_path, "--only", "ceilings",
               "--note", "from a test")  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "gpu_check.json").read_text())
    assert document["passed"] is True
    assert document["about"]["note"] == "from a test"
    [row] = document["steps"][0]["rows"]
    assert row["platform"] == "cpu"
    assert row["copy_bytes_per_s"] > 1e6
    assert "==== ceilings.err" in (tmp_path / "gpu_check.log").read_text()
    done = run(sys.executable, SCRIPT, "--cpu", "--out", tmp_path, "--only", "ceiling")
    assert done.returncode == 2
    assert "ceiling is none of doctor" in " ".join(done.stderr.replace("│", "").split())


def test_the_shell_takes_what_was_carried(tmp_path):
    carried = tmp_path / "carried"
    for name in ("native", "debs", "wheels"):
        (carried / name).mkdir(parents=True)
    shutil.copy(_native.__file__, carried / "native")
    shell = REPOSITORY / "scripts" / "gpu_check.sh"
    options = ("--out", tmp_path / "out", "--no-build", "--cpu", "--only", "doctor")
    done = run("bash", shell, "--carried", carried, *options, PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert document["about"]["note"] == "native part as carried"
    assert {row["what"]: row for row in document["steps"][0]["rows"]}["engine"]["passed"]
    done = run("bash", shell, "--carried", tmp_path / "none", "--out", tmp_path, "--no-build")
    assert done.returncode != 0
    done = run("bash", shell, "--out", tmp_path)
    assert done.returncode == 2
    assert "expected --prepare DIR, or --carried DIR --out OUT" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_the_whole_run_passes_on_a_cpu(tmp_path):
    done = run(sys.executable, SCRIPT, "--cpu", "--out", tmp_path, "--seconds", "1200")
    assert done.returncode == 0, done.stderr + (tmp_path / "gpu_check.md").read_text()
