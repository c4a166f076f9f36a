#include "engine.h"

#include <algorithm>
#include <functional>
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

bool is_over_tcp(const std::string& provider) {
  return provider == "tcp" || provider == "net" || provider == "tcp;ofi_rxm";
}

// A socket's copies run at the speed of the cache while what is in flight fits into it: beyond
// about 1 MiB a provider over TCP was measured to lose a third of its rate (docs/adr/0006). A NIC
// copies nothing and wants its queues filled.
uint64_t default_bytes_in_flight(const std::string& provider) {
  return is_over_tcp(provider) ? 768 << 10 : 16 << 20;
}

// A software provider that offers FI_HMEM copies inside its calls, which stops its thread: it is
// asked for that only if told to. And a machine without CUDA's driver, which is not started for
// those, has no device memory.
DeviceMemoryWish device_memory_wish(DeviceMemory how, const std::string& provider) {
  if (how == DeviceMemory::kDirect) return DeviceMemoryWish::kAny;
  if (how == DeviceMemory::kStaged || is_over_tcp(provider)) return DeviceMemoryWish::kNone;
  return CudaDriver::open().ok() ? DeviceMemoryWish::kHardware : DeviceMemoryWish::kNone;
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
    LoopbackOptions loopback = options_.loopback;
    // It plays a NIC that reaches device memory for those who insist: its copies are the CPU's, so
    // the memory must be a fake driver's.
    loopback.device_memory |= options_.device_memory == DeviceMemory::kDirect;
    data_fabric_ = make_loopback(loopback);
  } else {
    OfiOptions ofi{options_.provider, options_.bind, options_.libfabric_path, false,
                   device_memory_wish(options_.device_memory, options_.provider)};
    auto fabric = open_ofi(ofi);
    if (!fabric.ok()) return fabric.status();
    data_fabric_ = fabric.take();
    if (data_fabric_->provider() == "efa" || data_fabric_->provider() == "verbs") {
      // Greeting needs an address that people can write down: control goes over IP.
      auto control =
          open_ofi({"auto", options_.bind, options_.libfabric_path, true, DeviceMemoryWish::kNone});
      if (!control.ok()) return control.status();
      control_fabric_ = control.take();
    }
  }
  Fabric* control_fabric = control_fabric_ ? control_fabric_.get() : data_fabric_.get();

  std::vector<std::string> names = options_.domains;
  if (names.empty()) names.emplace_back();
  if (names.size() > kMaxDomains) {
    return Status(Code::kInvalid, "domains: " + std::to_string(names.size()) + ", at most " +
                                      std::to_string(kMaxDomains) + " are allowed");
  }
  if (!options_.domain_cpus.empty() && options_.domain_cpus.size() != names.size()) {
    return Status(Code::kInvalid, "domain_cpus: " + std::to_string(options_.domain_cpus.size()) +
                                      " sets for " + std::to_string(names.size()) + " domains");
  }
  WorkerOptions worker;
  worker.spin_us = options_.spin_us;
  worker.bytes_in_flight = options_.bytes_in_flight != 0
                               ? options_.bytes_in_flight
                               : default_bytes_in_flight(data_fabric_->provider());
  worker.posts_in_flight = options_.posts_in_flight;
  worker.trace = options_.trace;
  for (const std::string& name : names) {
    auto domain = data_fabric_->open_domain(name);
    if (!domain.ok()) return domain.status();
    workers_.push_back(
        std::make_unique<DataWorker>(domain.take(), worker, &counters_, &stats_, &trace_order_,
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
  control.spin_us = options_.spin_us;
  control.heartbeat_ms = options_.heartbeat_ms;
  control.peer_timeout_ms = options_.peer_timeout_ms;
  auto channel = ControlChannel::open(control_fabric, options_.control_port, epoch_, control, this,
                                      &events_, &stats_);
  if (!channel.ok()) return channel.status();
  control_ = channel.take();

  index_ = TriggerRegistry::add(hub_.get());
  if (index_ < 0) return Status(Code::kUnavailable, "too many engines are open in this process");
  if (Status status = start_workers(); !status.ok()) return status;
  control_->start();
  if (hello) control_->set_hello(std::move(*hello));
  return {};
}

Status Engine::start_workers() {
  for (size_t i = 0; i < workers_.size(); ++i) {
    std::function<bool()> extra = [] { return false; }, extra_idle = [] { return true; };
    if (i == 0) {
      extra = [this] { return read_triggers(); };
      extra_idle = [this] { return hub_->empty(); };
    }
    const std::vector<int> cpus =
        options_.domain_cpus.empty() ? std::vector<int>() : options_.domain_cpus[i];
    Status status = workers_[i]->start("fabric-" + std::to_string(i), cpus, std::move(extra),
                                       std::move(extra_idle));
    if (!status.ok()) return status;
  }
  return {};
}

uint64_t Engine::close() {
  std::lock_guard lock(close_mutex_);
  if (closed_.exchange(true)) return 0;
  plans_.close();
  // Peers first, while the workers can still fence them; then triggers; then the workers.
  if (control_) control_->stop();
  if (index_ >= 0) TriggerRegistry::remove(index_);
  if (const auto polling = poller()) polling->stop();
  for (auto& worker : workers_) worker->stop();
  {
    std::lock_guard arrivals_lock(arrivals_mutex_);
    if (arrivals_) arrivals_->close();
  }
  for (const TransferPtr& transfer : transfers_.all()) transfer->fail("the engine is closed");
  {
    std::lock_guard regions_lock(regions_mutex_);
    regions_.clear();
  }
  events_.close();
  return stats_.mirrors_kept.load(std::memory_order_relaxed);
}

Status Engine::check_open() const {
  if (!closed_.load(std::memory_order_acquire)) return {};
  return Status(Code::kClosed, "the engine is closed");
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
  for (auto& worker : workers_) {
    if (Status status = worker->connect_link(peer, names); !status.ok()) return status;
  }
  std::lock_guard lock(peers_mutex_);
  peers_[peer] = std::make_shared<PeerLanes>(names.size(), static_cast<uint64_t>(peer));
  return {};
}

void Engine::close_data(int64_t peer, const std::string& reason) {
  // Marked first, so that the workers post nothing more for the peer; those with writes in flight
  // end when the endpoints are closed, all before this returns.
  transfers_.fail_peer(peer, reason);
  for (auto& worker : workers_) worker->close_link(peer);
  std::lock_guard lock(peers_mutex_);
  peers_.erase(peer);
}

// ---- what happened ---------------------------------------------------------------------------

std::vector<std::pair<std::string, uint64_t>> Engine::stats() const {
  std::vector<std::pair<std::string, uint64_t>> out;
#define FFI_TRANSPORT_READ(name) \
  out.emplace_back(#name, stats_.name.load(std::memory_order_relaxed));
  FFI_TRANSPORT_STATS(FFI_TRANSPORT_READ)
#undef FFI_TRANSPORT_READ
  out.emplace_back("steps_live", plans_.live());
  uint64_t held = 0;
  for (const auto& worker : workers_) held += worker->staged_bytes();
  out.emplace_back("staging_bytes_held", held);
  return out;
}

std::vector<Engine::DomainCounters> Engine::domain_counters() const {
  std::vector<DomainCounters> out;
  for (size_t i = 0; i < workers_.size(); ++i) {
    const auto read = [](const std::atomic<uint64_t>& value) {
      return value.load(std::memory_order_relaxed);
    };
    const DomainStats& stats = workers_[i]->domain_stats();
    out.push_back({workers_[i]->domain().name(),
                   options_.domain_cpus.empty() ? std::vector<int>() : options_.domain_cpus[i],
                   read(stats.units_posted), read(stats.bytes_posted), read(stats.units_completed),
                   read(stats.bytes_completed), read(stats.units_counted)});
  }
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
