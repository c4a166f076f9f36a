// CUDA's driver loaded at run time, so that one build serves machines with and without it, and is
// made without the CUDA toolkit. The types, numbers and functions below are this project's own
// declarations of the driver's public binary interface; a test compares them with cuda.h where one
// is installed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "status.h"

namespace ffi_transport {

namespace cuda {

using Error = int;
inline constexpr Error kSuccess = 0;
inline constexpr Error kInvalidValue = 1;
inline constexpr Error kOutOfMemory = 2;
inline constexpr Error kInvalidDevice = 101;
inline constexpr Error kInvalidContext = 201;
inline constexpr Error kInvalidHandle = 400;
inline constexpr Error kNotReady = 600;
inline constexpr Error kNotSupported = 801;

using Device = int;          // the ordinal among the devices that this process may use
using DevicePtr = uint64_t;  // unified addressing: one address space with the host's
using Context = struct ContextObject*;
using Stream = struct StreamObject*;
using Event = struct EventObject*;

// Flags and attributes, by the place that they are given to.
inline constexpr unsigned kHostAllocPortable = 1;  // usable from every context
inline constexpr unsigned kStreamNonBlocking = 1;  // not ordered with the null stream
inline constexpr unsigned kEventDisableTiming = 2;

inline constexpr int kAttributeUnifiedAddressing = 41;
inline constexpr int kAttributeFlushWritesOptions = 117;
inline constexpr int kAttributeRdmaWritesOrdering = 118;
inline constexpr int kAttributeDmaBuf = 124;

inline constexpr int kFlushOptionHost = 1;  // a bit of kAttributeFlushWritesOptions
inline constexpr int kOrderingNone = 0;     // values of kAttributeRdmaWritesOrdering
inline constexpr int kOrderingOwner = 100;
inline constexpr int kOrderingAllDevices = 200;
inline constexpr int kFlushTargetCurrentContext = 0;
inline constexpr int kFlushToOwner = 100;

inline constexpr int kRangeHandleDmaBuf = 1;

inline constexpr int kPointerMemoryType = 2;
inline constexpr int kPointerDeviceOrdinal = 9;
inline constexpr unsigned kMemoryTypeHost = 1;
inline constexpr unsigned kMemoryTypeDevice = 2;

}  // namespace cuda

// X(name here, symbol of the library, arguments...); all return cuda::Error. Every driver that a
// supported jax runs on has the first list; those of the second are newer and may be null.
#define FFI_TRANSPORT_CUDA_FUNCTIONS(X)                                                            \
  X(init, cuInit, unsigned flags)                                                                  \
  X(device_get, cuDeviceGet, cuda::Device* device, int ordinal)                                    \
  X(device_get_count, cuDeviceGetCount, int* count)                                                \
  X(device_get_attribute, cuDeviceGetAttribute, int* value, int attribute, cuda::Device device)    \
  X(primary_context_retain, cuDevicePrimaryCtxRetain, cuda::Context* context, cuda::Device device) \
  X(primary_context_release, cuDevicePrimaryCtxRelease_v2, cuda::Device device)                    \
  X(context_push, cuCtxPushCurrent_v2, cuda::Context context)                                      \
  X(context_pop, cuCtxPopCurrent_v2, cuda::Context* context)                                       \
  X(mem_host_alloc, cuMemHostAlloc, void** memory, size_t bytes, unsigned flags)                   \
  X(mem_free_host, cuMemFreeHost, void* memory)                                                    \
  X(memcpy_dtoh_async, cuMemcpyDtoHAsync_v2, void* to, cuda::DevicePtr from, size_t bytes,         \
    cuda::Stream stream)                                                                           \
  X(memcpy_htod_async, cuMemcpyHtoDAsync_v2, cuda::DevicePtr to, const void* from, size_t bytes,   \
    cuda::Stream stream)                                                                           \
  X(memcpy_dtod_async, cuMemcpyDtoDAsync_v2, cuda::DevicePtr to, cuda::DevicePtr from,             \
    size_t bytes, cuda::Stream stream)                                                             \
  X(stream_create, cuStreamCreate, cuda::Stream* stream, unsigned flags)                           \
  X(stream_destroy, cuStreamDestroy_v2, cuda::Stream stream)                                       \
  X(event_create, cuEventCreate, cuda::Event* event, unsigned flags)                               \
  X(event_record, cuEventRecord, cuda::Event event, cuda::Stream stream)                           \
  X(event_query, cuEventQuery, cuda::Event event)                                                  \
  X(event_destroy, cuEventDestroy_v2, cuda::Event event)                                           \
  X(pointer_get_attribute, cuPointerGetAttribute, void* value, int attribute,                      \
    cuda::DevicePtr pointer)                                                                       \
  X(get_error_name, cuGetErrorName, cuda::Error error, const char** name)

#define FFI_TRANSPORT_CUDA_OPTIONAL_FUNCTIONS(X)                                     \
  X(flush_gpu_direct_rdma_writes, cuFlushGPUDirectRDMAWrites, int target, int scope) \
  X(mem_get_handle_for_address_range, cuMemGetHandleForAddressRange, void* handle,   \
    cuda::DevicePtr pointer, size_t bytes, int type, unsigned long long flags)

class CudaDriver {
 public:
#define FFI_TRANSPORT_FIELD(name, symbol, ...) cuda::Error (*name)(__VA_ARGS__) = nullptr;
  FFI_TRANSPORT_CUDA_FUNCTIONS(FFI_TRANSPORT_FIELD)
  FFI_TRANSPORT_CUDA_OPTIONAL_FUNCTIONS(FFI_TRANSPORT_FIELD)
#undef FFI_TRANSPORT_FIELD

  // The process's driver, loaded and initialised once and never unloaded: libcuda.so.1, or what the
  // environment's JAXDISAGG_LIBCUDA names. kUnavailable says what is missing; a later call tries
  // again.
  static Result<const CudaDriver*> open();

  // Ok for kSuccess; else of this code, with what was attempted and the error's name.
  Status check(cuda::Error error, const std::string& attempt, Code code = Code::kUnavailable) const;
  std::string error_name(cuda::Error error) const;
};

// A device whose primary context, the one that XLA uses too, is held until the last owner is gone.
class CudaDevice {
 public:
  // kInvalid when there is no such ordinal.
  static Result<std::shared_ptr<CudaDevice>> open(int ordinal);
  ~CudaDevice();
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  const CudaDriver& driver() const { return driver_; }
  int ordinal() const { return ordinal_; }
  Result<int> attribute(int attribute) const;

 private:
  friend class CudaCurrent;
  CudaDevice(const CudaDriver& driver, int ordinal) : driver_(driver), ordinal_(ordinal) {}

  const CudaDriver& driver_;
  const int ordinal_;
  cuda::Device device_ = 0;
  cuda::Context context_ = nullptr;
};

// Makes a device's context the calling thread's current one for as long as this lives; what was
// current before is so again afterwards. Allowed while the thread captures a stream.
class CudaCurrent {
 public:
  explicit CudaCurrent(const CudaDevice& device);
  ~CudaCurrent();
  CudaCurrent(const CudaCurrent&) = delete;
  CudaCurrent& operator=(const CudaCurrent&) = delete;

  const Status& status() const { return status_; }

 private:
  const CudaDriver& driver_;
  Status status_;
};

}  // namespace ffi_transport
