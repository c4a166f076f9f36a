"""scripts/setup.sh on machines that lack things, played by stubs: nothing is really installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("bash", "cat", "sha256sum", "cut", "find", "sort", "tr", "xargs", "dirname", "mkdir")
TOOLS += ("flock", "tail", "rm", "cp", "env", "chmod", "touch", "true")


# Answers questions by the real interpreter, makes a "virtual environment" that is itself again, and
# writes down what it was asked to install.
FAKE_PYTHON = f"""#!{shutil.which("bash")}
case "$*" in
  *"print(sys.executable)"*) echo "$0" ;;
  "-m venv "*)
    mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; touch "$3/pyvenv.cfg"; echo venv >>"$CALLS" ;;
  "-m pip "*) echo "$*" >>"$CALLS" ;;
  *) exec {sys.executable} "$@" ;;
esac
"""


class Machine:
    """A checkout and a PATH of its own, on which only what a test gives it exists."""

    def __init__(self, folder: Path) -> None:
        self.checkout = folder / "checkout"
        self.bin = folder / "bin"
        self.calls_file = folder / "calls"
        (self.checkout / "scripts").mkdir(parents=True)
        (self.checkout / "ffi_transport/csrc").mkdir(parents=True)
        shutil.copy(ROOT / "scripts/setup.sh", self.checkout / "scripts")
        (self.checkout / "pyproject.toml").write_text("[project]\n")
        self.source = self.checkout / "ffi_transport/csrc/engine.cc"
        self.source.write_text("int x;\n")
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or pytest.skip(f"no {tool}"))
        self.stub("id", "echo 1000")
        self.stub("c++", "cat >/dev/null")

    def stub(self, name: str, script: str) -> None:
        self.text(name, f'#!{self.bin}/bash\necho "{name} $*" >>"$CALLS"\n{script}\n')

    def text(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def setup(self, **variables: str) -> subprocess.CompletedProcess[str]:
        self.calls_file.write_text("")
        environment = {"PATH": str(self.bin), "CALLS": str(self.calls_file), **variables}
        return subprocess.run(
            [self.bin / "bash", "scripts/setup.sh"],
            cwd=self.checkout,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def calls(self, beginning: str) -> list[str]:
        return [c for c in self.calls_file.read_text().splitlines() if c.startswith(beginning)]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_a_python_it_says_how_to_get_one(machine: Machine):
    done = machine.setup()
    assert done.returncode == 1
    assert "no Python >= 3.12 found" in done.stderr
    assert "uv python install 3.12" in done.stderr
    assert not (machine.checkout / ".venv").exists()


def test_a_python_that_is_too_old_is_not_taken(machine: Machine):
    machine.stub("python3", "exit 1")
    assert "no Python >= 3.12 found" in machine.setup().stderr
    done = machine.setup(PYTHON=str(machine.bin / "python3"))
    assert done.returncode == 1
    assert "is not a Python >= 3.12" in done.stderr


@pytest.mark.parametrize("name", ["python3.12", "python3.13", "python3"])
def test_a_python_is_found_by_name(machine: Machine, name: str):
    machine.text(name, FAKE_PYTHON)
    done = machine.setup()
    assert done.returncode == 0, done.stderr
    assert f"with {machine.bin / name}" in done.stderr


def test_a_python_is_found_through_uv(machine: Machine, tmp_path: Path):
    (tmp_path / "hidden").write_text(FAKE_PYTHON)
    (tmp_path / "hidden").chmod(0o755)
    machine.stub("uv", f"echo {tmp_path / 'hidden'}")
    done = machine.setup()
    assert done.returncode == 0, done.stderr
    assert machine.calls("uv python find")


def test_it_installs_once_and_then_does_nothing(machine: Machine):
    machine.text("python3.12", FAKE_PYTHON)
    assert machine.setup().returncode == 0
    assert len(machine.calls("venv")) == 1
    installs = [c for c in machine.calls("-m pip") if "install -e" in c]
    assert installs == ["-m pip --disable-pip-version-check install -e . --group dev"]
    again = machine.setup()
    assert (again.returncode, again.stderr, machine.calls("")) == (0, "", [])


def test_a_changed_source_rebuilds_alone_and_a_changed_project_installs(machine: Machine):
    machine.text("python3.12", FAKE_PYTHON)
    machine.setup()
    for change, install in [
        (lambda: machine.source.write_text("int y;\n"), "install --no-deps -e ."),
        (lambda: machine.source.rename(machine.source.with_name("b.cc")), "install --no-deps -e ."),
        (
            lambda: (machine.checkout / "pyproject.toml").write_text("[project]\nname='x'\n"),
            "install -e . --group dev",
        ),
    ]:
        change()
        assert machine.setup().returncode == 0
        assert not machine.calls("venv")
        assert [c for c in machine.calls("-m pip") if install in c]


def test_a_failed_install_is_tried_again(machine: Machine):
    broken = FAKE_PYTHON.replace(
        '"-m pip "*)', '*" install -e "*) echo no space; exit 1 ;;\n"-m"*)'
    )
    machine.text("python3.12", broken)
    for _ in range(2):
        done = machine.setup()
        assert done.returncode == 1
        assert "no space" in done.stderr
        assert "pip install failed" in done.stderr
    shutil.rmtree(machine.checkout / ".venv")
    machine.text("python3.12", FAKE_PYTHON)
    assert machine.setup().returncode == 0


def test_a_broken_environment_is_made_anew(machine: Machine):
    machine.text("python3.12", FAKE_PYTHON)
    machine.setup()
    python = machine.checkout / ".venv/bin/python"
    python.unlink()
    python.symlink_to("/nonexistent/python")  # its interpreter was removed
    assert machine.setup().returncode == 0
    assert machine.calls("venv")
    assert [c for c in machine.calls("-m pip") if "--group dev" in c]


def test_a_folder_that_is_no_environment_is_left_alone(machine: Machine):
    machine.text("python3.12", FAKE_PYTHON)
    (machine.checkout / "mine").mkdir()
    done = machine.setup(VENV="mine")
    assert done.returncode == 1
    assert "mine exists and is no virtual environment" in done.stderr
    assert (machine.checkout / "mine").exists()


def test_a_user_without_rights_gets_the_list(machine: Machine):
    machine.text("python3.12", FAKE_PYTHON)
    machine.stub("c++", "cat >/dev/null; exit 1")
    done = machine.setup()
    assert done.returncode == 1
    assert "As root, run:" in done.stderr
    assert "apt-get install g++" in done.stderr
    assert not machine.calls("venv")


@pytest.mark.parametrize("sudo", [False, True])
def test_root_or_sudo_installs_what_is_missing(machine: Machine, sudo: bool):
    machine.text("python3.12", FAKE_PYTHON)
    machine.stub("c++", f"cat >/dev/null; [ -e {machine.bin}/installed ]")
    machine.stub("apt-get", f"echo >{machine.bin}/installed")
    if sudo:
        machine.stub("sudo", '[ "$1" = -n ] && shift; exec "$@"')
    else:
        machine.stub("id", "echo 0")
    done = machine.setup()
    assert done.returncode == 0, done.stderr
    assert any("install -y" in c and "g++" in c for c in machine.calls("apt-get"))
    assert bool(machine.calls("sudo -n env")) == sudo


def test_packages_that_do_not_help_are_named(machine: Machine):
    machine.text("python3.12", FAKE_PYTHON)
    machine.stub("id", "echo 0")
    machine.stub("c++", "cat >/dev/null; exit 1")
    machine.stub("apt-get", "exit 0")
    done = machine.setup()
    assert done.returncode == 1
    assert "still missing after installing them: g++" in done.stderr


def test_the_script_is_executable():
    assert os.access(ROOT / "scripts/setup.sh", os.X_OK)
    assert os.access(ROOT / ".ci/run", os.X_OK)
