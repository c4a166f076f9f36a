// A peer's writes out of a device's memory that the NIC cannot read: jobs that wait for room in the
// ring, copies on their way, and copied writes that can be posted. Belongs to the domain's thread.
//
// A write is in flight of its transfer, and its source region in use, while its copy runs; then
// again from post to acknowledgement. In between it only waits in the ring, so a cancelled transfer
// need not wait for a peer that takes nothing. Its room is in use until the write has ended.
#pragma once

#include <deque>
#include <memory>
#include <string>

#include "fabric.h"
#include "job.h"
#include "staging_ring.h"
#include "stats.h"

namespace ffi_transport {

struct StagedWrite {
  TransferPtr transfer;
  RegionPtr source;  // null once it was copied
  RemoteRegionPtr remote;
  size_t remote_place = 0;
  size_t domains = 1;  // that the source region's jobs are spread over
  PackedWrite packed;
  StagedCopy copy;
  int64_t step = 0;
  int32_t layer = -1;
  int32_t ordinal = -1;
};

class StagedQueue {
 public:
  // `ahead`: bytes that the peer may have in the ring, posted ones included.
  StagedQueue(int64_t peer, StagingRing* ring, const DomainLimits* limits, uint64_t ahead,
              Stats* stats);
  ~StagedQueue();
  StagedQueue(const StagedQueue&) = delete;
  StagedQueue& operator=(const StagedQueue&) = delete;

  StagingRing& ring() { return *ring_; }
  void push(Job job) { jobs_.push_back(std::move(job)); }

  // For the ring's turns: the next write to copy, and to begin with it.
  uint64_t next_bytes();
  bool post_next();
  uint64_t credit = 0;

  // Looks at the copies on their way.
  bool poll();
  // Bytes of the oldest write if it can be posted, else 0.
  uint64_t ready_bytes();
  StagedWrite& front() { return writes_.front(); }
  // It was posted: the room is the caller's until the write has ended.
  void pop_front();
  // It will not be posted.
  void drop_front();

  // Fails all; copies that run keep their room until they have ended.
  void close(const std::string& reason);

 private:
  void drop_job(bool skipped);

  const int64_t peer_;
  StagingRing* const ring_;
  const DomainLimits* const limits_;
  const uint64_t ahead_;
  Stats* const stats_;
  std::deque<Job> jobs_;
  PackedWrite head_;  // the front job's next write
  bool has_head_ = false;
  bool waits_ = false;
  uint64_t room_ = 0;  // of head_, once it has any
  bool has_room_ = false;
  std::deque<StagedWrite> writes_;  // copied, then being copied
  size_t copied_ = 0;
};

}  // namespace ffi_transport
