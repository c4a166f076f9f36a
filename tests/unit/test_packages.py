"""Guards on the layout of the packages (docs/adr/0001-top-level-models-package.md)."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = ("jaxdisagg", "models", "pallas_kernels", "ffi_transport")
ROOT = Path(__file__).resolve().parents[2]


def parent(name: str) -> Path:
    module = importlib.import_module(name)
    assert module.__file__, f"{name} is a namespace package: another distribution shadows it"
    return Path(module.__file__).resolve().parent.parent


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_shares_its_parent_with_jaxdisagg(name):
    assert parent(name) == parent("jaxdisagg"), f"another distribution owns the name {name!r}"


PURE = ("page_pool", "request", "transfer_plan", "messages")


@pytest.mark.parametrize("name", PURE)
def test_the_pure_modules_load_no_jax(name):
    code = (
        f"import sys, jaxdisagg.{name}; "
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'jax', 'jaxlib', 'flax'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
