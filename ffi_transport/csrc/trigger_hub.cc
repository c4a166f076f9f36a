#include "trigger_hub.h"

#include <mutex>
#include <thread>
#include <utility>

namespace ffi_transport {

TriggerRing::TriggerRing(size_t capacity)
    : mask_(capacity - 1), cells_(std::make_unique<Cell[]>(capacity)) {
  for (size_t i = 0; i < capacity; ++i) cells_[i].turn.store(i, std::memory_order_relaxed);
}

bool TriggerRing::push(const TriggerRecord& record) {
  uint64_t place = head_.load(std::memory_order_relaxed);
  for (;;) {
    Cell& cell = cells_[place & mask_];
    // Acquire pairs with the reader's release in pop: it has copied the old record out.
    const uint64_t turn = cell.turn.load(std::memory_order_acquire);
    const auto ahead = static_cast<int64_t>(turn - place);
    if (ahead < 0) return false;  // the reader is a whole ring behind
    if (ahead > 0) {
      place = head_.load(std::memory_order_relaxed);
    } else if (head_.compare_exchange_weak(place, place + 1, std::memory_order_relaxed)) {
      cell.record = record;
      // Publishes the record; sequentially consistent for the wake() that follows.
      cell.turn.store(place + 1, std::memory_order_seq_cst);
      return true;
    }
  }
}

bool TriggerRing::pop(TriggerRecord* record) {
  Cell& cell = cells_[tail_ & mask_];
  if (cell.turn.load(std::memory_order_acquire) != tail_ + 1) return false;
  *record = cell.record;
  cell.turn.store(tail_ + mask_ + 1, std::memory_order_release);  // free for the next round
  ++tail_;
  return true;
}

bool TriggerRing::empty() const {
  // Sequentially consistent for Waiter's last look before sleeping.
  return cells_[tail_ & mask_].turn.load(std::memory_order_seq_cst) != tail_ + 1;
}

TriggerHub::TriggerHub(Waiter* reader, std::atomic<uint64_t>* order, Stats* stats, bool trace,
                       size_t capacity)
    : ring_(capacity),
      reader_(reader),
      order_(order),
      stats_(stats),
      trace_(trace),
      addresses_(new std::atomic<uint64_t>[kOrdinals * kLayers]()) {}

void TriggerHub::set_address(int ordinal, int layer, uint64_t address) {
  address_of(ordinal, layer).store(address, std::memory_order_release);
}

void TriggerHub::set_slots(std::shared_ptr<SlotBoard> slots) {
  kept_slots_ = std::move(slots);
  slots_.store(kept_slots_.get(), std::memory_order_release);
}

void TriggerHub::fire(int32_t step, int32_t ordinal, int32_t layer, const void* cache) noexcept {
  if (SlotBoard* slots = slots_.load(std::memory_order_acquire)) {
    const int place = slots->place(ordinal);
    if (slots->has(place, layer)) {
      slots->note_address(place, layer, cache);
      slots->store(place, layer, step);
      return;
    }
  }
  TriggerRecord record;
  record.step_low = static_cast<uint32_t>(step);
  record.layer = layer;
  record.ordinal = ordinal;
  bump(stats_->triggers);
  if (!push(record, reinterpret_cast<uint64_t>(cache))) {
    bump(stats_->ring_overflows);
    overflowed_.store(true, std::memory_order_seq_cst);
    reader_->wake();
  }
}

bool TriggerHub::offer(uint32_t step, int32_t ordinal, int32_t layer, uint64_t address) {
  TriggerRecord record;
  record.step_low = step;
  record.layer = layer;
  record.ordinal = ordinal;
  if (!push(record, address)) return false;
  bump(stats_->triggers);
  return true;
}

bool TriggerHub::offer_refusal(int32_t ordinal, int32_t layer, cuda::Error error) {
  TriggerRecord record;
  record.ordinal = ordinal;
  record.layer = layer;
  record.refusal = error;
  return push(record, 0);
}

bool TriggerHub::push(TriggerRecord record, uint64_t address) {
  if (address != 0 && record.ordinal >= 0 && record.layer >= 0 && record.layer < kLayers) {
    const uint64_t known = address_of(record.ordinal, record.layer).load(std::memory_order_relaxed);
    // Nothing is registered during warm-up; the reader faults if there is a plan all the same.
    if (known != 0 && known != address) record.wrong_address = address;
  }
  if (trace_) {
    record.order = order_->fetch_add(1, std::memory_order_relaxed);
    record.t_ns = now_ns();
  }
  if (!ring_.push(record)) return false;
  reader_->wake();
  return true;
}

namespace {

struct alignas(64) RegistrySlot {
  std::atomic<TriggerHub*> hub{nullptr};
  std::atomic<int> users{0};  // handlers inside right now
};

RegistrySlot g_slots[TriggerRegistry::kEngines];
std::mutex g_mutex;
int g_next = 0;

}  // namespace

int TriggerRegistry::add(TriggerHub* hub) {
  std::lock_guard lock(g_mutex);
  for (int tried = 0; tried < kEngines; ++tried) {
    const int index = g_next;
    g_next = (g_next + 1) % kEngines;
    TriggerHub* none = nullptr;
    if (g_slots[index].hub.compare_exchange_strong(none, hub)) return index;
  }
  return -1;
}

void TriggerRegistry::remove(int index) {
  RegistrySlot& slot = g_slots[index];
  // Sequentially consistent on both sides: a handler that counted itself in before this store is
  // waited for; one that comes later reads null.
  slot.hub.store(nullptr, std::memory_order_seq_cst);
  while (slot.users.load(std::memory_order_seq_cst) != 0) std::this_thread::yield();
}

void TriggerRegistry::fire(int32_t index, int32_t step, int32_t ordinal, int32_t layer,
                           const void* cache) noexcept {
  if (index < 0 || index >= kEngines) return;
  RegistrySlot& slot = g_slots[index];
  slot.users.fetch_add(1, std::memory_order_seq_cst);
  if (TriggerHub* hub = slot.hub.load(std::memory_order_seq_cst)) {
    hub->fire(step, ordinal, layer, cache);
  }
  slot.users.fetch_sub(1, std::memory_order_release);
}

}  // namespace ffi_transport
