#include "lanes.h"

#include <algorithm>
#include <numeric>

namespace ffi_transport {

// How many units each domain gets: equal numbers, and one more for those that had least so far.
std::vector<size_t> PeerLanes::shares(Loads* loads, size_t total, uint64_t unit_bytes) const {
  const size_t count = loads->size();
  std::vector<size_t> out(count, total / count);
  const size_t more = total % count;
  if (more == 0) return out;
  std::vector<size_t> order(count);
  for (size_t i = 0; i < count; ++i) order[i] = (i + rotation_) % count;
  std::ranges::stable_sort(order, {}, [&](size_t domain) { return (*loads)[domain]; });
  for (size_t i = 0; i < more; ++i) {
    ++out[order[i]];
    (*loads)[order[i]] += unit_bytes;
  }
  const uint64_t least = *std::ranges::min_element(*loads);
  for (uint64_t& load : *loads) load -= least;
  return out;
}

std::vector<Lane> PeerLanes::deal(const Region& source, const RemoteRegion& remote, size_t total,
                                  uint64_t unit_bytes) {
  const size_t here = source.domains.size(), there = remote.domains.size();
  if (total == 0) return {};
  if (here == 1 && there == 1) return {{0, 0, 0, total}};
  std::vector<size_t> from, to;
  {
    std::lock_guard lock(mutex_);
    auto& [loads_here, loads_there] = loads_[{source.domain_set(), remote.domain_set()}];
    loads_here.resize(here);
    loads_there.resize(there);
    from = shares(&loads_here, total, unit_bytes);
    // With as many on both sides their loads are the same too, and so are the cuts: every lane
    // keeps to its rail.
    to = shares(&loads_there, total, unit_bytes);
  }
  std::vector<Lane> lanes;
  size_t i = 0, j = 0;
  for (size_t at = 0; at < total;) {
    while (from[i] == 0) ++i;
    while (to[j] == 0) ++j;
    const size_t run = std::min(from[i], to[j]);
    lanes.push_back({i, j, at, at + run});
    at += run;
    from[i] -= run;
    to[j] -= run;
  }
  return lanes;
}

}  // namespace ffi_transport
