#include "plan_table.h"

#include <algorithm>

namespace ffi_transport {
namespace {

std::string place(int ordinal, int layer) {
  return "ordinal " + std::to_string(ordinal) + ", layer " + std::to_string(layer);
}

std::string hex(uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

}  // namespace

void PlanTable::set_source(int ordinal, int layer, RegionPtr region) {
  std::lock_guard lock(mutex_);
  sources_[{ordinal, layer}] = std::move(region);
}

bool PlanTable::near_sources(int ordinal, int width) const {
  std::lock_guard lock(mutex_);
  if (sources_.empty()) return true;
  const int first = std::min(ordinal, sources_.begin()->first.first);
  const int last = std::max(ordinal, sources_.rbegin()->first.first);
  return last - first < width;
}

std::vector<std::pair<int, int>> PlanTable::forget_source(int64_t region) {
  std::lock_guard lock(mutex_);
  std::vector<std::pair<int, int>> places;
  for (const auto& [key, source] : sources_) {
    if (source->id == region) places.push_back(key);
  }
  for (const auto& key : places) sources_.erase(key);
  return places;
}

RegionPtr PlanTable::source(int ordinal, int layer) const {
  const auto it = sources_.find({ordinal, layer});
  return it == sources_.end() ? nullptr : it->second;
}

// The live steps with their first few triggers that have not come.
std::string PlanTable::describe_live() const {
  constexpr int kNamed = 4;
  std::string out;
  for (const auto& [low, step] : steps_) {
    if (!out.empty()) out += "; ";
    out += "step " + std::to_string(step.number) + " waits for " + std::to_string(step.left) +
           " triggers:";
    int named = 0;
    for (size_t cell = 0; cell < step.fired.size() && named < kNamed; ++cell) {
      if (step.fired[cell]) continue;
      ++named;
      out += " (" + place(step.ordinals[cell / step.layers], static_cast<int>(cell % step.layers)) +
             ")";
    }
    if (static_cast<size_t>(named) < step.left) out += " ...";
  }
  return out;
}

void PlanTable::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  freed_.notify_all();
}

// Takes the mutex only to look the regions up: the progress thread must not wait while pages are
// scanned.
Status PlanTable::check(PlannedWrite* write, const std::vector<int>& ordinals, int layers) const {
  if (!std::ranges::count(ordinals, write->ordinal)) {
    return Status(Code::kInvalid, "a write of ordinal " + std::to_string(write->ordinal) +
                                      ", which is not among the step's ordinals");
  }
  const int end = write->first_layer + static_cast<int>(write->remotes.size());
  if (write->first_layer < 0 || end > layers) {
    return Status(Code::kInvalid, "a write of layers " + std::to_string(write->first_layer) +
                                      " to " + std::to_string(end) + " in a step of " +
                                      std::to_string(layers));
  }
  uint64_t source_length = ~0ull, remote_length = ~0ull;
  {
    std::lock_guard lock(mutex_);
    for (int layer = write->first_layer; layer < end; ++layer) {
      const RegionPtr region = source(write->ordinal, layer);
      if (!region) {
        return Status(Code::kInvalid,
                      "no source region was set for " + place(write->ordinal, layer));
      }
      source_length = std::min(source_length, region->length);
      remote_length = std::min(remote_length, write->remotes[layer - write->first_layer]->length);
    }
  }
  auto units = UnitList::pages(write->pages, write->unit, source_length, remote_length);
  if (!units.ok()) {
    return Status(Code::kInvalid, "ordinal " + std::to_string(write->ordinal) + ", layers " +
                                      std::to_string(write->first_layer) + " to " +
                                      std::to_string(end) + ": " + units.status().text());
  }
  write->units = units.take();
  write->source_length = source_length;
  return {};
}

Status PlanTable::add(int64_t number, std::vector<int> ordinals, int layers,
                      std::vector<PlannedWrite> writes, double timeout_s) {
  for (PlannedWrite& write : writes) {
    if (Status status = check(&write, ordinals, layers); !status.ok()) return status;
  }
  std::unique_lock lock(mutex_);
  const auto low = static_cast<uint32_t>(number);
  const auto begin = Clock::now();
  const auto wait = std::chrono::duration<double>(std::clamp(timeout_s, 0.0, 1e6));
  const bool room =
      freed_.wait_until(lock, begin + std::chrono::duration_cast<Clock::duration>(wait),
                        [this] { return closed_ || steps_.size() < kLiveSteps; });
  if (closed_) return Status(Code::kClosed, "the engine is closed");
  if (!room) {
    Status::Detail detail;
    detail.missing = describe_live();
    detail.text = "step " + std::to_string(number) + ": " + std::to_string(kLiveSteps) +
                  " steps are live already: " + detail.missing + "; drop_plan() those that failed";
    detail.id = number;
    detail.elapsed_s = std::chrono::duration<double>(Clock::now() - begin).count();
    return Status(Code::kTimeout, std::move(detail));
  }
  if (steps_.contains(low)) {
    return Status(Code::kInvalid,
                  "step " + std::to_string(number) + ": a step with this low half is live already");
  }
  for (PlannedWrite& write : writes) {
    if (!write.transfer) continue;
    const auto outcome = write.transfer->plan(write.pages->source.size() * write.remotes.size());
    if (outcome == Transfer::Plan::kSealed) {
      // Only here can planning be refused by the caller's fault, and others were planned already:
      // so this one fails, by name, instead of the whole step.
      write.transfer->fail("a write was planned in step " + std::to_string(number) +
                           " after the transfer was sealed");
    }
    if (outcome != Transfer::Plan::kPlanned) write.transfer = nullptr;
  }
  std::erase_if(writes, [this](const PlannedWrite& write) {
    if (!write.transfer) bump(stats_->plan_writes_skipped);
    return !write.transfer;
  });
  Step step;
  step.number = number;
  step.layers = layers;
  step.left = ordinals.size() * layers;
  step.fired.resize(step.left);
  step.ordinals = std::move(ordinals);
  step.writes = std::move(writes);
  if (step.left > 0) steps_.emplace(low, std::move(step));
  return {};
}

bool PlanTable::drop(int64_t number) {
  Step step;
  {
    std::lock_guard lock(mutex_);
    const auto it = steps_.find(static_cast<uint32_t>(number));
    if (it == steps_.end() || it->second.number != number) return false;
    step = std::move(it->second);
    steps_.erase(it);
    freed_.notify_all();
  }
  for (const PlannedWrite& write : step.writes) {
    const size_t index = std::ranges::find(step.ordinals, write.ordinal) - step.ordinals.begin();
    for (size_t i = 0; i < write.remotes.size(); ++i) {
      if (step.fired[index * step.layers + write.first_layer + i]) continue;
      write.transfer->fail("step " + std::to_string(number) + " was dropped before " +
                           place(write.ordinal, write.first_layer + static_cast<int>(i)) +
                           " was written");
      break;
    }
  }
  return true;
}

void PlanTable::fault(const char* kind, int64_t step, const TriggerRecord& record,
                      std::string detail) {
  bump(stats_->trigger_faults);
  Event event;
  event.kind = EventKind::kTriggerFault;
  event.id = step;
  event.first = record.layer;
  event.second = record.ordinal;
  event.text = kind;
  event.payload = std::move(detail);
  events_->push(std::move(event));
}

void PlanTable::report_overflow() {
  TriggerRecord none;
  none.layer = none.ordinal = -1;
  fault(
      "ring_overflow", -1, none,
      "triggers came faster than they were read and some are lost: the live steps are incomplete");
}

int64_t PlanTable::fire(const TriggerRecord& record, std::vector<Job>* jobs) {
  std::lock_guard lock(mutex_);
  const auto it = steps_.find(record.step_low);
  const int ordinal = record.ordinal, layer = record.layer;
  if (record.refusal != cuda::kSuccess) {
    fault("not_enqueued", -1, record,
          "CUDA error " + std::to_string(record.refusal) +
              ": the trigger was not put on the stream, and its layer waits for a later one");
    return -1;
  }
  const int64_t number =
      it == steps_.end() ? static_cast<int32_t>(record.step_low) : it->second.number;
  if (record.wrong_address != 0 && reported_.emplace(ordinal, layer, record.wrong_address).second) {
    const RegionPtr region = source(ordinal, layer);
    fault("address_changed", number, record,
          "the cache shard is at " + hex(record.wrong_address) + ", registered at " +
              (region ? hex(region->address) : "nowhere"));
  }
  if (it == steps_.end()) {
    bump(stats_->no_plan_triggers);
    return number;
  }
  Step& step = it->second;
  const auto found = std::ranges::find(step.ordinals, ordinal);
  if (found == step.ordinals.end() || layer < 0 || layer >= step.layers) {
    fault("outside_plan", number, record, "the step's plan has no such ordinal or layer");
    return number;
  }
  const size_t cell = (found - step.ordinals.begin()) * step.layers + layer;
  if (step.fired[cell]) {
    fault("repeated", number, record, "this trigger has fired before in the step");
    return number;
  }
  step.fired[cell] = true;
  const RegionPtr region = source(ordinal, layer);
  for (const PlannedWrite& write : step.writes) {
    const int index = layer - write.first_layer;
    if (write.ordinal != ordinal || index < 0 || index >= static_cast<int>(write.remotes.size())) {
      continue;
    }
    if (record.wrong_address != 0) {
      write.transfer->fail("the cache shard of " + place(ordinal, layer) + " has moved");
      continue;
    }
    // The region may have been replaced since the pages were checked.
    if (!region || region->length < write.source_length) {
      write.transfer->fail("the source region of " + place(ordinal, layer) + " was replaced");
      continue;
    }
    Job job;
    job.transfer = write.transfer;
    job.source = region;
    job.remote = write.remotes[index];
    job.units = write.units;
    job.step = number;
    job.layer = layer;
    job.ordinal = ordinal;
    jobs->push_back(std::move(job));
  }
  if (--step.left == 0) {
    steps_.erase(it);
    freed_.notify_all();
  }
  return number;
}

size_t PlanTable::live() const {
  std::lock_guard lock(mutex_);
  return steps_.size();
}

}  // namespace ffi_transport
