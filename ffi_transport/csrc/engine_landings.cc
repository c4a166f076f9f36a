// The engine's counters where writes land in a device's memory: what must happen before a count is
// reported is found here and left to Arrivals.
#include <algorithm>

#include "engine.h"

namespace ffi_transport {

Result<std::vector<Landing>> Engine::find_landings(
    const std::vector<LandingRequest>& requests) const {
  std::vector<Landing> landings;
  for (const LandingRequest& request : requests) {
    std::vector<RegionPtr> regions;
    for (const int64_t id : request.regions) {
      auto region = find_region(id);
      if (!region.ok()) return region.status();
      regions.push_back(region.take());
    }
    auto landing = Landing::of_pages(std::move(regions), request.pages, request.page_bytes);
    if (!landing.ok()) return landing.status();
    landings.push_back(landing.take());
  }
  return landings;
}

Result<Arrivals*> Engine::arrivals() {
  std::lock_guard lock(arrivals_mutex_);
  if (Status status = check_open(); !status.ok()) return status;
  if (arrivals_ == nullptr) {
    arrivals_ = std::make_unique<Arrivals>(&counters_, &events_, &stats_,
                                           std::chrono::milliseconds(options_.arrival_timeout_ms));
    counters_.set_gate(arrivals_.get());
  }
  return arrivals_.get();
}

Status Engine::arm(int64_t slot, int64_t expected, bool adopt_early,
                   const std::vector<LandingRequest>& requests) {
  if (Status status = check_open(); !status.ok()) return status;
  auto landings = find_landings(requests);
  if (!landings.ok()) return landings.status();
  const auto in_host = [](const RegionPtr& region) { return region->mode == MemoryMode::kHost; };
  const bool all_in_host = std::ranges::all_of(*landings, [&](const Landing& landing) {
    return std::ranges::all_of(landing.regions, in_host);
  });
  if (all_in_host) return counters_.arm(slot, expected, adopt_early);
  auto to = arrivals();
  if (!to.ok()) return to.status();
  if (Status status = (*to)->expect(slot, landings.take()); !status.ok()) return status;
  Status status = counters_.arm(slot, expected, adopt_early);
  if (!status.ok()) {
    // Nothing of it was reached, so no copy has begun that this would wait for.
    [[maybe_unused]] const Status dropped = (*to)->drop(slot);
  }
  return status;
}

Status Engine::disarm(int64_t slot) {
  if (Status status = counters_.disarm(slot); !status.ok()) return status;
  Arrivals* from = nullptr;
  {
    std::lock_guard lock(arrivals_mutex_);
    from = arrivals_.get();
  }
  return from == nullptr ? Status() : from->drop(slot);
}

}  // namespace ffi_transport
