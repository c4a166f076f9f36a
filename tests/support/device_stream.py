"""A device of the fake CUDA driver as XLA drives it: a stream, and trigger calls put on it."""

import ctypes
import subprocess
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from repository import REPOSITORY

from ffi_transport import _native

COMMAND_BUFFER_COMPATIBLE = 1  # the bit of XLA's handler traits


def build_caller(folder: Path) -> Path:
    """Compile tests/native/ffi_caller.cc into `folder`."""
    spec = find_spec("jaxlib")
    assert spec is not None
    assert spec.submodule_search_locations
    headers = Path(spec.submodule_search_locations[0]) / "include"
    out = folder / "libffi_caller.so"
    source = REPOSITORY / "tests" / "native" / "ffi_caller.cc"
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-isystem", headers]
    subprocess.run(["c++", *flags, source, "-o", out], check=True)
    return out


def _pointer(capsule: object) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return get(capsule, b"xla._CUSTOM_CALL_TARGET")


class FfiCaller:
    """Calls the project's FFI handlers without XLA."""

    def __init__(self, library: Path) -> None:
        self._functions = ctypes.CDLL(str(library))
        self._functions.ffi_caller_error.restype = ctypes.c_char_p
        self._cpu = ctypes.c_void_p(_pointer(_native.trigger_handler()))
        self._cuda = ctypes.c_void_p(_pointer(_native.trigger_handler_cuda()))

    def traits(self, platform: str) -> int:
        """The traits of the handler for "cpu" or "CUDA"."""
        handler = {"cpu": self._cpu, "CUDA": self._cuda}[platform]
        return self._functions.ffi_caller_traits(handler)

    def trigger(
        self,
        stream: int,
        ordinal: int,
        engine: int,
        layer: int,
        step: np.ndarray,
        x: np.ndarray,
        cache: np.ndarray,
        out: np.ndarray | None = None,
    ) -> None:
        """One call of the handler for CUDA; `out` is x unless given. RuntimeError if it fails."""
        arrays = [step, x, cache, x if out is None else out]
        addresses = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
        numbers = [ctypes.c_int32(value) for value in (ordinal, engine, layer)]
        failed = self._functions.ffi_caller_trigger(
            self._cuda, ctypes.c_void_p(stream), *numbers, *addresses, ctypes.c_int64(x.size)
        )
        if failed:
            raise RuntimeError(self._functions.ffi_caller_error().decode())


class DeviceStream:
    """A stream of the fake driver on one device, whose memory numpy arrays play."""

    def __init__(self, library: Path, ordinal: int) -> None:
        self.ordinal = ordinal
        self._driver = ctypes.CDLL(str(library))
        context, stream = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(ordinal))
        self._context = context
        self._in_context("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(1))
        self.handle = stream.value or 0

    def _call(self, name: str, *arguments: object) -> None:
        error = getattr(self._driver, name)(*arguments)
        assert error == 0, f"{name}: {error}"

    def _in_context(self, name: str, *arguments: object) -> None:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            self._call(name, *arguments)
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def write(self, to: np.ndarray, values: np.ndarray) -> None:
        """Enqueue to[...] = values; both must stay until it has run."""
        assert to.nbytes == values.nbytes
        self._in_context(
            "cuMemcpyDtoDAsync_v2",
            ctypes.c_uint64(to.ctypes.data),
            ctypes.c_uint64(values.ctypes.data),
            ctypes.c_size_t(values.nbytes),
            ctypes.c_void_p(self.handle),
        )

    def close(self) -> None:
        """Run what was enqueued, then give the stream and the context back."""
        self._in_context("cuStreamDestroy_v2", ctypes.c_void_p(self.handle))
        self._call("cuDevicePrimaryCtxRelease_v2", ctypes.c_int(self.ordinal))
