"""Python, the packages that a deployment needs, and the native part."""

import platform
import sys
from importlib import import_module, metadata

from jaxdisagg.doctor.finding import Finding, Values, problem

SUBJECT = "software"
LEAST_PYTHON = (3, 12)
NEEDED = (
    "jax", "jaxlib", "flax", "numpy", "ml_dtypes", "orbax-checkpoint", "safetensors", "tokenizers",
    "jinja2", "msgspec", "fastapi", "uvicorn", "httpx", "prometheus-client", "rich", "typer",
)  # fmt: skip
NATIVE = "ffi_transport._native"


def probe() -> Values:
    """Versions of Python and the needed packages ("" for one that is not there); the native part.

    `native` is "" if it loads, else why not.
    """
    packages = {}
    for name in NEEDED:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = ""
    try:
        import_module(NATIVE)
    except ImportError as error:
        native = str(error)
    else:
        native = ""
    return {
        "python": platform.python_version(),
        "python_fits": sys.version_info >= LEAST_PYTHON,
        "packages": packages,
        "native": native,
    }


def findings(values: Values) -> list[Finding]:
    """Judge what `probe` found."""
    if failed := problem(SUBJECT, "packages", values, needed=True):
        return failed
    python, packages = values["python"], values["packages"]
    gone = [name for name, version in packages.items() if not version]
    versions = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    return [
        Finding(SUBJECT, "python", python)
        if values["python_fits"]
        else Finding(SUBJECT, "python", python, "missing", "3.12 or later is needed"),
        Finding(SUBJECT, "packages", versions, "missing", f"install {', '.join(gone)}")
        if gone
        else Finding(SUBJECT, "packages", versions),
        Finding(SUBJECT, "native part", "-", "missing", f"{values['native']}: make setup builds it")
        if values["native"]
        else Finding(SUBJECT, "native part", "loads"),
    ]
