"""Every operation that has kernels against numpy, on this machine's device.

`python -m jaxdisagg.bench.gpu.numerics [--small] [--backend NAME]`. A row names the operation, its
shape and the largest error; it has passed below `LIMIT`.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxdisagg.bench.gpu.kernel_cases import Case, cases
from jaxdisagg.bench.gpu.rows import take_stdout

LIMIT = 3e-3


def measure(make: Callable[[], Case], backend: str) -> dict[str, Any]:
    """One case's row; a back end that refuses or fails is told in it."""
    case = make()
    begin = time.perf_counter()
    row: dict[str, Any] = {"op": case.op, "shape": case.shape, "backend": backend}
    try:
        found = np.asarray(jax.jit(case.call(backend))(*case.operands), np.float32)
    except Exception as error:
        # Whatever a kernel's compiler or the device says belongs into the row of this one alone.
        return row | {"passed": False, "error": f"{type(error).__name__}: {error}"[:2000]}
    seconds = time.perf_counter() - begin
    expected = case.expected()
    scale = max(1.0, float(np.abs(expected).max()))  # averages of (-1, 1) stay within, sums do not
    error = float(np.abs(found[: len(expected)] - expected).max()) / scale  # NaN where there is one
    return row | {"max_error": error, "passed": error < LIMIT, "seconds": seconds}


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--backend", default="mosaic_gpu")
    wanted = parser.parse_args()
    tell = take_stdout()
    for make in cases(small=wanted.small):
        tell(measure(make, wanted.backend))


if __name__ == "__main__":
    main()
