"""Every operation that has kernels against numpy, on this machine's device.

`python -m jaxdisagg.bench.gpu.numerics [--small] [--backend NAME] [--seconds S] [--op OP]`. A row
names the operation, its shape and the largest error; it has passed below `LIMIT`. Each operation
has a process of its own, all at once: a kernel that hangs or breaks the device's context takes no
other with it.
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxdisagg.bench.gpu.kernel_cases import OPS, Case, cases
from jaxdisagg.bench.gpu.rows import Tell, read_rows, take_stdout

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


def measure_apart(op: str, options: Sequence[str], seconds: float, tell: Tell) -> None:
    """Tell the rows of one operation, measured in a process of its own, and how that ended.

    A process that ends well without a row has failed too.
    """
    command = [sys.executable, "-m", "jaxdisagg.bench.gpu.numerics", "--op", op, *options]
    # The others' memory is not to be taken at once.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        told = 0
        assert process.stdout is not None
        for line in process.stdout:
            for row in read_rows(line):
                tell(row)
                told += 1
        status = process.wait()
        late = not timer.is_alive()
        timer.cancel()
    if status:
        why = f"no answer within {seconds:g} s" if late else f"ended with status {status}"
        tell({"op": op, "passed": False, "error": why})
    elif not told:
        tell({"op": op, "passed": False, "error": "ended without a row"})


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--backend", default="mosaic_gpu")
    parser.add_argument("--seconds", type=float, default=600.0, help="for each operation")
    parser.add_argument("--op", choices=sorted(OPS), help="one operation, in this process")
    wanted = parser.parse_args()
    tell = take_stdout()
    if wanted.op is not None:
        for make in cases(wanted.op, small=wanted.small):
            tell(measure(make, wanted.backend))
        return
    options = ["--backend", wanted.backend, *(["--small"] if wanted.small else [])]
    with ThreadPoolExecutor(len(OPS)) as pool:
        running = [pool.submit(measure_apart, op, options, wanted.seconds, tell) for op in OPS]
    for future in running:
        future.result()  # raises what went wrong on this side


if __name__ == "__main__":
    main()
