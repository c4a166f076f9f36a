#include "arrivals.h"

#include <algorithm>
#include <string>
#include <utility>

#include "threads.h"

namespace ffi_transport {
namespace {

// At most this between two looks at whether a slot is still wanted: small enough that a
// cancellation is not kept waiting, large enough that an event after each batch costs nothing.
constexpr size_t kBatchCopies = 256;
constexpr uint64_t kBatchBytes = 32 << 20;

Status not_ended(int64_t slot) {
  Status::Detail detail;
  detail.text = "copies of slot " + std::to_string(slot) +
                " into a device have not ended: its pages are not safe";
  detail.id = slot;
  detail.missing = "the end of a device's stream for arrivals";
  return Status(Code::kTimeout, std::move(detail));
}

void add(std::vector<DeviceLane*>* lanes, DeviceLane* lane) {
  if (std::ranges::find(*lanes, lane) == lanes->end()) lanes->push_back(lane);
}

}  // namespace

Result<Landing> Landing::of_pages(std::vector<RegionPtr> regions,
                                  const std::vector<uint32_t>& pages, uint64_t page_bytes) {
  Landing landing;
  if (page_bytes == 0) return Status(Code::kInvalid, "page_bytes: 0, a page has at least one byte");
  // Before any offset is computed: of pages within a region none overflows.
  const uint32_t last = pages.empty() ? 0 : *std::ranges::max_element(pages);
  for (const RegionPtr& region : regions) {
    if (pages.empty() || last < region->length / page_bytes) continue;
    return Status(Code::kInvalid,
                  "landings: page " + std::to_string(last) + " of " + std::to_string(page_bytes) +
                      " bytes is beyond the region's " + std::to_string(region->length) + " bytes");
  }
  if (regions.empty()) return landing;
  for (const uint32_t page : pages) {
    const uint64_t offset = page * page_bytes;
    if (!landing.runs.empty() &&
        landing.runs.back().offset + landing.runs.back().length == offset) {
      landing.runs.back().length += page_bytes;
    } else {
      landing.runs.push_back({offset, page_bytes});
    }
  }
  landing.regions = std::move(regions);
  return landing;
}

Arrivals::Arrivals(const ImmCounters* counters, EventQueue* events, Stats* stats,
                   std::chrono::milliseconds wait)
    : counters_(counters), events_(events), stats_(stats), wait_(wait) {
  thread_ = std::thread([this] { loop(); });
  name_thread(thread_, "arrivals");
}

Arrivals::~Arrivals() { close(); }

Result<DeviceLane*> Arrivals::lane(int ordinal) {
  std::lock_guard lock(lanes_mutex_);
  auto& found = lanes_[ordinal];
  if (found == nullptr) {
    auto opened = DeviceLane::open(ordinal);
    if (!opened.ok()) return opened.status();
    found = opened.take();
  }
  return found.get();
}

Status Arrivals::expect(int64_t slot, std::vector<Landing> landings) {
  auto entry = std::make_shared<Entry>();
  entry->slot = slot;
  for (Landing& landing : landings) {
    Landing staged;
    for (RegionPtr& region : landing.regions) {
      if (region->mode == MemoryMode::kHost) continue;
      auto device = lane(region->device);
      if (!device.ok()) return device.status();
      if (region->mode == MemoryMode::kDirect) {
        add(&entry->flushing, *device);
      } else {
        add(&entry->copying, *device);
        staged.regions.push_back(std::move(region));
      }
    }
    if (staged.regions.empty()) continue;
    staged.runs = std::move(landing.runs);
    entry->staged.push_back(std::move(staged));
  }
  if (entry->copying.empty() && entry->flushing.empty()) return {};
  {
    std::lock_guard lock(mutex_);
    if (stopping_) return Status(Code::kClosed, "the engine is closed");
    if (entries_.contains(slot)) {
      return Status(Code::kInvalid, "slot " + std::to_string(slot) + " is already armed");
    }
    entries_[slot] = entry;
  }
  // Counted in like writes, so that no region goes away under a copy.
  for (const Landing& landing : entry->staged) {
    for (const RegionPtr& region : landing.regions) region->in_flight.fetch_add(1);
  }
  return {};
}

bool Arrivals::take(const Event& event) {
  std::lock_guard lock(mutex_);
  const auto it = entries_.find(event.id);
  if (it == entries_.end()) return false;  // it landed in host memory alone
  const EntryPtr& entry = it->second;
  if (event.kind == EventKind::kCounterOvershoot) {
    entry->unwanted = true;  // which page came twice, and which not at all, nobody knows
    changed_.notify_all();
    return false;
  }
  // The count of an earlier arming of this slot may be told late; the present one's is looked up.
  if (!counters_->complete(event.id, event.first)) return true;
  if (entry->state != Entry::State::kExpected) return true;
  entry->reached = event;
  entry->state = Entry::State::kQueued;
  queue_.push_back(entry);
  changed_.notify_all();
  return true;
}

Status Arrivals::drop(int64_t slot) {
  EntryPtr entry;
  bool copied = false;
  {
    std::unique_lock lock(mutex_);
    const auto it = entries_.find(slot);
    if (it == entries_.end()) return {};
    entry = std::move(it->second);
    entries_.erase(it);
    entry->unwanted = true;
    // The thread gives a batch up after wait_, but a call that copies from a mirror, which is
    // pageable, may itself wait for the device. Then the thread lets the pages go when it returns.
    const auto ended = [&] { return entry->state != Entry::State::kRunning; };
    if (!changed_.wait_for(lock, 2 * wait_, ended)) return not_ended(slot);
    copied = entry->state == Entry::State::kDone;
    if (!copied) bump(stats_->arrivals_dropped);
    std::erase(queue_, entry);
  }
  if (entry->hung && std::ranges::any_of(entry->copying, &DeviceLane::hung)) {
    return not_ended(slot);
  }
  if (!copied || entry->hung) {
    if (entry->hung) {
      std::lock_guard lock(mutex_);
      std::erase(hung_, entry);
    }
    discard(*entry);
    release(*entry);
  }
  return {};
}

bool Arrivals::unwanted(const Entry& entry) {
  std::lock_guard lock(mutex_);
  return entry.unwanted || stopping_;
}

void Arrivals::discard(const Entry& entry) {
  for (const Landing& landing : entry.staged) {
    for (const RegionPtr& region : landing.regions) {
      for (const Landing::Run& run : landing.runs) region->mirror->discard(run.offset, run.length);
    }
  }
}

void Arrivals::release(const Entry& entry) {
  for (const Landing& landing : entry.staged) {
    for (const RegionPtr& region : landing.regions) region->end();
  }
}

void Arrivals::loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (stopping_) return;
    const EntryPtr entry = std::move(queue_.front());
    queue_.pop_front();
    entry->state = Entry::State::kRunning;
    lock.unlock();
    const Status status = run(*entry);
    lock.lock();
    entry->state = Entry::State::kDone;
    if (entry->hung) hung_.push_back(entry);
    // Told under the lock: whoever drops the slot has either stopped this or is told before.
    if (entry->unwanted || stopping_) {
      bump(stats_->arrivals_dropped);
    } else if (status.ok()) {
      events_->push(entry->reached);
    } else {
      bump(stats_->arrivals_failed);
      Event event;
      event.kind = EventKind::kArrivalFailed;
      event.id = entry->slot;
      event.text = status.text();
      events_->push(std::move(event));
    }
    changed_.notify_all();
  }
}

// Everything for one slot; ends with nothing under way for it, unless a device has hung.
Status Arrivals::run(Entry& entry) {
  Status status;
  for (DeviceLane* lane : entry.flushing) {
    bool flushed = false;
    if (status = lane->flush(&flushed); !status.ok()) return status;
    if (flushed) bump(stats_->arrival_flushes);
  }
  if (entry.copying.empty()) return {};
  for (DeviceLane* lane : entry.copying) {
    if (!lane->hung()) continue;
    status = Status(Code::kTimeout, "CUDA device " + std::to_string(lane->ordinal()) +
                                        ": earlier copies of landed pages have not ended");
  }
  if (status.ok()) status = copy(entry);
  if (!entry.hung) {  // or the copies still read from there
    discard(entry);
    release(entry);
  }
  return status;
}

Status Arrivals::copy(Entry& entry) {
  size_t copies = 0;
  uint64_t bytes = 0;
  Status status;
  const auto next = [&](const RegionPtr& region, const Landing::Run& run) {
    const auto lane = std::ranges::find(entry.copying, region->device, &DeviceLane::ordinal);
    const uint64_t end = run.offset + run.length;
    uint64_t length = 0;
    for (uint64_t offset = run.offset; offset < end; offset += length) {
      length = std::min(end - offset, kBatchBytes - bytes);
      status = (*lane)->copy(region->address + offset, region->mirror->address() + offset, length);
      if (!status.ok()) return false;
      bump(stats_->arrival_copies);
      bump(stats_->arrival_bytes, length);
      bytes += length;
      if (++copies < kBatchCopies && bytes < kBatchBytes) continue;
      copies = 0;
      bytes = 0;
      status = drain(entry);
      if (!status.ok() || unwanted(entry)) return false;
    }
    return true;
  };
  if (unwanted(entry)) return {};
  for (const Landing& landing : entry.staged) {
    for (const RegionPtr& region : landing.regions) {
      for (const Landing::Run& run : landing.runs) {
        if (next(region, run)) continue;
        const Status drained = drain(entry);  // what went before ends, too
        return status.ok() ? drained : status;
      }
    }
  }
  return drain(entry);
}

Status Arrivals::drain(Entry& entry) {
  const auto deadline = Clock::now() + wait_;
  Status status;
  for (DeviceLane* lane : entry.copying) {
    Status one =
        lane->hung() ? Status(Code::kTimeout, "its copies have hung") : lane->wait(deadline);
    if (lane->hung()) entry.hung = true;
    if (!one.ok() && status.ok()) status = std::move(one);
  }
  return status;
}

void Arrivals::close() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  std::lock_guard lock(mutex_);
  for (const EntryPtr& entry : hung_) keep_mirrors(*entry);
  hung_.clear();
  queue_.clear();
  entries_.clear();  // and with them the last owners of regions
}

void Arrivals::keep_mirrors(const Entry& entry) {
  for (const Landing& landing : entry.staged) {
    for (const RegionPtr& region : landing.regions) {
      const auto lane = std::ranges::find(entry.copying, region->device, &DeviceLane::ordinal);
      if ((*lane)->hung() && region->mirror->keep()) bump(stats_->mirrors_kept);
    }
  }
}

}  // namespace ffi_transport
