// Between the FFI handler and the engine: a bounded ring that any number of XLA's threads push to
// and one native thread reads, and the cache addresses that come with a trigger are compared with.
// With slots (slot_board.h) the ring has one producer instead, the thread that polls them.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>

#include "slot_board.h"
#include "stats.h"
#include "waiter.h"

namespace ffi_transport {

struct TriggerRecord {
  uint32_t step_low = 0;
  int32_t layer = 0;
  int32_t ordinal = 0;
  // The address that came with the trigger, when it is not the registered one; else 0.
  uint64_t wrong_address = 0;
  // Not a trigger: the driver refused to put this one on the stream, for this reason.
  cuda::Error refusal = cuda::kSuccess;
  uint64_t order = 0;  // place in the trace
  int64_t t_ns = 0;    // 0 unless tracing
};

// Vyukov's bounded queue: a cell's sequence number says whose turn it is, so producers never wait
// for each other's copies and never for the reader.
class TriggerRing {
 public:
  explicit TriggerRing(size_t capacity_power_of_two);
  bool push(const TriggerRecord& record);  // false: full, the record is lost
  bool pop(TriggerRecord* record);         // by the one reader
  bool empty() const;                      // by the one reader

 private:
  struct Cell {
    std::atomic<uint64_t> turn;
    TriggerRecord record;
  };
  const uint64_t mask_;
  std::unique_ptr<Cell[]> cells_;
  alignas(64) std::atomic<uint64_t> head_{0};  // next place to write
  alignas(64) uint64_t tail_ = 0;              // next place to read
};

class TriggerHub {
 public:
  static constexpr int kOrdinals = 64;  // of one process; they are consecutive
  static constexpr int kLayers = 512;
  static constexpr size_t kRingCapacity = 1 << 14;

  TriggerHub(Waiter* reader, std::atomic<uint64_t>* order, Stats* stats, bool trace,
             size_t capacity = kRingCapacity);

  // The registered address of (ordinal, layer); 0 takes it away.
  void set_address(int ordinal, int layer, uint64_t address);
  // From now on what fires on these (ordinal, layer) is stored there, for a poller to find.
  void set_slots(std::shared_ptr<SlotBoard> slots);
  // Called by the FFI handler: never waits, never fails. A full ring is noted and reported.
  void fire(int32_t step, int32_t ordinal, int32_t layer, const void* cache) noexcept;
  // Called by the poller, which can come again: false when the ring is full, and nothing is lost.
  // An address of 0 is not known.
  bool offer(uint32_t step, int32_t ordinal, int32_t layer, uint64_t address);
  bool offer_refusal(int32_t ordinal, int32_t layer, cuda::Error error);
  bool pop(TriggerRecord* record) { return ring_.pop(record); }
  bool empty() const { return ring_.empty() && !overflowed_.load(std::memory_order_seq_cst); }
  // True once after records were lost.
  bool take_overflow() { return overflowed_.exchange(false, std::memory_order_acq_rel); }

 private:
  bool push(TriggerRecord record, uint64_t address);
  // A process's ordinals need not begin at 0 (XLA numbers CPUs through all processes of a node),
  // but being consecutive they have cells of their own.
  std::atomic<uint64_t>& address_of(int ordinal, int layer) {
    return addresses_[ordinal % kOrdinals * kLayers + layer];
  }

  TriggerRing ring_;
  Waiter* reader_;
  std::atomic<uint64_t>* order_;
  Stats* stats_;
  const bool trace_;
  std::atomic<bool> overflowed_{false};
  std::unique_ptr<std::atomic<uint64_t>[]> addresses_;
  std::shared_ptr<SlotBoard> kept_slots_;
  std::atomic<SlotBoard*> slots_{nullptr};
};

// The process-wide table through which a compiled program finds its engine. An index is not given
// out again while others are free, so that an old program cannot trigger a new engine.
class TriggerRegistry {
 public:
  static constexpr int kEngines = 1024;
  // -1 when every index is taken.
  static int add(TriggerHub* hub);
  // After it returned no handler uses the hub any more.
  static void remove(int index);
  // By the handler. A trigger of a closed engine is dropped.
  static void fire(int32_t index, int32_t step, int32_t ordinal, int32_t layer,
                   const void* cache) noexcept;
};

}  // namespace ffi_transport
