"""Times of things taken in turns, and how sure a median is."""

import statistics
import time
from collections.abc import Callable, Sequence


def median_ci(values: Sequence[float]) -> tuple[float, float, float]:
    """Median and the order statistics that bound it with 95 % confidence."""
    ordered = sorted(values)
    n = len(ordered)
    half = 0.98 * n**0.5
    low, high = max(int(n / 2 - half), 0), min(int(n / 2 + half), n - 1)
    return statistics.median(ordered), ordered[low], ordered[high]


def interleaved(runs: Sequence[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Seconds of each run, taken in turns, so that a slow moment of the machine hits all."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for taken, run in zip(times, runs, strict=True):
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
    return times
