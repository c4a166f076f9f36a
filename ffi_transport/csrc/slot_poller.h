// The thread that follows the live steps by their slots and hands what it sees to the hub, as a
// CPU's trigger does itself. It spins while a step is live and sleeps otherwise.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "slot_board.h"
#include "stats.h"
#include "trigger_hub.h"
#include "waiter.h"

namespace ffi_transport {

class SlotPoller {
 public:
  SlotPoller(std::shared_ptr<SlotBoard> board, TriggerHub* hub, Stats* stats);
  ~SlotPoller();

  void stop();  // idempotent; live steps are left as they are

  // kInvalid, by name, where a step has an ordinal or a layer that has no slot.
  Status check(const std::vector<int>& ordinals, int layers) const;
  // After the step's plan was filed and before it is dispatched. Steps are dispatched in the order
  // in which they are watched, one by one, and their numbers ascend.
  void watch(int64_t step, const std::vector<int>& ordinals, int layers);
  // The step will not run, or not to its end: nothing of it is told any more.
  void forget(int64_t step);

 private:
  struct Device {
    int place = 0;
    int next = 0;  // the first layer that was not seen
  };
  struct Watch {
    uint32_t step = 0;
    int layers = 0;
    std::vector<Device> devices;
  };

  void loop();
  bool poll(Watch* watch);
  bool report_refusal();
  static bool done(const Watch& watch);

  const std::shared_ptr<SlotBoard> board_;
  TriggerHub* const hub_;
  Stats* const stats_;
  Waiter waiter_;
  Inbox inbox_;
  std::vector<Watch> watches_;  // the thread's own, the oldest first
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace ffi_transport
