"""What the device can do at best: its copy bandwidth and its rate of bf16 matrix products.

`python -m jaxdisagg.bench.gpu.ceilings [--small]`. Kernels are judged by these and not by a data
sheet.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxdisagg.bench.gpu.rows import take_stdout

CALLS = 10  # between two reads of the clock, so that what a call costs the host is hidden
REPEATS = 7


def seconds_of(call: Callable[[], jax.Array]) -> float:
    """Median seconds of one call, of REPEATS times CALLS of them."""
    call().block_until_ready()
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        for _ in range(CALLS - 1):
            call()
        call().block_until_ready()
        times.append((time.perf_counter() - begin) / CALLS)
    return statistics.median(times)


def copy_bandwidth(nbytes: int) -> float:
    """Bytes per second of copying `nbytes`, those read and those written both counted."""
    x = jnp.arange(nbytes // 4, dtype=jnp.int32)
    add = jax.jit(lambda x: x + 1)
    return 2 * x.nbytes / seconds_of(lambda: add(x))


def matmul_rate(size: int) -> float:
    """Floating-point operations per second of a product of random bf16 [size, size] matrices."""
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    product = jax.jit(jnp.matmul)
    return 2 * size**3 / seconds_of(lambda: product(a, b))


def main() -> None:
    """Print one row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    small = parser.parse_args().small
    tell = take_stdout()
    device = jax.devices()[0]
    tell(
        {
            "device": device.device_kind,
            "platform": device.platform,
            "devices": jax.device_count(),
            "jax": jax.__version__,
            "copy_bytes_per_s": copy_bandwidth((16 << 20) if small else (2 << 30)),
            "matmul_flops_per_s": matmul_rate(256 if small else 8192),
        }
    )


if __name__ == "__main__":
    main()
