"""Our own declarations of CUDA's driver API against cuda.h.

Of a toolkit that is installed, or the one that `make gpu-aot` has fetched.
"""

import re
import subprocess
from pathlib import Path

import pytest
from repository import REPOSITORY

HEADERS = [
    Path("/usr/local/cuda/include/cuda.h"),
    *Path("/usr/local").glob("cuda-*/include/cuda.h"),
    Path("/usr/include/cuda.h"),
    *(REPOSITORY / ".cache" / "gpu-aot").glob("*/nvidia/cu*/include/cuda.h"),
]

# Each constant of cuda_driver.h and its name in cuda.h.
CONSTANTS = {
    "kSuccess": "CUDA_SUCCESS",
    "kInvalidValue": "CUDA_ERROR_INVALID_VALUE",
    "kOutOfMemory": "CUDA_ERROR_OUT_OF_MEMORY",
    "kInvalidDevice": "CUDA_ERROR_INVALID_DEVICE",
    "kInvalidContext": "CUDA_ERROR_INVALID_CONTEXT",
    "kInvalidHandle": "CUDA_ERROR_INVALID_HANDLE",
    "kNotReady": "CUDA_ERROR_NOT_READY",
    "kNotSupported": "CUDA_ERROR_NOT_SUPPORTED",
    "kHostAllocPortable": "CU_MEMHOSTALLOC_PORTABLE",
    "kStreamNonBlocking": "CU_STREAM_NON_BLOCKING",
    "kEventDisableTiming": "CU_EVENT_DISABLE_TIMING",
    "kAttributeUnifiedAddressing": "CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING",
    "kAttributeFlushWritesOptions": "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS",
    "kAttributeRdmaWritesOrdering": "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING",
    "kAttributeDmaBuf": "CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED",
    "kFlushOptionHost": "CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST",
    "kOrderingNone": "CU_GPU_DIRECT_RDMA_WRITES_ORDERING_NONE",
    "kOrderingOwner": "CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER",
    "kOrderingAllDevices": "CU_GPU_DIRECT_RDMA_WRITES_ORDERING_ALL_DEVICES",
    "kFlushTargetCurrentContext": "CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX",
    "kFlushToOwner": "CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER",
    "kRangeHandleDmaBuf": "CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD",
    "kPointerMemoryType": "CU_POINTER_ATTRIBUTE_MEMORY_TYPE",
    "kPointerDeviceOrdinal": "CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL",
    "kMemoryTypeHost": "CU_MEMORYTYPE_HOST",
    "kMemoryTypeDevice": "CU_MEMORYTYPE_DEVICE",
}

# An argument of ours and of cuda.h's are passed alike: by the same size, and both as pointers or
# both as integers (an enum of theirs is an int of ours).
CHECKER = """
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#undef __CUDA_API_VERSION_INTERNAL
#include <type_traits>
#include "cuda_driver.h"
template <class A, class B>
constexpr bool alike = sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B>;
template <class A, class B> struct Same : std::false_type {};
template <class... A, class... B>
struct Same<ffi_transport::cuda::Error (*)(A...), CUresult (*)(B...)> {
  static constexpr bool check() {
    if constexpr (sizeof...(A) != sizeof...(B)) return false;
    else return (alike<A, B> && ...);
  }
};
using namespace ffi_transport;
#define CHECK_FUNCTION(name, symbol, ...) \\
  static_assert(Same<decltype(CudaDriver::name), decltype(&::symbol)>::check(), #symbol);
FFI_TRANSPORT_CUDA_FUNCTIONS(CHECK_FUNCTION)
FFI_TRANSPORT_CUDA_OPTIONAL_FUNCTIONS(CHECK_FUNCTION)
"""


def header() -> Path:
    for path in HEADERS:
        if path.exists():
            return path
    pytest.skip("no cuda.h on this machine, and none fetched by make gpu-aot")


def compile_checker(tmp_path: Path, lines: str) -> subprocess.CompletedProcess[str]:
    source = tmp_path / "checker.cc"
    source.write_text(CHECKER + lines)
    csrc = REPOSITORY / "ffi_transport" / "csrc"
    command = ["c++", "-std=c++20", "-fsyntax-only", f"-I{header().parent}", f"-I{csrc}"]
    return subprocess.run([*command, str(source)], capture_output=True, text=True)


def test_constants_and_functions_are_those_of_cuda(tmp_path):
    ours = (REPOSITORY / "ffi_transport" / "csrc" / "cuda_driver.h").read_text()
    declared = re.findall(r"inline constexpr \w+ (k\w+) =", ours)
    assert sorted(declared) == sorted(CONSTANTS)
    lines = [
        f'static_assert(static_cast<long>({theirs}) == cuda::{name}, "{name}");'
        for name, theirs in CONSTANTS.items()
    ]
    result = compile_checker(tmp_path, "\n".join(lines))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "line",
    [
        'static_assert(static_cast<long>(CUDA_ERROR_NOT_READY) == cuda::kSuccess, "seeded");',
        'static_assert(Same<cuda::Error (*)(int), decltype(&::cuDeviceGet)>::check(), "seeded");',
        'static_assert(Same<cuda::Error (*)(int), decltype(&::cuMemFreeHost)>::check(), "seeded");',
    ],
)
def test_a_wrong_declaration_is_seen(tmp_path, line):
    result = compile_checker(tmp_path, line)
    assert result.returncode != 0
    assert "seeded" in result.stderr
