// A CUDA driver without a GPU, for tests: device memory is host memory, and what a real driver
// refuses is refused: calls without a current context, handles that are gone or another context's,
// what may not be captured, ranges that are no whole pages, anything after the end. Here are
// devices, contexts and memory; fake_cuda_streams.cc has streams and events, fake_cuda_settings.cc
// what tests say and read.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "fake_cuda_state.h"

using namespace fake_cuda;

namespace {

thread_local std::vector<cuda::Context> t_contexts;

int device_of(cuda::Context context) {
  return static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
}

}  // namespace

int fake_cuda::current_device() { return t_contexts.empty() ? -1 : device_of(t_contexts.back()); }

bool fake_cuda::pinned(const void* memory, size_t bytes) {
  std::lock_guard lock(state().mutex);
  auto it = state().host.upper_bound(const_cast<void*>(memory));
  if (it == state().host.begin()) return false;
  --it;
  const auto* begin = static_cast<const char*>(it->first);
  return static_cast<const char*>(memory) + bytes <= begin + it->second;
}

EXPORT cuda::Error cuInit(unsigned flags) {
  return call("cuInit", words(flags), [] {
    std::lock_guard lock(state().mutex);
    state().started = true;
    return cuda::kSuccess;
  });
}

EXPORT cuda::Error cuDeviceGetCount(int* count) {
  return call("cuDeviceGetCount", "", [&] {
    std::lock_guard lock(state().mutex);
    *count = state().devices;
    return state().started ? cuda::kSuccess : 3;  // CUDA_ERROR_NOT_INITIALIZED
  });
}

EXPORT cuda::Error cuDeviceGet(cuda::Device* device, int ordinal) {
  return call("cuDeviceGet", words(ordinal), [&] {
    std::lock_guard lock(state().mutex);
    if (ordinal < 0 || ordinal >= state().devices) return cuda::kInvalidDevice;
    *device = ordinal;
    return cuda::kSuccess;
  });
}

EXPORT cuda::Error cuDeviceGetAttribute(int* value, int attribute, cuda::Device device) {
  return call("cuDeviceGetAttribute", words(attribute, device), [&] {
    std::lock_guard lock(state().mutex);
    const auto it = state().attributes.find({device, attribute});
    *value = it != state().attributes.end()                   ? it->second
             : attribute == cuda::kAttributeUnifiedAddressing ? 1
                                                              : 0;
    return cuda::kSuccess;
  });
}

EXPORT cuda::Error cuDevicePrimaryCtxRetain(cuda::Context* context, cuda::Device device) {
  return call("cuDevicePrimaryCtxRetain", words(device), [&] {
    std::lock_guard lock(state().mutex);
    ++state().retained[device];
    *context = reinterpret_cast<cuda::Context>(static_cast<intptr_t>(device) + 1);
    return cuda::kSuccess;
  });
}

EXPORT cuda::Error cuDevicePrimaryCtxRelease_v2(cuda::Device device) {
  return call("cuDevicePrimaryCtxRelease_v2", words(device), [&] {
    std::lock_guard lock(state().mutex);
    if (state().retained[device] == 0) return cuda::kInvalidContext;
    --state().retained[device];
    return cuda::kSuccess;
  });
}

EXPORT cuda::Error cuCtxPushCurrent_v2(cuda::Context context) {
  return call("cuCtxPushCurrent_v2", words(device_of(context)), [&] {
    {
      std::lock_guard lock(state().mutex);
      if (state().retained[device_of(context)] == 0) return cuda::kInvalidContext;
    }
    t_contexts.push_back(context);
    return cuda::kSuccess;
  });
}

EXPORT cuda::Error cuCtxPopCurrent_v2(cuda::Context* context) {
  return call("cuCtxPopCurrent_v2", "", [&] {
    if (t_contexts.empty()) return cuda::kInvalidContext;
    *context = t_contexts.back();
    t_contexts.pop_back();
    return cuda::kSuccess;
  });
}

EXPORT cuda::Error cuMemHostAlloc(void** memory, size_t bytes, unsigned flags) {
  return call_in_context("cuMemHostAlloc", words(bytes, flags), [&] {
    const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    void* got = std::aligned_alloc(page, (bytes + page - 1) / page * page);
    if (bytes == 0 || got == nullptr) return cuda::kOutOfMemory;
    std::memset(got, 0xAB, bytes);  // pinned memory is not zeroed
    std::lock_guard lock(state().mutex);
    state().host[got] = bytes;
    *memory = got;
    return cuda::kSuccess;
  });
}

EXPORT cuda::Error cuMemFreeHost(void* memory) {
  return call_in_context("cuMemFreeHost", words(memory), [&] {
    {
      std::lock_guard lock(state().mutex);
      if (state().host.erase(memory) == 0) return cuda::kInvalidValue;
    }
    std::free(memory);
    return cuda::kSuccess;
  });
}

EXPORT cuda::Error cuPointerGetAttribute(void* value, int attribute, cuda::DevicePtr address) {
  return call("cuPointerGetAttribute", words(attribute, pointer(address)), [&] {
    std::lock_guard lock(state().mutex);
    auto it = state().pointers.upper_bound(address);
    if (it == state().pointers.begin()) return cuda::kInvalidValue;
    --it;
    if (address - it->first >= it->second.bytes) return cuda::kInvalidValue;
    if (attribute == cuda::kPointerMemoryType) {
      *static_cast<unsigned*>(value) = cuda::kMemoryTypeDevice;
    } else if (attribute == cuda::kPointerDeviceOrdinal) {
      *static_cast<int*>(value) = it->second.device;
    } else {
      return cuda::kInvalidValue;
    }
    return cuda::kSuccess;
  });
}

EXPORT cuda::Error cuFlushGPUDirectRDMAWrites(int target, int scope) {
  return call_in_context("cuFlushGPUDirectRDMAWrites", words(target, scope),
                         [] { return cuda::kSuccess; });
}

EXPORT cuda::Error cuMemGetHandleForAddressRange(void* handle, cuda::DevicePtr address,
                                                 size_t bytes, int type, unsigned long long flags) {
  return call_in_context(
      "cuMemGetHandleForAddressRange", words(pointer(address), bytes, type, flags), [&] {
        const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
        if (type != cuda::kRangeHandleDmaBuf || bytes == 0 || address % page || bytes % page) {
          return cuda::kInvalidValue;
        }
        const int fd = ::memfd_create("fake dmabuf", MFD_CLOEXEC);
        if (fd < 0) return cuda::kNotSupported;
        *static_cast<int*>(handle) = fd;
        return cuda::kSuccess;
      });
}

EXPORT cuda::Error cuGetErrorName(cuda::Error error, const char** name) {
  static const std::map<cuda::Error, const char*> names = {
      {cuda::kSuccess, "CUDA_SUCCESS"},
      {cuda::kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
      {cuda::kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
      {cuda::kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
      {cuda::kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
      {cuda::kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},
      {cuda::kNotReady, "CUDA_ERROR_NOT_READY"},
      {cuda::kNotSupported, "CUDA_ERROR_NOT_SUPPORTED"}};
  const auto it = names.find(error);
  if (it == names.end()) return cuda::kInvalidValue;
  *name = it->second;
  return cuda::kSuccess;
}
