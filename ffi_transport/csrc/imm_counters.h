// Receive-side counters: how many units of a slot have landed, and whether that is what was
// expected (R3, R4). One 64-bit word per slot, so that of many threads that add exactly one
// observes the crossing.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "event_queue.h"
#include "immediate.h"
#include "stats.h"
#include "status.h"

namespace ffi_transport {

// What a reached count may have to wait for before it is reported.
class CountGate {
 public:
  virtual ~CountGate() = default;
  // By the thread that counted. True: whoever this is reports it later, or never.
  virtual bool take(const Event& event) = 0;
};

class ImmCounters {
 public:
  // Expected counts are below 2^31: the word holds 32 bits seen, 31 expected and the armed mark.
  static constexpr uint64_t kMaxExpected = (1ull << 31) - 1;

  ImmCounters(uint32_t slot_bits, EventQueue* events, Stats* stats);

  // adopt_early: units that came while the slot was not armed count. Otherwise they are stale and
  // were dropped. Emits CounterReached at once when nothing is missing.
  Status arm(int64_t slot, int64_t expected, bool adopt_early);
  Status disarm(int64_t slot);
  Result<int64_t> seen(int64_t slot) const;
  // Whether the slot is armed for `expected` units and has them, and no more.
  bool complete(int64_t slot, int64_t expected) const;
  // From now on; it must outlive every call of this. A slot armed later is not reported past it.
  void set_gate(CountGate* gate) { gate_.store(gate, std::memory_order_release); }
  // Called by a domain's thread for each immediate: the bytes that it stands for have landed.
  void add(uint32_t immediate);

  const ImmediateCodec& codec() const { return codec_; }

 private:
  Status check(int64_t slot) const;
  void report(uint64_t after, int64_t slot);

  ImmediateCodec codec_;
  EventQueue* events_;
  Stats* stats_;
  std::atomic<CountGate*> gate_{nullptr};
  std::unique_ptr<std::atomic<uint64_t>[]> words_;
};

}  // namespace ffi_transport
