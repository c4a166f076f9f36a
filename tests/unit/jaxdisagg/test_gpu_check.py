"""The prepared GPU run, on CPUs: steps that fail or hang, what is written, what is carried."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from proc import running
from repository import REPOSITORY, load_script

from ffi_transport import _native
from jaxdisagg.bench.gpu import report, steps
from jaxdisagg.bench.gpu.rows import findings_in, read_rows, rows_in
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
        ("import os; os.abort()", 0, "it ended with status -6"),
        ("print('measured nothing')", 0, "it ended without a row"),
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
    assert outcome.said.startswith("it had not ended after ")
    [row] = outcome.rows
    deadline = time.monotonic() + 10
    while running(row["child"]):
        assert time.monotonic() < deadline, "the step's child lives on"
        time.sleep(0.05)


def test_what_ends_the_check_ends_its_step(tmp_path):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    code = "import os, time; print('{\"pid\": %d}' % os.getpid(), flush=True); time.sleep(600)"
    try:
        threading.Thread(target=_kill_when, args=(tmp_path / "one.out",)).start()
        with pytest.raises(KeyboardInterrupt):
            run_step(program("one", code), tmp_path, 60)
    finally:
        signal.signal(signal.SIGUSR1, before)
    [row] = read_rows((tmp_path / "one.out").read_text())
    assert not running(row["pid"])


def test_a_step_waits_for_what_it_needs(tmp_path):
    print_row = "print('{\"a\": 1}')"
    made: Future[None] = Future()
    step = replace(program("one", print_row), needs=made)
    outcome = run_step(step, tmp_path, 0.2)
    assert (outcome.state, outcome.rows) == ("failed", [])
    assert outcome.said.startswith("what it needs was not made: TimeoutError")
    made.set_result(None)
    assert run_step(step, tmp_path, 60).state == "passed"
    broken: Future[None] = Future()
    broken.set_exception(OSError("no space left"))
    outcome = run_step(replace(step, needs=broken), tmp_path, 60)
    assert outcome.said == "what it needs was not made: OSError: no space left"


def _kill_when(printed: Path) -> None:
    """Send this process SIGUSR1 when the step has said something."""
    deadline = time.monotonic() + 30
    while not printed.is_file() or not printed.read_text().endswith("\n"):
        assert time.monotonic() < deadline, "the step never spoke"
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGUSR1)


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
    with_more = [{"op": "x"}, {"op": "y", "ratio": 2}, {"op": "z"}]
    report.write(tmp_path, [Outcome("d", "passed", 1.0, with_more)], {})
    assert (
        "| op | ratio |\n|---|---|\n| x |  |\n| y | 2 |\n| z |  |"
        in (tmp_path / "gpu_check.md").read_text()
    )
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


# ---- the scripts -----------------------------------------------------------------------------


def run(
    *command: object, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command], env=os.environ | variables, text=True, cwd=cwd,
        capture_output=True, timeout=1500, check=False,
    )  # fmt: skip


def test_all_steps_are_programs_that_are_there(tmp_path):
    script = load_script("gpu_check")
    for cpu in (True, False):
        for step in script.steps_for(tmp_path, cpu=cpu):
            if step.command[1] == "-m":
                assert importlib.util.find_spec(step.command[2]), step.command
            else:
                assert Path(step.command[1]).is_file(), step.command
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
    options = ("--out", "out", "--no-build", "--cpu", "--only", "doctor")
    done = run("bash", shell, "--carried", "carried", *options, PYTHON=sys.executable, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert document["about"]["note"] == "native part as carried"
    assert {row["what"]: row for row in document["steps"][0]["rows"]}["engine"]["passed"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--carried", "none", "--out", "out"], "--carried: no folder {here}/none"),
        (["--carried", ".", "--out", "file"], "--out: no folder {here}/file can be made"),
        (["--carried", "/none", "--out", "out"], "--carried: no folder /none"),
        (["--prepare", "file"], "--prepare: no folder {here}/file can be made"),
        (["--out", "out"], "expected --prepare DIR, or --carried DIR --out OUT"),
        (["--carried"], "--carried needs a folder"),
        (["--prepare", ""], "--prepare needs a folder"),
    ],
)
def test_folders_are_the_callers_and_are_named(tmp_path, options, why):
    (tmp_path / "file").touch()
    shell = os.path.relpath(REPOSITORY / "scripts" / "gpu_check.sh", tmp_path)
    done = run("bash", shell, *options, "--no-build", PYTHON=sys.executable, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"gpu_check: {why.format(here=tmp_path)}\n"


def test_a_file_is_no_folder_for_what_was_found(tmp_path):
    (tmp_path / "file").touch()
    done = run(sys.executable, SCRIPT, "--out", "file", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --out: file cannot be a folder: File exists\n"


def needed_by(*names: str) -> set[str]:
    """The distributions that come with these, themselves included."""
    found: set[str] = set()
    names_left = [canonicalize_name(name) for name in names]
    while names_left:
        name = names_left.pop()
        if name not in found:
            found.add(name)
            lines = map(Requirement, metadata.requires(name) or [])
            names_left += [
                canonicalize_name(line.name)
                for line in lines
                if line.marker is None or line.marker.evaluate({"extra": ""})
            ]
    return found


# Imports all that the steps may, without the modules of sys.argv[1:]; prints what is missing.
IMPORTS = """
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

absent = set(sys.argv[2:])
sys.meta_path.insert(0, Absent())
sys.path.insert(0, sys.argv[1])
import jaxdisagg
names = [m.name for m in pkgutil.walk_packages(jaxdisagg.__path__, "jaxdisagg.")]
missing = []
for name in (*names, "gpu_check", "bench_kernels", "bench_step"):
    try:
        importlib.import_module(name)
    except ImportError as error:
        missing.append(f"{name}: {error}")
import httpx
httpx.Client().close()
print(missing)
"""


def test_what_is_carried_is_all_that_the_steps_import():
    text = (REPOSITORY / "scripts" / "gpu_check.sh").read_text()
    words = re.search(r"^WHEELS=\(([^)]*)\)", text, re.MULTILINE)
    assert words is not None
    carried = set(map(canonicalize_name, words[1].split()))
    installed = metadata.packages_distributions()
    known = {canonicalize_name(name) for names in installed.values() for name in names}
    assert carried <= known | {"nanobind"}  # that one the build alone needs, which has its own
    there = carried | needed_by("jax", "flax", "orbax-checkpoint") | {"jaxdisagg"}
    absent = [
        module for module, names in installed.items()
        if module.isidentifier() and not there & set(map(canonicalize_name, names))
    ]  # fmt: skip
    assert "pytest" in absent
    done = run(sys.executable, "-c", IMPORTS, SCRIPT.parent, *absent, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]", done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_the_whole_run_passes_on_a_cpu(tmp_path):
    done = run(sys.executable, SCRIPT, "--cpu", "--out", tmp_path, "--seconds", "1200")
    assert done.returncode == 0, done.stderr + (tmp_path / "gpu_check.md").read_text()
