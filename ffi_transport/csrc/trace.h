// What happened in which order, for tests and timelines. Off by default; when on, each native
// thread appends to a log of its own.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "waiter.h"

namespace ffi_transport {

enum class TraceKind : int32_t { kTrigger, kPost, kCompletion };

// Plain data, copied into a numpy structured array of the same layout.
struct TraceRecord {
  uint64_t order = 0;
  int64_t t_ns = 0;
  int32_t kind = 0;
  int32_t layer = -1;
  int64_t step = 0;
  int64_t transfer = -1;
  int64_t bytes = 0;
  int32_t ordinal = -1;
  int32_t reserved = 0;
};
static_assert(sizeof(TraceRecord) == 56);

class TraceLog {
 public:
  static constexpr size_t kMaxRecords = 1 << 20;

  TraceLog(std::atomic<uint64_t>* order, bool on) : order_(order), on_(on) {}
  bool on() const { return on_; }
  // Draws the order number itself unless the record has a time already.
  void add(TraceRecord record) {
    if (!on_) return;
    if (record.t_ns == 0) {
      record.order = order_->fetch_add(1, std::memory_order_relaxed);
      record.t_ns = now_ns();
    }
    std::lock_guard lock(mutex_);
    if (records_.size() < kMaxRecords) records_.push_back(record);
  }
  void copy_to(std::vector<TraceRecord>* out) const {
    std::lock_guard lock(mutex_);
    out->insert(out->end(), records_.begin(), records_.end());
  }

 private:
  std::atomic<uint64_t>* order_;
  const bool on_;
  mutable std::mutex mutex_;
  std::vector<TraceRecord> records_;
};

}  // namespace ffi_transport
