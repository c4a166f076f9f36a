"""Running Mosaic kernels on a CPU: races are failures, unused pages are poison, bugs are seeded."""

import contextlib
import importlib.util
import io
import logging
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

# What the library says of a data race, and of barriers whose completions a thread misses.
REPORTS = (
    "RACE DETECTED",
    "no threads observed phase",
    "had only observed barrier",
    "must observe each barrier completion",
)


class Race(AssertionError):
    """Interpret mode reported a data race, or a barrier that nobody waited for."""


@contextlib.contextmanager
def races_fail() -> Iterator[None]:
    """Raise `Race` where the kernels interpreted inside race.

    jax 0.12 raises at a race by itself; 0.11.2 prints and goes on.
    """
    printed, logged = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(logged)
    logging.getLogger().addHandler(handler)
    try:
        with contextlib.redirect_stdout(printed):
            yield
    except Exception as e:
        forget_failed_kernel()
        if any(report in str(e) for report in REPORTS):
            raise Race(str(e)) from None
        raise
    finally:
        logging.getLogger().removeHandler(handler)
    reports = printed.getvalue() + logged.getvalue()
    if any(report in reports for report in REPORTS):
        raise Race(reports)


def forget_failed_kernel() -> None:
    """A kernel that raised leaves its memory behind, and the next one would trip over it."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    gpu_callbacks.reset_gpu_interpret_mode_state()


def interpreted(fn: Callable[..., jax.Array], *args: jax.typing.ArrayLike) -> np.ndarray:
    """fn(*args) jitted and done, in f32; `Race` where its kernels race."""
    with races_fail():
        return np.asarray(jax.block_until_ready(jax.jit(fn)(*args)), np.float32)


def seeded(module: ModuleType, old: str, new: str) -> ModuleType:
    """A fresh copy of the module whose source has `new` in the place of its only `old`."""
    assert module.__spec__ is not None
    source = module.__spec__.loader.get_source(module.__name__)
    assert source.count(old) == 1, f"{source.count(old)} of {old!r} in {module.__name__}"
    spec = importlib.util.spec_from_loader(f"{module.__name__}_seeded", loader=None)
    copy = importlib.util.module_from_spec(spec)
    exec(compile(source.replace(old, new), module.__spec__.origin, "exec"), copy.__dict__)
    return copy


def bf16(values: np.ndarray) -> np.ndarray:
    """Values rounded to bf16, kept in f32."""
    return np.asarray(jnp.asarray(values, jnp.bfloat16), np.float32)


def attended(table: np.ndarray, lengths: Sequence[int], page_size: int, pages: int) -> np.ndarray:
    """Which [page, offset] some row reads: the first `lengths` positions of its pages."""
    live = np.zeros((pages, page_size), bool)
    for row, length in enumerate(lengths):
        at = np.arange(length)
        live[table[row, at // page_size], at % page_size] = True
    return live
