"""What loading a model costs: bytes, time, and host memory beside the parameters."""

import math
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
    model's dtype, `host_peak` the most memory beside the parameters (`AnonymousMemory.peak`).
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


def device_bytes(arrays: Iterable[jax.Array]) -> int:
    """Bytes of all shards on this process's devices."""
    return sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards)


class AnonymousMemory:
    """A context in which this process's anonymous memory is sampled; then see `peak`.

    `peak` is the most bytes at any moment beyond what was in use at the beginning and beyond the
    arrays expected by then; None where /proc does not tell. Files mapped into memory do not count.
    Memory that lives for less than two milliseconds may escape.
    """

    def __init__(self) -> None:
        self.peak: int | None = None
        self._expected = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory-sampler", daemon=True)

    def expect(self, array: jax.ShapeDtypeStruct) -> None:
        """What follows makes this (sharded) array; where devices are the host, it is no excess."""
        assert array.sharding is not None
        shard = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        devices = array.sharding.addressable_devices
        self._expected += shard * sum(device.platform == "cpu" for device in devices)

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
            self.peak = max(self.peak or 0, now - self._before - self._expected)


def _anonymous_bytes() -> int | None:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return None
