#include "imm_counters.h"

#include <string>

namespace ffi_transport {
namespace {

constexpr uint64_t kSeenMask = 0xffffffffull;
constexpr uint64_t kArmed = 1ull << 63;

uint64_t seen_of(uint64_t word) { return word & kSeenMask; }
uint64_t expected_of(uint64_t word) { return (word >> 32) & ImmCounters::kMaxExpected; }

}  // namespace

ImmCounters::ImmCounters(uint32_t slot_bits, EventQueue* events, Stats* stats)
    : codec_(slot_bits),
      events_(events),
      stats_(stats),
      words_(new std::atomic<uint64_t>[codec_.slot_count()]()) {}

Status ImmCounters::check(int64_t slot) const {
  if (slot >= 0 && slot < static_cast<int64_t>(codec_.slot_count())) return {};
  return Status(Code::kInvalid, "slot " + std::to_string(slot) + " is not in 0.." +
                                    std::to_string(codec_.slot_count() - 1));
}

Status ImmCounters::arm(int64_t slot, int64_t expected, bool adopt_early) {
  if (Status status = check(slot); !status.ok()) return status;
  if (expected < 0 || expected > static_cast<int64_t>(kMaxExpected)) {
    return Status(Code::kInvalid, "expected count " + std::to_string(expected) + " is not in 0.." +
                                      std::to_string(kMaxExpected));
  }
  auto& word = words_[slot];
  uint64_t before = word.load(std::memory_order_acquire);
  uint64_t after;
  do {
    if (before & kArmed) {
      return Status(Code::kInvalid, "slot " + std::to_string(slot) + " is already armed");
    }
    after = kArmed | (static_cast<uint64_t>(expected) << 32) | (adopt_early ? seen_of(before) : 0);
    // Acquire-release: whoever later sees the count also sees the bytes of adopted units.
  } while (!word.compare_exchange_weak(before, after, std::memory_order_acq_rel,
                                       std::memory_order_acquire));
  if (adopt_early) bump(stats_->units_adopted, seen_of(before));
  // Of arm and all adds, the one whose exchange crossed the count reports it.
  if (seen_of(after) >= static_cast<uint64_t>(expected)) report(after, slot);
  return {};
}

Status ImmCounters::disarm(int64_t slot) {
  if (Status status = check(slot); !status.ok()) return status;
  words_[slot].store(0, std::memory_order_release);
  return {};
}

Result<int64_t> ImmCounters::seen(int64_t slot) const {
  if (Status status = check(slot); !status.ok()) return status;
  return static_cast<int64_t>(seen_of(words_[slot].load(std::memory_order_acquire)));
}

bool ImmCounters::complete(int64_t slot, int64_t expected) const {
  const uint64_t word = words_[slot].load(std::memory_order_acquire);
  return (word & kArmed) != 0 && expected_of(word) == static_cast<uint64_t>(expected) &&
         seen_of(word) == static_cast<uint64_t>(expected);
}

void ImmCounters::add(uint32_t immediate) {
  uint32_t slot, weight;
  if (!codec_.decode(immediate, &slot, &weight)) {
    bump(stats_->immediates_malformed);
    return;
  }
  bump(stats_->immediates_received);
  bump(stats_->units_received, weight);
  auto& word = words_[slot];
  uint64_t before = word.load(std::memory_order_relaxed);
  uint64_t after;
  do {
    // The low half saturates: a flood of stale immediates must not carry into the expected count.
    after = seen_of(before) + weight > kSeenMask ? before | kSeenMask : before + weight;
    // Release publishes the landed bytes of this thread; acquire gathers those of the threads
    // that added before, so the observer of the crossing sees every counted byte.
  } while (!word.compare_exchange_weak(before, after, std::memory_order_acq_rel,
                                       std::memory_order_relaxed));
  if (!(before & kArmed)) {
    bump(stats_->stale_immediates);
    return;
  }
  const uint64_t expected = expected_of(after);
  if (seen_of(before) < expected && seen_of(after) >= expected) {
    report(after, slot);
  } else if (seen_of(before) == expected) {
    report(after, slot);  // the first unit too many
  }
}

// Emits what it means that a slot has come to `after`: exactly there, or beyond.
void ImmCounters::report(uint64_t after, int64_t slot) {
  Event event;
  event.id = slot;
  event.first = static_cast<int64_t>(expected_of(after));
  event.second = static_cast<int64_t>(seen_of(after));
  if (event.second == event.first) {
    event.kind = EventKind::kCounterReached;
  } else {
    event.kind = EventKind::kCounterOvershoot;
    bump(stats_->overshoots);
  }
  // Once per slot, and a load that finds nothing where no device's memory is registered.
  CountGate* gate = gate_.load(std::memory_order_acquire);
  if (gate == nullptr || !gate->take(event)) events_->push(std::move(event));
}

}  // namespace ffi_transport
