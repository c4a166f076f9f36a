"""What loading a model costs: bytes, time, and host memory beside the parameters."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import jax

_SAMPLE_SECONDS = 0.002


@dataclass(frozen=True)
class LoadStats:
    """One load. All sizes in bytes, of this process and its devices.

    `device_bytes` counts every replica, `largest_tensor` is that of the stored tensors in the
    model's dtype, `host_peak` the most anonymous memory beyond what was there before and beyond
    the parameters themselves (files mapped into memory do not count); None where the system does
    not tell.
    """

    parameters: int
    device_bytes: int
    seconds: float
    largest_tensor: int
    host_peak: int | None

    def __str__(self) -> str:
        peak = "unknown" if self.host_peak is None else f"{self.host_peak / 1e6:.0f} MB"
        return (
            f"{self.parameters / 1e6:.1f} M parameters, {self.device_bytes / 1e6:.0f} MB on "
            f"devices, in {self.seconds:.1f} s; host memory beside them at most {peak} "
            f"(largest tensor {self.largest_tensor / 1e6:.0f} MB)"
        )


def device_bytes(arrays: Iterable[jax.Array], platform: str | None = None) -> int:
    """Bytes of all shards on this process's devices, or on those of a platform alone."""
    return sum(
        shard.data.nbytes
        for array in arrays
        for shard in array.addressable_shards
        if platform in (None, shard.device.platform)
    )


class AnonymousMemory:
    """A context in which this process's anonymous memory is sampled; then see `peak`.

    `peak` is in bytes beyond what was in use at the beginning; None where /proc does not tell.
    Memory that lives for less than two milliseconds may escape it.
    """

    def __init__(self) -> None:
        self.peak: int | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory-sampler", daemon=True)

    def __enter__(self) -> Self:
        self._before = _anonymous_bytes()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._note()

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self._note()

    def _note(self) -> None:
        now = _anonymous_bytes()
        if now is not None and self._before is not None:
            self.peak = max(self.peak or 0, now - self._before)


def _anonymous_bytes() -> int | None:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return None
