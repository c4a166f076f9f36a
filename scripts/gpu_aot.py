"""Compile kernels and step programs for H100 and H200 on a machine without a GPU: `make gpu-aot`.

Makes environments of their own under .cache/gpu-aot: wheels in layers over the Python that runs
this, which itself stays as it is. jax's CUDA plugin and NVIDIA's assembler come from there, for the
newest jax that was checked and for the oldest that is supported; pyproject.toml pins them. A layer
whose pins have not changed is used again. Then `jaxdisagg.gpu_aot` runs in each, and in the first
the tests of tests/gpu_aot (seeded failures, launches), unless it is --only for some cases.

Options are handed on to `jaxdisagg.gpu_aot`, as in: --only mla --json figures.json. The oldest jax
compiles for H200 alone, unless --chips says otherwise.
"""

import fcntl
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
CACHE = REPOSITORY / ".cache" / "gpu-aot"
CONFIGS = REPOSITORY / "scripts" / "model_configs"
# Dependency groups of pyproject.toml: what all environments share, and what each adds.
SHARED = "gpu-aot-cuda"
ENVIRONMENTS = ("gpu-aot", "gpu-aot-oldest")
WRONG_OPTION = 2  # typer's exit status
# Of the caller's: another cache would hide that a kernel has no report, flags change the programs.
UNWANTED = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "MOSAIC_GPU_DUMP_TO")


def pins_of(group: str) -> list[str]:
    """The pins of a dependency group, without what this Python has in that version already."""
    document = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    return [pin for pin in document["dependency-groups"][group] if not _is_here(pin)]


def _is_here(pin: str) -> bool:
    name, _, version = pin.partition("==")
    try:
        return importlib.metadata.version(name) == version
    except importlib.metadata.PackageNotFoundError:
        return False


def make_layer(group: str) -> Path:
    """The folder with the wheels of a group, installed anew if its pins have changed."""
    folder, pins = CACHE / group, pins_of(group)
    stamp, wanted = folder / "pins.txt", "\n".join([sys.version, *pins])
    if stamp.is_file() and stamp.read_text() == wanted:
        return folder
    print(f"gpu-aot: installing {', '.join(pins)}", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    options = ["--no-deps", "--no-compile", "--only-binary", ":all:", "--target", str(folder)]
    subprocess.run([*pip, *options, *pins], check=True)
    stamp.write_text(wanted)
    return folder


def run(layers: Sequence[Path], *arguments: str) -> int:
    """Run this Python over the layers; its exit status."""
    environment = {name: v for name, v in os.environ.items() if name not in UNWANTED}
    environment |= {
        "PYTHONPATH": os.pathsep.join(map(str, layers)),
        "JAX_PLATFORMS": "cpu",  # else the plugin looks for a driver
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    return subprocess.run([sys.executable, *arguments], env=environment, check=False).returncode


def main(options: Sequence[str]) -> int:
    """All environments; 1 if a check failed in one, 2 for a wrong option."""
    job = ("-m", "jaxdisagg.gpu_aot", "--configs", str(CONFIGS))
    if "--help" in options:  # needs none of the environments
        return run((), *job, "--help")
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            shared = make_layer(SHARED)
            layers = {group: [make_layer(group), shared] for group in ENVIRONMENTS}
            for folder, _ in layers.values():
                # XLA looks for the assembler beside the plugin, else in a CUDA of the system.
                if not (folder / "nvidia").is_symlink():
                    (folder / "nvidia").symlink_to(Path("..") / shared.name / "nvidia")
        except subprocess.CalledProcessError as error:
            print(f"gpu-aot: pip ended with {error.returncode}, see above", file=sys.stderr)
            return 1
    newest, oldest = (layers[group] for group in ENVIRONMENTS)
    status = run(newest, *job, *options)
    if status == WRONG_OPTION:
        return status
    failed = [status]
    if not any(option.startswith("--only") for option in options):
        failed.append(run(newest, "-m", "pytest", "-q", "tests/gpu_aot"))
    failed.append(run(oldest, *job, "--chips", "H200", *_without_files(options)))
    return 1 if any(failed) else 0


def _without_files(options: Sequence[str]) -> list[str]:
    """The options but those that name files, which the first environment writes."""
    kept, skip = [], False
    for option in options:
        if not skip and not option.startswith(("--json", "--markdown")):
            kept.append(option)
        skip = option in ("--json", "--markdown")
    return kept


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
