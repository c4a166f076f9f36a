#include "engine.h"

#include <algorithm>
#include <random>

#include "ofi_fabric.h"

namespace ffi_transport {
namespace {

uint64_t random_epoch() {
  std::random_device device;
  uint64_t epoch = 0;
  while (epoch == 0) epoch = (uint64_t{device()} << 32) | device();  // 0 means "not known"
  return epoch;
}

// A socket's copies run at the speed of the cache while what is in flight fits into it: beyond
// about 1 MiB a provider over TCP was measured to lose a third of its rate (docs/adr/0006). A NIC
// copies nothing and wants its queues filled.
uint64_t default_bytes_in_flight(const std::string& provider) {
  const bool over_tcp = provider == "tcp" || provider == "net" || provider == "tcp;ofi_rxm";
  return over_tcp ? 768 << 10 : 16 << 20;
}

}  // namespace

Engine::Engine(const EngineOptions& options)
    : options_(options),
      epoch_(random_epoch()),
      counters_(options.slot_bits, &events_, &stats_),
      transfers_(&events_),
      plans_(&events_, &stats_) {}

Result<std::unique_ptr<Engine>> Engine::create(const EngineOptions& options,
                                               std::optional<std::string> hello) {
  std::unique_ptr<Engine> engine(new Engine(options));
  if (Status status = engine->open(std::move(hello)); !status.ok()) return status;
  return engine;
}

Engine::~Engine() { close(); }

Status Engine::open(std::optional<std::string> hello) {
  if (options_.provider == "loopback") {
    data_fabric_ = make_loopback(options_.loopback);
  } else {
    OfiOptions ofi{options_.provider, options_.bind, options_.libfabric_path, false};
    auto fabric = open_ofi(ofi);
    if (!fabric.ok()) return fabric.status();
    data_fabric_ = fabric.take();
    if (data_fabric_->provider() == "efa" || data_fabric_->provider() == "verbs") {
      // Greeting needs an address that people can write down: control goes over IP.
      auto control = open_ofi({"auto", options_.bind, options_.libfabric_path, true});
      if (!control.ok()) return control.status();
      control_fabric_ = control.take();
    }
  }
  Fabric* control_fabric = control_fabric_ ? control_fabric_.get() : data_fabric_.get();

  std::vector<std::string> names = options_.domains;
  if (names.empty()) names.emplace_back();
  WorkerOptions worker;
  worker.spin_us = options_.spin_us;
  // The window is one peer's over all domains.
  const uint64_t window = options_.bytes_in_flight != 0
                              ? options_.bytes_in_flight
                              : default_bytes_in_flight(data_fabric_->provider());
  worker.bytes_in_flight = std::max<uint64_t>(1, window / names.size());
  worker.posts_in_flight =
      std::max<uint32_t>(1, options_.posts_in_flight / static_cast<uint32_t>(names.size()));
  worker.trace = options_.trace;
  for (size_t i = 0; i < names.size(); ++i) {
    auto domain = data_fabric_->open_domain(names[i]);
    if (!domain.ok()) return domain.status();
    workers_.push_back(
        std::make_unique<DataWorker>(i, domain.take(), worker, &counters_, &stats_, &trace_order_,
                                     [this](int64_t peer, const std::string& reason) {
                                       control_->report_broken(peer, reason);
                                     }));
  }
  hub_ = std::make_unique<TriggerHub>(workers_[0]->waiter(), &trace_order_, &stats_, options_.trace,
                                      options_.trigger_ring);
  trigger_trace_ = std::make_unique<TraceLog>(&trace_order_, options_.trace);

  ControlOptions control;
  control.data_provider = data_fabric_->provider();
  control.slot_bits = options_.slot_bits;
  control.domains = workers_.size();
  control.spin_us = options_.spin_us;
  control.heartbeat_ms = options_.heartbeat_ms;
  control.peer_timeout_ms = options_.peer_timeout_ms;
  auto channel = ControlChannel::open(control_fabric, options_.control_port, epoch_, control, this,
                                      &events_, &stats_);
  if (!channel.ok()) return channel.status();
  control_ = channel.take();

  index_ = TriggerRegistry::add(hub_.get());
  if (index_ < 0) return Status(Code::kUnavailable, "too many engines are open in this process");
  for (size_t i = 0; i < workers_.size(); ++i) {
    if (i == 0) {
      workers_[i]->start([this] { return read_triggers(); }, [this] { return hub_->empty(); });
    } else {
      workers_[i]->start([] { return false; }, [] { return true; });
    }
  }
  control_->start();
  if (hello) control_->set_hello(std::move(*hello));
  return {};
}

void Engine::close() {
  std::lock_guard lock(close_mutex_);
  if (closed_.exchange(true)) return;
  plans_.close();
  // Peers first, while the workers can still fence them; then triggers; then the workers.
  if (control_) control_->stop();
  if (index_ >= 0) TriggerRegistry::remove(index_);
  for (auto& worker : workers_) worker->stop();
  for (const TransferPtr& transfer : transfers_.all()) transfer->fail("the engine is closed");
  {
    std::lock_guard regions_lock(regions_mutex_);
    regions_.clear();
  }
  events_.close();
}

Status Engine::check_open() const {
  if (!closed_.load(std::memory_order_acquire)) return {};
  return Status(Code::kClosed, "the engine is closed");
}

// ---- memory ----------------------------------------------------------------------------------

Result<RegionPtr> Engine::register_memory(uint64_t address, uint64_t length) {
  if (Status status = check_open(); !status.ok()) return status;
  if (address == 0 || length == 0) {
    return Status(Code::kInvalid, "a region needs an address and a length, not " +
                                      std::to_string(address) + " and " + std::to_string(length));
  }
  auto region = std::make_shared<Region>();
  region->address = address;
  region->length = length;
  for (auto& worker : workers_) {
    auto registration = worker->domain().register_memory(reinterpret_cast<void*>(address), length);
    if (!registration.ok()) return registration.status();
    region->domains.push_back(registration.take());
  }
  std::lock_guard lock(regions_mutex_);
  region->id = next_region_++;
  regions_[region->id] = region;
  return region;
}

Result<RegionPtr> Engine::find_region(int64_t id) const {
  std::lock_guard lock(regions_mutex_);
  const auto it = regions_.find(id);
  if (it == regions_.end()) {
    return Status(Code::kInvalid, "region " + std::to_string(id) + " is not registered");
  }
  return it->second;
}

Status Engine::deregister(int64_t id) {
  auto region = find_region(id);
  if (!region.ok()) return region.status();
  (*region)->closed.store(true, std::memory_order_seq_cst);
  if (const int64_t flying = (*region)->in_flight.load(std::memory_order_seq_cst); flying > 0) {
    (*region)->closed.store(false, std::memory_order_seq_cst);
    Status::Detail detail;
    detail.text = "region " + std::to_string(id) + " has " + std::to_string(flying) +
                  " writes in flight: end or cancel their transfers first";
    detail.id = id;
    return Status(Code::kRegistration, std::move(detail));
  }
  for (const auto& [ordinal, layer] : plans_.forget_source(id)) {
    hub_->set_address(ordinal, layer, 0);
  }
  std::lock_guard lock(regions_mutex_);
  regions_.erase(id);
  return {};
}

Result<std::string> Engine::descriptor(int64_t id) const {
  auto region = find_region(id);
  if (!region.ok()) return region.status();
  RemoteRegion remote;
  remote.length = (*region)->length;
  for (const auto& registration : (*region)->domains) {
    remote.domains.push_back({registration->key(), registration->base()});
  }
  return remote.encode();
}

// ---- peers -----------------------------------------------------------------------------------

Result<int64_t> Engine::connect(const std::string& address, double timeout_s) {
  if (Status status = check_open(); !status.ok()) return status;
  return control_->connect(address, timeout_s);
}

Result<std::vector<std::string>> Engine::open_data(int64_t peer) {
  std::vector<std::string> names;
  for (auto& worker : workers_) {
    auto name = worker->open_link(peer);
    if (!name.ok()) return name.status();
    names.push_back(name.take());
  }
  return names;
}

Status Engine::connect_data(int64_t peer, const std::vector<std::string>& names) {
  for (size_t i = 0; i < workers_.size(); ++i) {
    if (Status status = workers_[i]->connect_link(peer, names[i]); !status.ok()) return status;
  }
  return {};
}

void Engine::close_data(int64_t peer, const std::string& reason) {
  // Marked first, so that the workers post nothing more for the peer; those with writes in flight
  // end when the endpoints are closed, all before this returns.
  transfers_.fail_peer(peer, reason);
  for (auto& worker : workers_) worker->close_link(peer);
}

// ---- transfers -------------------------------------------------------------------------------

Result<int64_t> Engine::open_transfer(int64_t peer, int64_t slot) {
  if (Status status = check_open(); !status.ok()) return status;
  if (Status status = control_->check_peer(peer); !status.ok()) return status;
  const uint32_t slots = counters_.codec().slot_count();
  if (slot < 0 || slot >= static_cast<int64_t>(slots)) {
    return Status(Code::kInvalid,
                  "slot " + std::to_string(slot) + " is not in 0.." + std::to_string(slots - 1));
  }
  const TransferPtr transfer = transfers_.open(peer, static_cast<uint32_t>(slot));
  // Looked at again: a peer lost in between has failed its transfers without this one.
  if (Status status = control_->check_peer(peer); !status.ok()) transfer->fail(status.text());
  return transfer->id();
}

Status Engine::check_remote(const RemoteRegion& remote) const {
  if (remote.domains.size() == workers_.size()) return {};
  return Status(Code::kInvalid, "a remote region of " + std::to_string(remote.domains.size()) +
                                    " domains; this engine has " + std::to_string(workers_.size()));
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
  if (Status status = check_remote(*remote); !status.ok()) return status;
  auto transfer = transfers_.find(id);
  if (!transfer.ok()) return transfer.status();
  const auto outcome = *transfer ? (*transfer)->plan(units.weight()) : Transfer::Plan::kEnded;
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
  job.end = units.size();
  job.units = std::move(units);
  distribute(std::move(job), false);
  return {};
}

// Whole units, in one run per domain: how many NICs there are changes no count (R1).
void Engine::distribute(Job job, bool on_first_worker) {
  const size_t count = workers_.size(), total = job.end;
  for (size_t i = 0; i < count; ++i) {
    Job part = i + 1 == count ? std::move(job) : job;
    part.cursor = total * i / count;
    part.end = total * (i + 1) / count;
    if (part.cursor == part.end) continue;
    if (i == 0 && on_first_worker) {
      workers_[0]->submit_here(std::move(part));
    } else {
      workers_[i]->submit(std::move(part));
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

Status Engine::set_source_region(int ordinal, int layer, int64_t id) {
  if (ordinal < 0 || ordinal >= TriggerHub::kOrdinals || layer < 0 ||
      layer >= TriggerHub::kLayers) {
    return Status(Code::kInvalid, "ordinal " + std::to_string(ordinal) + ", layer " +
                                      std::to_string(layer) + ": at most " +
                                      std::to_string(TriggerHub::kOrdinals) + " ordinals and " +
                                      std::to_string(TriggerHub::kLayers) + " layers");
  }
  auto region = find_region(id);
  if (!region.ok()) return region.status();
  hub_->set_address(ordinal, layer, (*region)->address);
  plans_.set_source(ordinal, layer, region.take());
  return {};
}

Status Engine::add_plan(int64_t step, std::vector<int> ordinals, int layers,
                        std::vector<PlanRequest> requests, double timeout_s) {
  if (Status status = check_open(); !status.ok()) return status;
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
      if (Status status = check_remote(remote); !status.ok()) return status;
      write.remotes.push_back(std::make_shared<const RemoteRegion>(std::move(remote)));
    }
    writes.push_back(std::move(write));
  }
  return plans_.add(step, std::move(ordinals), layers, std::move(writes), timeout_s);
}

Status Engine::drop_plan(int64_t step) {
  plans_.drop(step);
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

// ---- what happened ---------------------------------------------------------------------------

std::vector<std::pair<std::string, uint64_t>> Engine::stats() const {
  std::vector<std::pair<std::string, uint64_t>> out;
#define FFI_TRANSPORT_READ(name) \
  out.emplace_back(#name, stats_.name.load(std::memory_order_relaxed));
  FFI_TRANSPORT_STATS(FFI_TRANSPORT_READ)
#undef FFI_TRANSPORT_READ
  out.emplace_back("steps_live", plans_.live());
  return out;
}

std::vector<TraceRecord> Engine::trace() const {
  std::vector<TraceRecord> records;
  trigger_trace_->copy_to(&records);
  for (const auto& worker : workers_) worker->trace()->copy_to(&records);
  std::ranges::sort(records, {}, &TraceRecord::order);
  return records;
}

}  // namespace ffi_transport
