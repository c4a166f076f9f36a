// One progress thread per domain (NIC). It owns one data endpoint per peer (R13), posts writes in
// fair turns, counts arriving immediates and ends transfers.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "fabric.h"
#include "flow.h"
#include "imm_counters.h"
#include "job.h"
#include "staging_ring.h"
#include "stats.h"
#include "trace.h"
#include "waiter.h"

namespace ffi_transport {

struct WorkerOptions {
  int spin_us = 50;
  uint64_t bytes_in_flight = 16 << 20;  // per peer, from one device group
  uint32_t posts_in_flight = 128;       // per peer
  bool trace = false;
};

class DataWorker {
 public:
  // Called by the worker when a data endpoint broke, after it was closed.
  using LinkBroken = std::function<void(int64_t peer, const std::string& reason)>;

  DataWorker(std::unique_ptr<Domain> domain, const WorkerOptions& options, ImmCounters* counters,
             Stats* stats, std::atomic<uint64_t>* trace_order, LinkBroken link_broken);
  ~DataWorker();

  // `extra` runs in every turn of the loop and says whether it did something; `extra_idle` is
  // looked at before sleeping. The first worker reads the triggers this way. The thread is called
  // `name` and runs on `cpus` alone, unless there are none: kInvalid if one is not allowed.
  Status start(const std::string& name, const std::vector<int>& cpus, std::function<bool()> extra,
               std::function<bool()> extra_idle);
  void stop();

  Domain& domain() { return *domain_; }
  Waiter* waiter() { return &waiter_; }
  TraceLog* trace() { return &trace_; }
  const DomainStats& domain_stats() const { return domain_stats_; }

  // A peer's data endpoint: opened, told where the peer's are (one per domain of its), closed.
  // close_link is the hard fence: when it returns nothing of the peer lands any more and nothing to
  // it is in flight.
  Result<std::string> open_link(int64_t peer);
  Status connect_link(int64_t peer, const std::vector<std::string>& remote_names);
  void close_link(int64_t peer);

  // Jobs from this device's memory go through the ring from now on.
  Status add_ring(std::unique_ptr<StagingRing> ring);
  // Bytes in the rings, as of a moment ago.
  uint64_t staged_bytes() const { return staged_bytes_.load(std::memory_order_relaxed); }

  // From any thread. The transfer fails when the peer has no link (any more).
  void submit(Job job);
  void submit_here(Job job);  // by the worker's own thread

 private:
  struct Link;
  struct WriteOp;

  void loop();
  bool poll_links();
  bool work_rings();
  bool copying() const;
  void drop_link(int64_t peer);
  void break_link(int64_t peer, const std::string& reason);
  bool idle() const;

  const WorkerOptions options_;
  ImmCounters* const counters_;
  Stats* const stats_;
  const LinkBroken link_broken_;
  TraceLog trace_;
  DomainStats domain_stats_;

  Waiter waiter_;
  Inbox inbox_;
  std::unique_ptr<Domain> domain_;
  std::atomic<uint64_t> staged_bytes_{0};
  std::map<int, std::unique_ptr<StagingRing>> rings_;  // by device; the thread's, as links_ are
  std::vector<std::unique_ptr<Link>> links_;           // owned and touched by the thread alone
  ByteTurns<Link> turns_;
  std::function<bool()> extra_, extra_idle_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace ffi_transport
