"""The fake driver as Python tests see it."""

import ctypes
import os

import pytest
from fake_cuda import VARIABLE

INVALID_CONTEXT, NOT_SUPPORTED = 201, 801


def test_it_is_found_and_fails_when_told(fake_cuda):
    assert os.environ[VARIABLE] == str(fake_cuda.library)
    driver = ctypes.CDLL(os.environ[VARIABLE])
    count = ctypes.c_int()
    assert driver.cuInit(0) == 0
    fake_cuda.set_devices(3)
    assert driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    assert count.value == 3
    fake_cuda.fail("cuDeviceGetCount", NOT_SUPPORTED, skip=1, times=2)
    results = [driver.cuDeviceGetCount(ctypes.byref(count)) for _ in range(4)]
    assert results == [0, NOT_SUPPORTED, NOT_SUPPORTED, 0]
    fake_cuda.note("here")
    assert fake_cuda.log()[-1] == "here"
    assert fake_cuda.log().count("failed cuDeviceGetCount 801") == 2
    stream = ctypes.c_void_p()
    assert driver.cuStreamCreate(ctypes.byref(stream), 1) == INVALID_CONTEXT
    before = {what: fake_cuda.live(what) for what in ("host", "stream", "event", "context")}
    context = ctypes.c_void_p()
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert fake_cuda.live("context") == before["context"] + 1
    assert driver.cuDevicePrimaryCtxRelease_v2(0) == 0
    assert {what: fake_cuda.live(what) for what in before} == before
    with pytest.raises(ValueError, match="what: 'streams'"):
        fake_cuda.live("streams")
