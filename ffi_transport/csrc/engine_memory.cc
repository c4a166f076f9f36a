// The engine's memory: which way a region is registered, and its end.
#include <algorithm>
#include <chrono>
#include <limits>
#include <thread>

#include "device_lane.h"
#include "device_memory.h"
#include "engine.h"

namespace ffi_transport {
namespace {

// How long deregister waits for copies out of a device, which end by themselves.
constexpr auto kCopiesPatience = std::chrono::seconds(5);

// Whether registering memory keeps its pages where they are, for a NIC.
bool pins_memory(const std::string& provider) { return provider == "efa" || provider == "verbs"; }

}  // namespace

Result<std::vector<uint32_t>> Engine::choose_domains(
    std::optional<std::vector<int64_t>> wanted) const {
  std::vector<uint32_t> out;
  if (!wanted) {
    for (size_t i = 0; i < workers_.size(); ++i) out.push_back(static_cast<uint32_t>(i));
    return out;
  }
  if (wanted->empty()) return Status(Code::kInvalid, "domains: a region needs at least one");
  // Ascending, so that two regions with the same domains pair them up alike.
  std::ranges::sort(*wanted);
  for (const int64_t domain : *wanted) {
    if (domain < 0 || domain >= static_cast<int64_t>(workers_.size())) {
      return Status(Code::kInvalid, "domains: " + std::to_string(domain) + " is not in 0.." +
                                        std::to_string(workers_.size() - 1));
    }
    if (!out.empty() && out.back() == domain) {
      return Status(Code::kInvalid, "domains: " + std::to_string(domain) + " is there twice");
    }
    out.push_back(static_cast<uint32_t>(domain));
  }
  return out;
}

Result<RegionPtr> Engine::register_memory(uint64_t address, uint64_t length,
                                          std::optional<std::vector<int64_t>> wanted,
                                          std::optional<int> device) {
  if (Status status = check_open(); !status.ok()) return status;
  if (address == 0 || length == 0) {
    return Status(Code::kInvalid, "a region needs an address and a length, not " +
                                      std::to_string(address) + " and " + std::to_string(length));
  }
  if (length > std::numeric_limits<uint64_t>::max() - address) {
    return Status(Code::kInvalid, "length: " + std::to_string(length) + " bytes at " +
                                      std::to_string(address) + " end beyond all memory");
  }
  auto domains = choose_domains(std::move(wanted));
  if (!domains.ok()) return domains.status();
  auto region = std::make_shared<Region>();
  region->address = address;
  region->length = length;
  if (device) region->device = *device;
  Status status = device ? register_device(region.get(), *domains)
                         : register_host(region.get(), *domains, address);
  if (!status.ok()) return status;
  std::lock_guard lock(regions_mutex_);
  region->id = next_region_++;
  regions_[region->id] = region;
  return region;
}

Status Engine::register_host(Region* region, const std::vector<uint32_t>& domains,
                             uint64_t address) {
  for (const uint32_t domain : domains) {
    auto registration = workers_[domain]->domain().register_memory(reinterpret_cast<void*>(address),
                                                                   region->length);
    if (!registration.ok()) return registration.status();
    region->domains.push_back({domain, registration.take()});
  }
  return {};
}

Status Engine::register_device(Region* region, const std::vector<uint32_t>& domains) {
  auto device = CudaDevice::open(region->device);
  if (!device.ok()) return device.status();
  if (Status status = check_owner(**device, region->address, region->length); !status.ok())
    return status;
  if (options_.device_memory == DeviceMemory::kStaged) {
    region->why_staged = "device_memory is \"staged\"";
  } else {
    Status status = register_direct(**device, region, domains);
    if (status.ok()) {
      region->mode = MemoryMode::kDirect;
      bump(stats_.regions_direct);
      return {};
    }
    if (options_.device_memory == DeviceMemory::kDirect) return status;
    region->why_staged = status.text();
  }
  auto mirror = Mirror::create(region->length, !pins_memory(provider()));
  if (!mirror.ok()) return mirror.status();
  region->mirror = mirror.take();
  Status status =
      register_host(region, domains, reinterpret_cast<uint64_t>(region->mirror->address()));
  if (!status.ok()) return status;
  region->mode = MemoryMode::kStaged;
  bump(stats_.regions_staged);
  return {};
}

// With a dma-buf, which needs no module of the NIC driver's beside the kernel; else by the address,
// which the provider has to know as CUDA's.
Status Engine::register_direct(const CudaDevice& device, Region* region,
                               const std::vector<uint32_t>& domains) {
  bool dmabuf_taken = true;
  for (const uint32_t domain : domains) {
    Domain& one = workers_[domain]->domain();
    if (!one.limits().device_memory) {
      Status::Detail detail;
      detail.text = "provider " + provider() + " reaches no device memory on domain " + one.name() +
                    " (it offers no FI_HMEM)";
      detail.missing = "FI_HMEM";
      return Status(Code::kUnavailable, std::move(detail));
    }
    dmabuf_taken = dmabuf_taken && one.limits().dmabuf;
  }
  // What peers write there must be made visible to the device before it is read (R17).
  if (const auto flush = DeviceLane::needs_flush(device); !flush.ok()) return flush.status();
  const auto attempt = [&](const DeviceRange& range) -> Status {
    region->domains.clear();
    for (const uint32_t domain : domains) {
      auto registration = workers_[domain]->domain().register_device_memory(range);
      if (!registration.ok()) {
        region->domains.clear();
        return registration.status();
      }
      region->domains.push_back({domain, registration.take()});
    }
    return {};
  };
  DeviceRange range{region->address, region->length, region->device};
  std::string first;
  if (dmabuf_taken) {
    auto dmabuf = DmaBuf::open(device, region->address, region->length);
    Status status = dmabuf.status();
    if (status.ok()) {
      range.dmabuf = dmabuf->fd();
      range.dmabuf_base = dmabuf->base();
      status = attempt(range);
      if (status.ok()) return status;
    }
    first = "by dma-buf: " + status.text() + "; ";
    range.dmabuf = -1;
  }
  Status status = attempt(range);
  if (status.ok()) return status;
  return Status(Code::kRegistration, "CUDA device " + std::to_string(region->device) +
                                         "'s memory cannot be registered: " + first +
                                         "by address: " + status.text());
}

// Before the first write from it, by whoever asks for that: who only receives pins no memory.
Status Engine::open_rings(const Region& region) {
  if (region.mode != MemoryMode::kStaged) return {};
  std::lock_guard lock(rings_mutex_);
  for (const Region::Access& access : region.domains) {
    const std::pair<int, uint32_t> place{region.device, access.domain};
    if (rings_.contains(place)) continue;
    auto device = CudaDevice::open(region.device);
    if (!device.ok()) return device.status();
    auto ring = StagingRing::open(device.take(), workers_[access.domain]->domain(),
                                  options_.staging_bytes / region.domains.size());
    if (!ring.ok()) return ring.status();
    Status status = workers_[access.domain]->add_ring(ring.take());
    if (!status.ok()) return status;
    rings_.insert(place);
  }
  return {};
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
  auto found = find_region(id);
  if (!found.ok()) return found.status();
  Region& region = **found;
  region.closed.store(true, std::memory_order_seq_cst);
  const auto deadline = Clock::now() + kCopiesPatience;
  while (region.copies.load(std::memory_order_seq_cst) > 0 && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  if (const int64_t flying = region.in_flight.load(std::memory_order_seq_cst); flying > 0) {
    region.closed.store(false, std::memory_order_seq_cst);
    Status::Detail detail;
    detail.text = "region " + std::to_string(id) + " has " + std::to_string(flying) +
                  " writes or arrivals in flight: end or cancel their transfers, disarm its slots";
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
  for (const auto& [domain, registration] : (*region)->domains) {
    remote.domains.push_back({domain, registration->key(), registration->base()});
  }
  return remote.encode();
}

Result<std::pair<MemoryMode, std::string>> Engine::memory_mode(int64_t id) const {
  auto region = find_region(id);
  if (!region.ok()) return region.status();
  return std::pair((*region)->mode, (*region)->why_staged);
}

}  // namespace ffi_transport
