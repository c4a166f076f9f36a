#include "device_lane.h"

#include <thread>
#include <utility>

namespace ffi_transport {
namespace {

// A copy of a few pages takes some ten microseconds, one of a long prompt some milliseconds.
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr auto kNap = std::chrono::microseconds(100);

}  // namespace

Result<bool> DeviceLane::needs_flush(const CudaDevice& device) {
  auto ordering = device.attribute(cuda::kAttributeRdmaWritesOrdering);
  if (!ordering.ok()) return ordering.status();
  // The pages are read by the device that holds them: that it sees them in order suffices.
  if (*ordering >= cuda::kOrderingOwner) return false;
  auto options = device.attribute(cuda::kAttributeFlushWritesOptions);
  if (!options.ok()) return options.status();
  const bool callable = device.driver().flush_gpu_direct_rdma_writes != nullptr;
  if ((*options & cuda::kFlushOptionHost) != 0 && callable) return true;
  Status::Detail detail;
  detail.text = "CUDA device " + std::to_string(device.ordinal()) +
                " does not order a NIC's writes into its memory, and its driver offers no flush";
  detail.missing = "cuFlushGPUDirectRDMAWrites";
  return Status(Code::kUnavailable, std::move(detail));
}

Result<std::unique_ptr<DeviceLane>> DeviceLane::open(int ordinal) {
  auto device = CudaDevice::open(ordinal);
  if (!device.ok()) return device.status();
  auto flushes = needs_flush(**device);
  std::unique_ptr<DeviceLane> lane(new DeviceLane(device.take(), std::move(flushes)));
  const CudaCurrent current(*lane->device_);
  if (!current.status().ok()) return current.status();
  const CudaDriver& driver = lane->driver_;
  if (const auto error = driver.stream_create(&lane->stream_, cuda::kStreamNonBlocking); error) {
    return lane->failed(error, "a stream for arrivals");
  }
  if (const auto error = driver.event_create(&lane->event_, cuda::kEventDisableTiming); error) {
    return lane->failed(error, "an event for arrivals");
  }
  return lane;
}

DeviceLane::~DeviceLane() {
  if (hung()) return;
  const CudaCurrent current(*device_);
  if (!current.status().ok()) return;
  if (event_ != nullptr) driver_.event_destroy(event_);
  if (stream_ != nullptr) driver_.stream_destroy(stream_);
}

Status DeviceLane::failed(cuda::Error error, const char* what) const {
  return driver_.check(error, "CUDA device " + std::to_string(ordinal()) + ", " + what);
}

Status DeviceLane::flush(bool* done) {
  *done = false;
  if (!flushes_.ok()) return flushes_.status();
  if (!*flushes_) return {};
  const CudaCurrent current(*device_);
  if (!current.status().ok()) return current.status();
  *done = true;
  return failed(
      driver_.flush_gpu_direct_rdma_writes(cuda::kFlushTargetCurrentContext, cuda::kFlushToOwner),
      "the flush of a NIC's writes");
}

Status DeviceLane::copy(uint64_t to, const char* from, uint64_t bytes) {
  const CudaCurrent current(*device_);
  if (!current.status().ok()) return current.status();
  return failed(driver_.memcpy_htod_async(to, from, bytes, stream_),
                "a copy of landed pages into it");
}

Status DeviceLane::wait(Clock::time_point deadline) {
  const CudaCurrent current(*device_);
  if (const auto error = driver_.event_record(event_, stream_); error) {
    unknown_ = true;
    hung_ = true;
    return failed(error, "an event after copies of landed pages");
  }
  const auto begin = Clock::now();
  while (true) {
    const cuda::Error error = driver_.event_query(event_);
    if (error != cuda::kNotReady) return failed(error, "copies of landed pages into it");
    const auto now = Clock::now();
    if (now >= deadline) break;
    if (now - begin > kSpin) std::this_thread::sleep_for(kNap);
  }
  hung_ = true;
  Status::Detail detail;
  detail.text = "CUDA device " + std::to_string(ordinal()) +
                ": copies of landed pages into it did not end in time";
  detail.elapsed_s = std::chrono::duration<double>(Clock::now() - begin).count();
  detail.missing = "the end of its stream for arrivals";
  return Status(Code::kTimeout, std::move(detail));
}

bool DeviceLane::hung() {
  if (!hung_) return false;
  const CudaCurrent current(*device_);
  if (current.status().ok() && !unknown_) hung_ = driver_.event_query(event_) == cuda::kNotReady;
  return hung_;
}

}  // namespace ffi_transport
