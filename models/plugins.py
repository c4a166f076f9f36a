"""Model families from other distributions, found by the entry points of the group `GROUP`.

Finding entry points imports nothing; loading one imports its module. Nothing here is remembered
between calls (Python's own module cache makes a second load cheap), so there is no registry that a
caller could find in the wrong state.
"""

import inspect
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from models.interface import ModelFamily

log = logging.getLogger(__name__)

GROUP = "jaxdisagg.models"


@dataclass(frozen=True)
class Plugin:
    """An entry point: the family that it names, or what is wrong with it."""

    origin: str  # for a person: the entry point, its object and its distribution
    family: ModelFamily | None
    problem: str = ""


def load_plugins(built_in: Iterable[ModelFamily]) -> list[Plugin]:
    """Every entry point of the group, loaded, in the order of their names.

    A plugin that raises while it is imported, names no `ModelFamily`, or claims the name or an
    architecture of a family of `built_in`, comes back with its `problem`; this raises nothing.
    """
    found = sorted(entry_points(group=GROUP), key=lambda e: (e.name, e.value))
    return [_load(entry, tuple(built_in)) for entry in found]


def _load(entry: EntryPoint, built_in: tuple[ModelFamily, ...]) -> Plugin:
    owner = f" of {entry.dist.name} {entry.dist.version}" if entry.dist is not None else ""
    origin = f"entry point {entry.name} = {entry.value}{owner} (group {GROUP})"
    try:
        family = entry.load()
    except Exception as error:  # whatever a foreign module does when it is imported
        log.debug("%s cannot be loaded", origin, exc_info=True)
        return Plugin(origin, None, f"{type(error).__name__}: {' '.join(str(error).split())}")
    problem = _misfit(family) or _taken(family, built_in)
    return Plugin(origin, None, problem) if problem else Plugin(origin, family)


def _misfit(family: Any) -> str:
    """What keeps an object from being a `ModelFamily`, or nothing."""
    if isinstance(family, type):
        return f"expected an instance of a model family, got the class {family.__name__}"
    if inspect.ismodule(family):
        return f"expected an instance of a model family, got the module {family.__name__}"
    if not isinstance(getattr(family, "name", None), str):
        return f"expected a model family, got {family!r}: it has no `name`"
    architectures = getattr(family, "architectures", None)
    if not isinstance(architectures, tuple) or not all(isinstance(a, str) for a in architectures):
        return f"architectures: expected a tuple of names, got {architectures!r}"
    methods = [name for name in vars(ModelFamily) if not name.startswith("_")]
    missing = [name for name in methods if not callable(getattr(family, name, None))]
    return f"the family {family.name!r} has no {', '.join(missing)}" if missing else ""


def _taken(family: ModelFamily, built_in: tuple[ModelFamily, ...]) -> str:
    """Which name of the family belongs to a built-in one, or nothing."""
    for other in built_in:
        if family.name == other.name:
            return f"name: {family.name!r} is taken by a built-in family"
        for name in family.architectures:
            if name in other.architectures:
                return f"architectures: {name} is taken by the built-in family {other.name!r}"
    return ""
