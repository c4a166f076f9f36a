// What each trigger (step, ordinal, layer) posts (R18). Python fills it before the step is
// dispatched; the first worker's thread empties it as the triggers come.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "data_worker.h"
#include "event_queue.h"
#include "packer.h"
#include "region.h"
#include "stats.h"
#include "transfer.h"
#include "trigger_hub.h"

namespace ffi_transport {

// The same pages of several layers, for one transfer, from one device's shard.
struct PlannedWrite {
  TransferPtr transfer;  // null: it has ended, nothing is planned for it
  int ordinal = 0;
  int first_layer = 0;
  std::shared_ptr<const PageLists> pages;
  PageUnit unit;
  std::vector<RemoteRegionPtr> remotes;  // one per layer from first_layer
  // Filled by PlanTable::add: the same for all layers, checked once for the shortest regions.
  UnitList units;
  uint64_t source_length = 0;
};

class PlanTable {
 public:
  static constexpr size_t kLiveSteps = 4;

  PlanTable(EventQueue* events, Stats* stats) : events_(events), stats_(stats) {}

  void set_source(int ordinal, int layer, RegionPtr region);
  // Whether an ordinal and all that have a source lie within `width` consecutive ones.
  bool near_sources(int ordinal, int width) const;
  // Takes a region away wherever it is a source; returns those (ordinal, layer).
  std::vector<std::pair<int, int>> forget_source(int64_t region);
  // Waits while kLiveSteps are live, at most timeout_s: then kTimeout names them and what has not
  // fired. Checks every page of every layer, then plans all units on their transfers; on an error
  // nothing was planned.
  Status add(int64_t step, std::vector<int> ordinals, int layers, std::vector<PlannedWrite> writes,
             double timeout_s);
  // Un-plans what has not fired: its transfers fail. False when the step is not live.
  bool drop(int64_t step);
  // What a trigger releases. Faults end as events and fail the transfers that they concern.
  // Returns the step's whole number, or the low half that came when the step has no plan.
  int64_t fire(const TriggerRecord& record, std::vector<Job>* jobs);
  void report_overflow();
  size_t live() const;
  // Ends every wait in add with kClosed, now and later.
  void close();

 private:
  struct Step {
    int64_t number = 0;
    std::vector<int> ordinals;
    int layers = 0;
    std::vector<PlannedWrite> writes;
    std::vector<bool> fired;  // by place in ordinals * layers + layer
    size_t left = 0;
  };

  RegionPtr source(int ordinal, int layer) const;
  Status check(PlannedWrite* write, const std::vector<int>& ordinals, int layers) const;
  std::string describe_live() const;
  void fault(const char* kind, int64_t step, const TriggerRecord& record, std::string detail);

  EventQueue* const events_;
  Stats* const stats_;
  mutable std::mutex mutex_;
  std::condition_variable freed_;
  bool closed_ = false;
  std::map<uint32_t, Step> steps_;  // by the low half of the number
  std::map<std::pair<int, int>, RegionPtr> sources_;
  std::set<std::tuple<int, int, uint64_t>> reported_;  // moved addresses told already
};

}  // namespace ffi_transport
