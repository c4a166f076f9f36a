// The transfer engine: what Python holds. It joins the layers below and owns their threads.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arrivals.h"
#include "control_channel.h"
#include "data_worker.h"
#include "event_queue.h"
#include "fabric.h"
#include "imm_counters.h"
#include "lanes.h"
#include "loopback.h"
#include "plan_table.h"
#include "region.h"
#include "slot_poller.h"
#include "stats.h"
#include "trace.h"
#include "transfer.h"
#include "trigger_hub.h"

namespace ffi_transport {

// How memory of a device is reached: by the NIC where it can, or through pinned memory.
enum class DeviceMemory : uint8_t { kAuto, kDirect, kStaged };

struct EngineOptions {
  std::string provider = "auto";
  std::string bind = "127.0.0.1";
  uint16_t control_port = 0;
  std::vector<std::string> domains;  // empty: one, the provider's first
  // The CPUs of each domain's thread: none at all, or one set per domain; an empty one pins
  // nothing.
  std::vector<std::vector<int>> domain_cpus;
  int spin_us = 50;
  uint64_t bytes_in_flight = 0;  // 0: what suits the provider
  uint32_t posts_in_flight = 128;
  int heartbeat_ms = 250;
  int peer_timeout_ms = 5000;
  uint32_t slot_bits = 20;
  std::string libfabric_path;
  DeviceMemory device_memory = DeviceMemory::kAuto;
  uint64_t staging_bytes = 64 << 20;  // of pinned memory for each device, over all its domains
  bool trace = false;
  LoopbackOptions loopback;  // tests delay and reorder with it
  size_t trigger_ring = TriggerHub::kRingCapacity;
  int arrival_timeout_ms = 10000;  // for a batch of a slot's copies into its devices (arrivals.h)
};

class Engine : private DataPlane {
 public:
  static Result<std::unique_ptr<Engine>> create(const EngineOptions& options,
                                                std::optional<std::string> hello);
  ~Engine() override;
  // Idempotent; joins all threads. How many mirrors the call leaves mapped for good, since copies
  // out of them have hung.
  uint64_t close();

  const std::string& provider() const { return data_fabric_->provider(); }
  std::string control_address() const { return control_->address(); }
  uint64_t epoch() const { return epoch_; }
  int index() const { return index_; }
  int event_fd() const { return events_.fd(); }

  // With these of the engine's domains, or with all. Peers write to it, and it is written from,
  // through them alone. `device` is the CUDA ordinal of a device whose memory it is.
  Result<RegionPtr> register_memory(uint64_t address, uint64_t length,
                                    std::optional<std::vector<int64_t>> domains = std::nullopt,
                                    std::optional<int> device = std::nullopt);
  // And, of a staged region, why it is not direct.
  Result<std::pair<MemoryMode, std::string>> memory_mode(int64_t region) const;
  Status deregister(int64_t region);
  Result<std::string> descriptor(int64_t region) const;

  Result<int64_t> connect(const std::string& address, double timeout_s);
  ControlChannel& control() { return *control_; }
  Status check_open() const;

  ImmCounters& counters() { return counters_; }

  // The same pages of several of this engine's regions, which the writes of a slot will fill.
  struct LandingRequest {
    std::vector<int64_t> regions;
    std::vector<uint32_t> pages;
    uint64_t page_bytes = 0;
  };
  // As ImmCounters::arm. With landings in a device's memory the count is reported once the device
  // can read them, or as ArrivalFailed.
  Status arm(int64_t slot, int64_t expected, bool adopt_early,
             const std::vector<LandingRequest>& landings);
  // When this returns ok nothing is written into a device for the slot any more.
  Status disarm(int64_t slot);

  Result<int64_t> open_transfer(int64_t peer, int64_t slot);
  Status write(int64_t transfer, int64_t region, uint64_t offset, const RemoteRegion& remote,
               uint64_t remote_offset, uint64_t length, uint64_t units);
  Status write_paged(int64_t transfer, int64_t region, const RemoteRegion& remote, PageLists pages,
                     const PageUnit& unit);
  Status seal(int64_t transfer);
  Status cancel(int64_t transfer);

  struct PlanRequest {
    int64_t transfer = 0;
    int ordinal = 0;
    int first_layer = 0;
    PageLists pages;
    PageUnit unit;
    std::vector<RemoteRegion> remotes;
  };
  // From now on triggers of these come through slots (slot_board.h); once, and before programs with
  // triggers run on a device.
  Status open_slots(const std::vector<int>& ordinals, int layers, bool device);
  Status set_source_region(int ordinal, int layer, int64_t region);
  Status add_plan(int64_t step, std::vector<int> ordinals, int layers,
                  std::vector<PlanRequest> writes, double timeout_s);
  Status drop_plan(int64_t step);

  std::vector<Event> poll(double timeout_s) { return events_.poll(timeout_s); }
  std::vector<std::pair<std::string, uint64_t>> stats() const;
  struct DomainCounters {
    std::string name;
    std::vector<int> cpus;  // none: not pinned
    uint64_t units_posted, bytes_posted, units_completed, bytes_completed, units_counted;
  };
  std::vector<DomainCounters> domain_counters() const;
  std::vector<TraceRecord> trace() const;

 private:
  explicit Engine(const EngineOptions& options);
  Status open(std::optional<std::string> hello);
  Result<RegionPtr> find_region(int64_t id) const;
  Result<std::vector<uint32_t>> choose_domains(std::optional<std::vector<int64_t>> wanted) const;
  Status register_host(Region* region, const std::vector<uint32_t>& domains, uint64_t address);
  Status register_device(Region* region, const std::vector<uint32_t>& domains);
  Status register_direct(const CudaDevice& device, Region* region,
                         const std::vector<uint32_t>& domains);
  Status open_rings(const Region& region);
  Status start_workers();
  static void check_remote(const TransferPtr& transfer, const RemoteRegion& remote);
  Status enqueue(int64_t transfer, RegionPtr source, RemoteRegionPtr remote, UnitList units);
  void distribute(Job job, bool on_first_worker);
  bool read_triggers();
  Result<std::vector<Landing>> find_landings(const std::vector<LandingRequest>& requests) const;
  Result<Arrivals*> arrivals();
  std::shared_ptr<SlotPoller> poller() const;

  // DataPlane, on the control thread
  Result<std::vector<std::string>> open_data(int64_t peer) override;
  Status connect_data(int64_t peer, const std::vector<std::string>& names) override;
  void close_data(int64_t peer, const std::string& reason) override;

  const EngineOptions options_;
  const uint64_t epoch_;
  int index_ = -1;
  std::atomic<bool> closed_{false};
  std::mutex close_mutex_;

  EventQueue events_;
  Stats stats_;
  std::atomic<uint64_t> trace_order_{1};
  ImmCounters counters_;
  TransferTable transfers_;
  PlanTable plans_;

  std::unique_ptr<Fabric> data_fabric_, control_fabric_;
  std::vector<std::unique_ptr<DataWorker>> workers_;  // one per domain
  std::unique_ptr<TriggerHub> hub_;
  mutable std::mutex poller_mutex_;
  std::shared_ptr<SlotPoller> poller_;  // none until open_slots
  std::unique_ptr<TraceLog> trigger_trace_;
  std::unique_ptr<ControlChannel> control_;

  std::mutex arrivals_mutex_;
  std::unique_ptr<Arrivals> arrivals_;  // none until a slot lands in a device's memory

  mutable std::mutex regions_mutex_;
  int64_t next_region_ = 1;
  std::unordered_map<int64_t, RegionPtr> regions_;

  std::mutex rings_mutex_;
  std::set<std::pair<int, uint32_t>> rings_;  // (device, domain) that have one

  mutable std::mutex peers_mutex_;
  std::unordered_map<int64_t, std::shared_ptr<PeerLanes>> peers_;  // those with data endpoints
};

}  // namespace ffi_transport
