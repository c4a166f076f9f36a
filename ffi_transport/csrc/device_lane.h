// What arrivals do on one device: copies out of a mirror on a stream of their own, and the flush of
// what a NIC wrote into the device's memory (R17).
//
// The copies go into pages of buffers that XLA owns and donates to step after step, while steps
// run. That is what a NIC's writes do, and it is safe for the same reason: the pages belong to a
// request that no step has in its batch, no step program rewrites its whole cache, and the step
// that reads them is launched by the host after the event that reports them.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "cuda_driver.h"
#include "status.h"
#include "waiter.h"

namespace ffi_transport {

class DeviceLane {
 public:
  static Result<std::unique_ptr<DeviceLane>> open(int ordinal);
  // What is still under way ends first, unless it has hung: then stream and event are left behind.
  ~DeviceLane();
  DeviceLane(const DeviceLane&) = delete;
  DeviceLane& operator=(const DeviceLane&) = delete;

  int ordinal() const { return device_->ordinal(); }

  // Whether writes of a NIC need a flush before the device's own programs see them. kUnavailable
  // when they do and the driver has no flush for the host to call: such a device's memory cannot be
  // written directly.
  static Result<bool> needs_flush(const CudaDevice& device);

  // Makes what a NIC has written visible to the device, where that needs doing. `done` says whether
  // it did.
  Status flush(bool* done);

  // Enqueues a copy. `from` stays as it is until `wait` has returned ok.
  Status copy(uint64_t to, const char* from, uint64_t bytes);
  // Until everything enqueued has run, well or not; kTimeout when it has not by `deadline`.
  Status wait(Clock::time_point deadline);
  // True once nobody knows that all copies have ended: `wait` has timed out, or failed to find out.
  // No longer once they have ended after all. From any thread; all else is for one.
  bool hung();

 private:
  DeviceLane(std::shared_ptr<CudaDevice> device, Result<bool> flushes)
      : device_(std::move(device)), driver_(device_->driver()), flushes_(std::move(flushes)) {}
  Status failed(cuda::Error error, const char* what) const;

  const std::shared_ptr<CudaDevice> device_;
  const CudaDriver& driver_;
  Result<bool> flushes_;  // asked of the device once; an error if it needs what it cannot do
  cuda::Stream stream_ = nullptr;
  cuda::Event event_ = nullptr;
  std::atomic<bool> hung_{false};
  std::atomic<bool> unknown_{false};  // hung without an event that could tell the end
};

}  // namespace ffi_transport
