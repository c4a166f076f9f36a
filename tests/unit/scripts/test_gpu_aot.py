"""scripts/gpu_aot.py: layers are made once, for their pins; pip and the job itself are played."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from repository import REPOSITORY, load_script
from typer.testing import CliRunner

from jaxdisagg.gpu_aot import __main__ as job
from jaxdisagg.gpu_aot import report
from jaxdisagg.gpu_aot.chips import H200
from jaxdisagg.gpu_aot.dumps import KernelResources
from jaxdisagg.gpu_aot.job import KernelResult, StepResult
from jaxdisagg.gpu_aot.kernel_cases import KernelCase
from jaxdisagg.gpu_aot.step_cases import STEP_CASES
from pallas_kernels.cost import Cost

script = load_script("gpu_aot")


class Commands:
    """Stands for `subprocess.run`: writes down what it is asked, and ends as told."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], dict[str, str]]] = []
        self.fails = ""  # words of the commands that end with `status`
        self.status = 1

    def __call__(
        self, command: list[str], *, check: bool, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        self.asked.append((command, env or {}))
        code = self.status if self.fails and self.fails in " ".join(command) else 0
        if not code and "--target" in command:
            Path(command[command.index("--target") + 1]).mkdir(parents=True)
        if code and check:
            raise subprocess.CalledProcessError(code, command)
        return subprocess.CompletedProcess(command, code)

    def installs(self) -> list[str]:
        return [c[c.index("--target") + 1].rpartition("/")[2] for c, _ in self.asked if "pip" in c]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    commands = Commands()
    monkeypatch.setattr(script, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(script.subprocess, "run", commands)
    return commands


ALL = ["gpu-aot-cuda", "gpu-aot", "gpu-aot-oldest"]


def test_layers_are_made_once_and_the_job_runs_over_them(commands: Commands, tmp_path: Path):
    assert script.main(["--chips", "H200", "--json", "figures.json", "--markdown=tables.md"]) == 0
    assert commands.installs() == ALL
    (newest, env), (tests, _), (oldest, older) = commands.asked[3:]
    cache = tmp_path / "cache"
    for group in ALL[1:]:
        assert (cache / group / "nvidia").readlink() == Path("../gpu-aot-cuda/nvidia")
    assert env["PYTHONPATH"] == f"{cache / 'gpu-aot'}:{cache / 'gpu-aot-cuda'}"
    assert older["PYTHONPATH"] == f"{cache / 'gpu-aot-oldest'}:{cache / 'gpu-aot-cuda'}"
    assert env["JAX_PLATFORMS"] == "cpu"
    assert newest[1:3] == oldest[1:3] == ["-m", "jaxdisagg.gpu_aot"]
    assert newest[-5:] == ["--chips", "H200", "--json", "figures.json", "--markdown=tables.md"]
    assert oldest[-4:] == ["--chips", "H200", "--chips", "H200"]
    assert tests[1:3] == ["-m", "pytest"]
    assert tests[-1] == "tests/gpu_aot"
    commands.asked.clear()
    assert script.main(["--only", "mla"]) == 0
    assert commands.installs() == []
    assert [command[1:3] for command, _ in commands.asked] == [["-m", "jaxdisagg.gpu_aot"]] * 2


def test_a_layer_whose_pins_have_changed_is_made_anew(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
):
    script.main([])
    commands.asked.clear()
    pins = script.pins_of
    monkeypatch.setattr(
        script, "pins_of", lambda group: [*pins(group), *["x==1"] * (group == "gpu-aot")]
    )
    script.main([])
    assert commands.installs() == ["gpu-aot"]
    assert "x==1" in commands.asked[0][0]


def test_a_failed_install_is_told_and_tried_again(
    commands: Commands, capsys: pytest.CaptureFixture[str]
):
    commands.fails = "nvidia-cuda-nvcc"
    for _ in range(2):
        assert script.main([]) == 1
    assert commands.installs() == ["gpu-aot-cuda"] * 2
    assert "pip ended with 1" in capsys.readouterr().err
    commands.fails = ""
    assert script.main([]) == 0


@pytest.mark.parametrize("part", ["--chips", "tests/gpu_aot", "-m jaxdisagg.gpu_aot"])
def test_a_failure_of_any_part_is_the_end_status(commands: Commands, part: str):
    commands.fails = part
    assert script.main([]) == 1
    assert len(commands.asked) == 6, "all parts run, so that one failure does not hide another"


def test_a_wrong_option_ends_it_at_once(commands: Commands):
    commands.fails, commands.status = "-m jaxdisagg.gpu_aot", 2
    assert script.main(["--chips", "B200"]) == 2
    assert len(commands.asked) == 4, "three layers, and the part that refuses the option"


def test_help_needs_no_layers(commands: Commands):
    assert script.main(["--only", "mla", "--help"]) == 0
    assert commands.installs() == []
    assert [command[-1] for command, _ in commands.asked] == ["--help"]


def test_pins_are_exact_and_what_is_there_is_not_installed_again(monkeypatch: pytest.MonkeyPatch):
    here = {"jax": "0.12.0.1", "jaxlib": "0.11.2"}

    def version(name: str) -> str:
        if name not in here:
            raise script.importlib.metadata.PackageNotFoundError(name)
        return here[name]

    monkeypatch.setattr(script.importlib.metadata, "version", version)
    assert not any(pin.startswith("jax==") for pin in script.pins_of("gpu-aot"))
    assert "jaxlib==0.12.0.1" in script.pins_of("gpu-aot")
    assert "jax==0.11.2" in script.pins_of("gpu-aot-oldest")
    for group in ALL:
        assert all("==" in pin for pin in script.pins_of(group))


def test_the_oldest_jax_is_the_one_that_the_project_supports():
    document = script.tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    (oldest,) = (d for d in document["project"]["dependencies"] if d.startswith("jax>="))
    assert f"jax=={oldest.removeprefix('jax>=')}" in document["dependency-groups"]["gpu-aot-oldest"]


def results(failures: list[str]) -> list[Any]:
    case = KernelCase("gqa_decode", "12/1 heads", len, (), Cost(bytes=2**20, flops=10**9))
    kernels = [KernelResources("gqa_decode", 195, 0, 0, 114_721, 128)]
    figures = {"layers": 4, "kernel_calls": 8, "triggers": 5, "all_reduces": 9}
    figures |= {"other_collectives": 0, "alias_bytes": 2**30, "temp_bytes": 2**20, "host_waits": 4}
    figures["captured_calls"] = 13
    return [
        KernelResult(case, H200, 1.5, kernels, failures),
        StepResult(STEP_CASES[0], H200, 9.0, kernels, figures),
    ]


def run_job(monkeypatch: pytest.MonkeyPatch, failures: list[str], *options: str) -> Any:
    monkeypatch.setattr(job, "run_all", lambda *_, **__: iter(results(failures)))
    app = typer.Typer()
    app.command()(job.main)
    return CliRunner().invoke(app, ["--configs", ".", "--chips", "H200", *options])


def test_the_job_prints_tables_and_writes_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = tmp_path / "figures.json", tmp_path / "tables.md"
    done = run_job(monkeypatch, [], "--json", str(files[0]), "--markdown", str(files[1]))
    assert done.exit_code == 0, done.output
    for text in (done.output, files[1].read_text()):
        assert "114,721 B" in text
        assert "1.0 us" in text, "10^9 operations at 989 TFLOP/s"
    rows = json.loads(files[0].read_text())["rows"]
    assert [row["kind"] for row in rows] == ["kernel", "step"]
    assert rows[0]["registers"] == 195
    assert rows[1]["temp_bytes"] == 2**20


def test_the_job_fails_by_name(monkeypatch: pytest.MonkeyPatch):
    done = run_job(monkeypatch, ["gqa_decode: spills 4 bytes"])
    assert done.exit_code == 1
    assert "FAILED H200 gqa_decode" in done.output
    assert "gqa_decode: spills 4 bytes" in done.output
    assert "failed: H200 gqa_decode [12/1 heads]" in done.output


@pytest.mark.parametrize(
    ("options", "named"),
    [(["--chips", "H300"], "H300"), (["--only", "nothing such"], "nothing such")],
)
def test_wrong_options_are_named(monkeypatch: pytest.MonkeyPatch, options: list[str], named: str):
    done = run_job(monkeypatch, [], *options)
    assert done.exit_code == 2
    assert named in done.output


def test_a_case_that_did_not_compile_keeps_its_row():
    (row,) = report.rows_of([KernelResult(results([])[0].case, H200, 1.0, [], ["refused"])])
    assert row["failures"] == ["refused"]


def test_its_python_is_the_one_that_runs_it(commands: Commands):
    script.main([])
    assert {command[0] for command, _ in commands.asked} == {sys.executable}
