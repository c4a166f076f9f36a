"""The repository's root, and its scripts as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def load_script(name: str) -> ModuleType:
    """Import scripts/NAME.py, which is in no package."""
    module_name = f"scripts_{name}"
    if module_name not in sys.modules:
        path = REPOSITORY / "scripts" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    return sys.modules[module_name]
