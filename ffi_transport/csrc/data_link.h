// One peer's data endpoint on one domain, which writes to any of the peer's: its queue of jobs, its
// window, its writes in flight.
// Belongs to the domain's thread.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "data_worker.h"
#include "staged_queue.h"

namespace ffi_transport {

// A posted write. The context comes first: a completion hands its address back.
struct DataWorker::WriteOp {
  OpContext context;
  TransferPtr transfer;
  RegionPtr source;             // null for a staged write: it is read no more
  StagingRing* ring = nullptr;  // of a staged write, with its room there
  uint64_t room = 0;
  uint32_t units = 0;
  uint64_t bytes = 0;
  int64_t step = 0;
  int32_t layer = -1;
  int32_t ordinal = -1;
  bool busy = false;
};

struct DataWorker::Link {
  Link(int64_t peer, std::unique_ptr<Endpoint> endpoint, const DomainLimits* limits,
       const WorkerOptions& options, ImmCounters* counters, Stats* stats, DomainStats* domain_stats,
       TraceLog* trace);

  // With a ring where the job's memory is staged.
  void add(Job job, StagingRing* ring);

  // For ByteTurns. Writes from registered memory, and those from each device's ring, take turns.
  uint64_t next_bytes();
  bool post_next();
  uint64_t credit = 0;

  // Takes completions; true when there were any. Sets `broken` when the endpoint failed.
  bool poll();
  // Closes the endpoint, then fails what it held.
  void close(const std::string& reason);

  const int64_t peer;
  std::unique_ptr<Endpoint> endpoint;
  const DomainLimits* const limits;
  ImmCounters* const counters;
  Stats* const stats;
  DomainStats* const domain_stats;
  TraceLog* const trace;

  std::vector<PeerAddress>
      addresses;         // of the peer's data endpoints, by its domain; empty: not yet
  bool refused = false;  // the provider said: again
  std::string broken;

 private:
  // Where writes come from: the jobs (0) or a device's queue (its place + 1).
  uint64_t bytes_of(size_t source);
  uint64_t job_bytes();
  bool post_job();
  bool post_staged(StagedQueue& queue);
  // Posts what `op` says; its transfer has begun to be in flight.
  Status write(WriteOp& op, const PackedWrite& packed, std::span<const LocalPiece> local,
               const RemoteRegion::Access& access);
  void finish(const Completion& completion);
  void retire(WriteOp& op);
  void trace_write(TraceKind kind, const WriteOp& op);
  void drop_front(bool skipped);

  const uint64_t staged_ahead_;  // what of a ring the peer may hold
  FlowWindow window_;
  std::vector<WriteOp> ops_;
  std::vector<WriteOp*> free_;
  std::deque<Job> jobs_;
  PackedWrite head_;  // the front job's next write
  bool has_head_ = false;
  std::vector<std::unique_ptr<StagedQueue>> staged_;  // by device, in the order of their first jobs
  size_t turn_ = 0;                                   // whose write goes next
};

}  // namespace ffi_transport
