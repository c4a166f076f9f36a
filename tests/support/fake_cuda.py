"""The fake CUDA driver of tests/native for tests in Python: built, found by engines, directed.

conftest's fixture `fake_cuda` gives a FakeCuda in the state of a fresh start, and engines made
during the test find it as libcuda.so.1.
"""

import ctypes
import os
import subprocess
from pathlib import Path

from repository import REPOSITORY

VARIABLE = "JAXDISAGG_LIBCUDA"
NAME = "libfake_cuda.so"
_COMPILER = os.environ.get("CXX", "c++")


def build(folder: Path) -> Path:
    """Compile the driver into `folder`, for this process or for others that get VARIABLE."""
    out = folder / NAME
    csrc, native = REPOSITORY / "ffi_transport" / "csrc", REPOSITORY / "tests" / "native"
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"]
    sources = sorted(map(str, native.glob("fake_cuda*.cc")))
    command = [_COMPILER, *flags, f"-I{csrc}", f"-I{native}", *sources]
    subprocess.run([*command, "-o", str(out)], check=True)
    return out


class FakeCuda:
    """The fake driver in this process; what its methods mean is in tests/native/fake_cuda.h."""

    def __init__(self, library: Path) -> None:
        self.library = library
        self._functions = ctypes.CDLL(str(library))
        self._functions.fake_cuda_log.restype = ctypes.c_char_p

    def reset(self) -> None:
        """Forget the log and everything that was set; streams, events and memory stay."""
        self._functions.fake_cuda_reset()

    def set_devices(self, count: int) -> None:
        """How many devices there are: eight unless set."""
        self._functions.fake_cuda_set_devices(count)

    def set_attribute(self, device: int, attribute: int, value: int) -> None:
        """What cuDeviceGetAttribute answers: 0 unless set."""
        self._functions.fake_cuda_set_attribute(device, attribute, value)

    def set_pointer(self, address: int, length: int, device: int) -> None:
        """Take `length` bytes at `address` for the device's memory."""
        self._functions.fake_cuda_set_pointer(
            ctypes.c_uint64(address), ctypes.c_size_t(length), device
        )

    def fail(self, function: str, error: int, *, skip: int = 0, times: int = 1) -> None:
        """After `skip` calls of `function`, let the next `times` return `error`."""
        self._functions.fake_cuda_fail(function.encode(), error, skip, times)

    def set_delay(self, seed: int, most_us: int) -> None:
        """Before each operation of a stream a pause of up to `most_us` microseconds."""
        self._functions.fake_cuda_set_delay(ctypes.c_uint64(seed), most_us)

    def hold(self, held: bool) -> None:
        """While held, streams run nothing."""
        self._functions.fake_cuda_hold(int(held))

    def note(self, line: str) -> None:
        """Put a line of the test's own into the log."""
        self._functions.fake_cuda_note(line.encode())

    def log(self) -> list[str]:
        """One line per call in the order in which they began, and per operation that ran."""
        return self._functions.fake_cuda_log().decode().splitlines()

    def live(self, what: str) -> int:
        """How many are alive of "host", "stream", "event" or "context"."""
        count = self._functions.fake_cuda_live(what.encode())
        if count < 0:
            raise ValueError(f"what: {what!r}")
        return count
