// One peer's data endpoint on one domain, which writes to any of the peer's: its queue of jobs, its
// window, its writes in flight.
// Belongs to the domain's thread.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "data_worker.h"

namespace ffi_transport {

// A posted write. The context comes first: a completion hands its address back.
struct DataWorker::WriteOp {
  OpContext context;
  TransferPtr transfer;
  RegionPtr source;
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

  // For ByteTurns.
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
  std::deque<Job> jobs;

 private:
  void finish(const Completion& completion);
  void retire(WriteOp& op);
  void trace_write(TraceKind kind, const WriteOp& op);
  void drop_front(bool skipped);

  FlowWindow window_;
  std::vector<WriteOp> ops_;
  std::vector<WriteOp*> free_;
  PackedWrite head_;  // the front job's next write
  bool has_head_ = false;
  size_t head_cursor_ = 0;  // the front job's cursor before head_
};

}  // namespace ffi_transport
