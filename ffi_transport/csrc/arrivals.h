// What happens between "all units of a slot have landed" and the event that says so, where they
// landed in a device's memory or in its host mirror:
//
//   kDirect  the NIC's writes are flushed, if the device's ordering of them asks for it (R17);
//   kStaged  the landed pages are copied from the mirror into the device on a stream of their own,
//            the copies are waited for, and the mirror's pages go back to the system.
//
// One thread does that for all slots, in the order in which they were reached. Host memory needs
// none of it: a slot that is armed without landings is reported by whoever counted, and an engine
// without device memory has no Arrivals.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "device_lane.h"
#include "event_queue.h"
#include "imm_counters.h"
#include "region.h"
#include "stats.h"
#include "status.h"

namespace ffi_transport {

// The same pages of several regions, which the writes of one slot fill.
struct Landing {
  struct Run {
    uint64_t offset = 0;
    uint64_t length = 0;
  };
  std::vector<RegionPtr> regions;
  std::vector<Run> runs;  // pages that follow each other are one, however many

  // Page p is the bytes [p * page_bytes, (p + 1) * page_bytes) of each region. kInvalid for one
  // that leaves a region.
  static Result<Landing> of_pages(std::vector<RegionPtr> regions,
                                  const std::vector<uint32_t>& pages, uint64_t page_bytes);
};

class Arrivals : public CountGate {
 public:
  // A slot's pages are copied in batches of at most 256 copies and 32 MiB. `wait` bounds how long
  // one batch may take before its device counts as hung.
  Arrivals(const ImmCounters* counters, EventQueue* events, Stats* stats,
           std::chrono::milliseconds wait);
  ~Arrivals() override;

  // What the slot's writes will fill; before the slot is armed. Regions of host memory are passed
  // over. Opens the devices that it names: kUnavailable when one cannot be.
  Status expect(int64_t slot, std::vector<Landing> landings);
  // Forgets a slot, after it was disarmed or because it could not be armed. Copies that have begun
  // are waited for: when this returns ok, nothing is written into a device for the slot any more
  // and no event of its arrival follows. kTimeout when a copy has hung; then its pages are not
  // safe.
  Status drop(int64_t slot);

  // CountGate: by the thread that counted.
  bool take(const Event& event) override;

  // What has begun ends, the rest does not begin. Joins the thread. Mirrors from which a device
  // that hangs may still read are kept as long as the process lives (stats: mirrors_kept).
  void close();

 private:
  struct Entry {
    enum class State : uint8_t { kExpected, kQueued, kRunning, kDone };
    int64_t slot = -1;
    std::vector<Landing> staged;        // regions on devices that are reached through mirrors
    std::vector<DeviceLane*> copying;   // the devices of those
    std::vector<DeviceLane*> flushing;  // devices that a NIC wrote to itself
    Event reached;
    State state = State::kExpected;
    bool unwanted = false;  // dropped, or overshot: it must not be reported
    bool hung = false;      // its copies had not ended when they were given up
  };
  using EntryPtr = std::shared_ptr<Entry>;

  Result<DeviceLane*> lane(int ordinal);
  void loop();
  Status run(Entry& entry);
  Status copy(Entry& entry);
  Status drain(Entry& entry);
  bool unwanted(const Entry& entry);
  static void discard(const Entry& entry);
  static void release(const Entry& entry);
  void keep_mirrors(const Entry& entry);

  const ImmCounters* const counters_;
  EventQueue* const events_;
  Stats* const stats_;
  const std::chrono::milliseconds wait_;

  std::mutex lanes_mutex_;  // opening a device takes a while: whoever counts must not wait for it
  std::map<int, std::unique_ptr<DeviceLane>> lanes_;  // used by the thread, once open

  std::mutex mutex_;  // of everything below
  std::condition_variable changed_;
  std::unordered_map<int64_t, EntryPtr> entries_;
  std::deque<EntryPtr> queue_;
  std::vector<EntryPtr> hung_;  // dropped or not: they hold the mirrors that copies may read
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace ffi_transport
