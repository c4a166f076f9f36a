// Pinned host memory between a device and a domain whose NIC cannot read the device's memory: the
// bytes of a write are copied here on a stream of their own, and the write is posted from here when
// its copy has ended. One for each (device, domain); after it was opened it belongs to the domain's
// thread.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "cuda_driver.h"
#include "fabric.h"
#include "flow.h"
#include "packer.h"
#include "region.h"
#include "staging_space.h"

namespace ffi_transport {

class StagedQueue;

// Room in a ring and the copy that fills it. No event: the copy has ended.
struct StagedCopy {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  cuda::Event event = nullptr;
};

class StagingRing {
 public:
  // A ring holds at least two units, so that one can be copied while another is sent.
  static constexpr uint64_t kMinBytes = 2 * kMaxWriteBytes;

  // kUnavailable or kRegistration, with what could not be had.
  static Result<std::unique_ptr<StagingRing>> open(std::shared_ptr<CudaDevice> device,
                                                   Domain& domain, uint64_t bytes);
  // Waits for the copies that still run, a few seconds: a device that does not end them by then
  // keeps the memory.
  ~StagingRing();

  int device() const { return device_->ordinal(); }
  // Writes are cut so that several fit into a small ring.
  uint64_t max_write() const { return std::min(kMaxWriteBytes, space_.capacity() / 4); }
  StagingSpace& space() { return space_; }
  // What a write reads.
  LocalPiece piece(const StagedCopy& copy) const {
    return {memory_ + copy.offset, copy.bytes, registration_->descriptor()};
  }

  // Copies the write's pieces, one behind the other, to copy->offset. When it fails and
  // copy->event is set, a part is on its way: then abandon() it.
  Status begin(const Region& source, const PackedWrite& write, StagedCopy* copy);
  // kAgain while the copy runs. Anything else: the room is only the caller's.
  Status end(StagedCopy* copy);
  // Gives the room back for the owner, when the copy has ended; until then the region is read.
  void abandon(int64_t owner, StagedCopy copy, RegionPtr source);

  // Queues take turns by bytes.
  void add(StagedQueue* queue) { queues_.push_back(queue); }
  void remove(StagedQueue* queue) { std::erase(queues_, queue); }
  // Begins and ends what it can; true if that was anything.
  bool work();
  bool copying() const { return running_ > 0; }

 private:
  struct Abandoned {
    int64_t owner;
    StagedCopy copy;
    RegionPtr source;
  };

  StagingRing(std::shared_ptr<CudaDevice> device, uint64_t bytes)
      : device_(std::move(device)), space_(bytes) {}
  const CudaDriver& cuda() const { return device_->driver(); }
  bool sweep();

  const std::shared_ptr<CudaDevice> device_;
  StagingSpace space_;
  char* memory_ = nullptr;
  cuda::Stream stream_ = nullptr;
  std::unique_ptr<Registration> registration_;
  std::vector<cuda::Event> idle_events_;
  size_t running_ = 0;
  std::deque<Abandoned> abandoned_;
  std::vector<StagedQueue*> queues_;
  ByteTurns<StagedQueue> turns_;
};

}  // namespace ffi_transport
