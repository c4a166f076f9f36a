// A board of slots with its poller, and the hub that the poller tells, for native tests.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <set>
#include <tuple>
#include <vector>

#include "check.h"
#include "slot_board.h"
#include "slot_poller.h"
#include "trigger_hub.h"

namespace check {

using ffi_transport::SlotBoard;
using ffi_transport::SlotPoller;
using ffi_transport::Stats;
using ffi_transport::TriggerHub;
using ffi_transport::TriggerRecord;
using ffi_transport::Waiter;

inline constexpr int kLayers = 40;  // more than a cache line's worth

inline std::shared_ptr<SlotBoard> board_of(const std::vector<int>& ordinals, int layers,
                                           bool device) {
  auto board = SlotBoard::create(ordinals, layers, device);
  CHECK_OK(board.status());
  return board.take();
}

using Trigger = std::tuple<uint32_t, int, int>;  // step, ordinal, layer

struct SlotFixture {
  Waiter waiter;
  Stats stats;
  std::atomic<uint64_t> order{1};
  TriggerHub hub;
  std::shared_ptr<SlotBoard> board;
  SlotPoller poller;
  std::vector<TriggerRecord> seen;

  explicit SlotFixture(std::vector<int> ordinals = {0}, int layers = kLayers, size_t ring = 1 << 12)
      : hub(&waiter, &order, &stats, false, ring),
        board(board_of(ordinals, layers, false)),
        poller(board, &hub, &stats) {
    hub.set_slots(board);
  }
  // As the device would: the handler notes the address, the stream stores.
  void store(uint32_t step, int ordinal, int layer) {
    hub.fire(static_cast<int32_t>(step), ordinal, layer, reinterpret_cast<const void*>(0x1000));
  }
  size_t read() {
    TriggerRecord record;
    while (hub.pop(&record)) seen.push_back(record);
    return seen.size();
  }
  bool reads(size_t count) {
    return eventually([&] { return read() >= count; });
  }
  bool sleeps() {
    const auto blocks = [&] { return stats.thread_blocks.load(); };
    const uint64_t before = blocks();
    poller.forget(-1);  // wakes it, if it can be woken
    return eventually([&] { return blocks() > before; });
  }
  std::set<Trigger> triggers() const {
    std::set<Trigger> out;
    for (const TriggerRecord& r : seen) out.emplace(r.step_low, r.ordinal, r.layer);
    CHECK_EQ(out.size(), seen.size());  // none twice
    return out;
  }
};

}  // namespace check
