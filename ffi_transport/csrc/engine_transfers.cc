// The engine's transfers and step plans: from what the caller asks for to jobs of the domains.
#include <algorithm>

#include "cuda_trigger.h"
#include "engine.h"

namespace ffi_transport {

// ---- transfers -------------------------------------------------------------------------------

Result<int64_t> Engine::open_transfer(int64_t peer, int64_t slot) {
  if (Status status = check_open(); !status.ok()) return status;
  if (Status status = control_->check_peer(peer); !status.ok()) return status;
  const uint32_t slots = counters_.codec().slot_count();
  if (slot < 0 || slot >= static_cast<int64_t>(slots)) {
    return Status(Code::kInvalid,
                  "slot " + std::to_string(slot) + " is not in 0.." + std::to_string(slots - 1));
  }
  std::shared_ptr<PeerLanes> lanes;
  {
    std::lock_guard lock(peers_mutex_);
    if (const auto it = peers_.find(peer); it != peers_.end()) lanes = it->second;
  }
  const bool closing = !lanes;  // being lost just now: nothing will be dealt to its lanes
  if (closing) lanes = std::make_shared<PeerLanes>(0, 0);
  const TransferPtr transfer = transfers_.open(peer, static_cast<uint32_t>(slot), std::move(lanes));
  if (closing) transfer->fail("the peer's data endpoints are closed");
  // Looked at again: a peer lost in between has failed its transfers without this one.
  if (Status status = control_->check_peer(peer); !status.ok()) transfer->fail(status.text());
  return transfer->id();
}

// A region's descriptor came with the application's messages and may name a domain that the peer
// did not name in its HELLO. That is the peer's fault, so its transfer fails and the caller goes
// on.
void Engine::check_remote(const TransferPtr& transfer, const RemoteRegion& remote) {
  if (!transfer || !transfer->postable()) return;
  const uint32_t last = remote.domains.back().domain;
  const size_t known = transfer->lanes().domains();
  if (last < known) return;
  transfer->fail("the peer announced memory on its domain " + std::to_string(last) +
                 ", but has only " + std::to_string(known));
}

Status Engine::write(int64_t transfer, int64_t region, uint64_t offset, const RemoteRegion& remote,
                     uint64_t remote_offset, uint64_t length, uint64_t units) {
  auto source = find_region(region);
  if (!source.ok()) return source.status();
  auto list =
      UnitList::range(offset, remote_offset, length, units, (*source)->length, remote.length);
  if (!list.ok()) return list.status();
  return enqueue(transfer, source.take(), std::make_shared<RemoteRegion>(remote), list.take());
}

Status Engine::write_paged(int64_t transfer, int64_t region, const RemoteRegion& remote,
                           PageLists pages, const PageUnit& unit) {
  auto source = find_region(region);
  if (!source.ok()) return source.status();
  auto list = UnitList::pages(std::make_shared<const PageLists>(std::move(pages)), unit,
                              (*source)->length, remote.length);
  if (!list.ok()) return list.status();
  return enqueue(transfer, source.take(), std::make_shared<RemoteRegion>(remote), list.take());
}

Status Engine::enqueue(int64_t id, RegionPtr source, RemoteRegionPtr remote, UnitList units) {
  if (Status status = check_open(); !status.ok()) return status;
  auto transfer = transfers_.find(id);
  if (!transfer.ok()) return transfer.status();
  if (Status status = open_rings(*source); !status.ok()) return status;
  check_remote(*transfer, *remote);
  const auto outcome = *transfer ? (*transfer)->plan(units.size()) : Transfer::Plan::kEnded;
  if (outcome == Transfer::Plan::kEnded) {
    // Ended by a lost peer or a cancel that the caller has not read about yet: its event says so.
    bump(stats_.plan_writes_skipped);
    return {};
  }
  if (outcome == Transfer::Plan::kSealed) {
    return Status(Code::kInvalid, "transfer " + std::to_string(id) + " is sealed");
  }
  Job job;
  job.transfer = transfer.take();
  job.source = std::move(source);
  job.remote = std::move(remote);
  job.units = std::move(units);
  distribute(std::move(job), false);
  return {};
}

void Engine::distribute(Job job, bool on_first_worker) {
  const std::vector<Lane> lanes = job.transfer->lanes().deal(
      *job.source, *job.remote, job.units.size(), job.units.unit_bytes());
  for (size_t i = 0; i < lanes.size(); ++i) {
    const Lane& lane = lanes[i];
    Job part = i + 1 == lanes.size() ? std::move(job) : job;
    part.source_place = lane.source;
    part.remote_place = lane.remote;
    part.cursor = lane.begin;
    part.end = lane.end;
    const uint32_t domain = part.source->domains[lane.source].domain;
    if (domain == 0 && on_first_worker) {
      workers_[0]->submit_here(std::move(part));
    } else {
      workers_[domain]->submit(std::move(part));
    }
  }
}

Status Engine::seal(int64_t id) {
  auto transfer = transfers_.find(id);
  if (transfer.ok() && *transfer) (*transfer)->seal();
  return transfer.status();
}

Status Engine::cancel(int64_t id) {
  auto transfer = transfers_.find(id);
  if (transfer.ok() && *transfer) (*transfer)->cancel();
  return transfer.status();
}

// ---- step plans ------------------------------------------------------------------------------

Status Engine::open_slots(const std::vector<int>& ordinals, int layers, bool device) {
  std::lock_guard lock(close_mutex_);  // the poller must be there when close() looks for it
  if (Status status = check_open(); !status.ok()) return status;
  std::lock_guard polling(poller_mutex_);
  if (poller_) return Status(Code::kInvalid, "the engine's slots are open already");
  if (plans_.live() > 0) {
    return Status(Code::kInvalid, "slots are opened before the first plan is filed");
  }
  auto made = SlotBoard::create(ordinals, layers, device);
  if (!made.ok()) return made.status();
  const std::shared_ptr<SlotBoard> board = made.take();
  if (device) CudaTriggers::install(index_, board);
  hub_->set_slots(board);
  poller_ = std::make_shared<SlotPoller>(board, hub_.get(), &stats_);
  return {};
}

std::shared_ptr<SlotPoller> Engine::poller() const {
  std::lock_guard lock(poller_mutex_);
  return poller_;
}

Status Engine::set_source_region(int ordinal, int layer, int64_t id) {
  if (ordinal < 0 || layer < 0 || layer >= TriggerHub::kLayers) {
    return Status(Code::kInvalid, "ordinal " + std::to_string(ordinal) + ", layer " +
                                      std::to_string(layer) +
                                      ": none may be negative, and at most " +
                                      std::to_string(TriggerHub::kLayers) + " layers");
  }
  if (!plans_.near_sources(ordinal, TriggerHub::kOrdinals)) {
    return Status(Code::kInvalid, "ordinal " + std::to_string(ordinal) + " is not within " +
                                      std::to_string(TriggerHub::kOrdinals) +
                                      " of the other source regions' ordinals");
  }
  auto region = find_region(id);
  if (!region.ok()) return region.status();
  if (Status status = open_rings(**region); !status.ok()) return status;
  hub_->set_address(ordinal, layer, (*region)->address);
  plans_.set_source(ordinal, layer, region.take());
  return {};
}

Status Engine::add_plan(int64_t step, std::vector<int> ordinals, int layers,
                        std::vector<PlanRequest> requests, double timeout_s) {
  if (Status status = check_open(); !status.ok()) return status;
  const std::shared_ptr<SlotPoller> polling = poller();
  if (polling) {
    if (Status status = polling->check(ordinals, layers); !status.ok()) return status;
  }
  std::vector<PlannedWrite> writes;
  writes.reserve(requests.size());
  for (PlanRequest& request : requests) {
    auto transfer = transfers_.find(request.transfer);
    if (!transfer.ok()) return transfer.status();
    PlannedWrite write;
    write.transfer = transfer.take();
    write.ordinal = request.ordinal;
    write.first_layer = request.first_layer;
    write.pages = std::make_shared<const PageLists>(std::move(request.pages));
    write.unit = request.unit;
    for (RemoteRegion& remote : request.remotes) {
      check_remote(write.transfer, remote);
      write.remotes.push_back(std::make_shared<const RemoteRegion>(std::move(remote)));
    }
    writes.push_back(std::move(write));
  }
  if (Status status = plans_.add(step, ordinals, layers, std::move(writes), timeout_s);
      !status.ok()) {
    return status;
  }
  if (polling) polling->watch(step, ordinals, layers);
  return {};
}

Status Engine::drop_plan(int64_t step) {
  plans_.drop(step);
  if (const auto polling = poller()) polling->forget(step);
  return {};
}

bool Engine::read_triggers() {
  constexpr int kAtOnce = 64;  // then the worker looks at its endpoints again
  TriggerRecord record;
  std::vector<Job> jobs;
  int count = 0;
  for (; count < kAtOnce && hub_->pop(&record); ++count) {
    const int64_t step = plans_.fire(record, &jobs);
    if (!trigger_trace_->on()) continue;
    TraceRecord trace;
    trace.order = record.order;
    trace.t_ns = record.t_ns;
    trace.kind = static_cast<int32_t>(TraceKind::kTrigger);
    trace.step = step;
    trace.layer = record.layer;
    trace.ordinal = record.ordinal;
    trigger_trace_->add(trace);
  }
  for (Job& job : jobs) distribute(std::move(job), true);
  const bool overflowed = hub_->take_overflow();
  if (overflowed) plans_.report_overflow();
  return count > 0 || overflowed;
}

}  // namespace ffi_transport
