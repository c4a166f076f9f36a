"""Where CUDA's devices are, as a driver of known answers says it."""

import subprocess
from pathlib import Path

import pytest

from ffi_transport.topology import cuda_addresses

# The four calls as cuda.h declares them. CUresult and CUdevice are ints; 0 is success.
DRIVER = r"""
#include <stdio.h>
#include <string.h>
static const char* kAddresses[] = {%(addresses)s};
static int initialized = 0;
int cuInit(unsigned flags) { initialized = flags == 0; return %(init)d; }
int cuDeviceGetCount(int* count) {
  *count = (int)(sizeof kAddresses / sizeof *kAddresses);
  return initialized ? 0 : 3;
}
int cuDeviceGet(int* device, int ordinal) { *device = ordinal + 40; return 0; }
int cuDeviceGetPCIBusId(char* text, int length, int device) {
  if (%(fail)d == device - 40) return 101;
  snprintf(text, (size_t)length, "%%s", kAddresses[device - 40]);
  return 0;
}
"""


def driver(
    folder: Path, addresses: list[str], *, init: int = 0, fail: int = -1, source: str = DRIVER
) -> str:
    quoted = ", ".join(f'"{address}"' for address in addresses)
    code, library = folder / "driver.c", folder / "libdriver.so"
    code.write_text(source % {"addresses": quoted, "init": init, "fail": fail})
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, code], check=True, timeout=60)
    return str(library)


def test_addresses_in_the_order_of_ordinals(tmp_path):
    library = driver(tmp_path, ["0000:CA:00.0", "0000:53:00.0", "0001:64:00.0"])
    assert cuda_addresses(library) == ["0000:ca:00.0", "0000:53:00.0", "0001:64:00.0"]


def test_without_a_driver():
    assert cuda_addresses("libno-such-driver.so.1") == []
    assert cuda_addresses("libc.so.6") == []  # a library without these calls


@pytest.mark.parametrize("how", [{"init": 100}, {"fail": 1}])
def test_a_driver_that_fails(tmp_path, how):
    assert cuda_addresses(driver(tmp_path, ["0000:53:00.0", "0000:64:00.0"], **how)) == []
