// How a job's units are dealt to domains (NICs), whatever their numbers on the two sides (M22).
//
// The units are cut into one run for each of the source's M domains and, on their own, into one run
// for each of the destination's N; a lane is where two runs overlap, so there are at most M + N - 1
// of them, and with M = N lane k goes from the k-th to the k-th domain (the same rail). A unit is
// never split, so the lanes change no count (R1).
//
// Bound: of everything dealt to one peer between the same two sets of domains, the bytes of any two
// domains of a side differ by at most the longest unit; with units of one size, their numbers of
// units by at most 1. Over several peers or sets the bounds add up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "region.h"

namespace ffi_transport {

// Units [begin, end), from the `source`-th domain of the source region to the `remote`-th of the
// remote one.
struct Lane {
  size_t source = 0;
  size_t remote = 0;
  size_t begin = 0;
  size_t end = 0;
};

// What a transfer knows about its peer's domains: how many there are, and who had the remainders.
class PeerLanes {
 public:
  // `rotation` (such as the peer's number) says which domain gets the first remainder, so that the
  // first one does not get those of all peers.
  PeerLanes(size_t domains, uint64_t rotation) : domains_(domains), rotation_(rotation) {}

  size_t domains() const { return domains_; }
  // Deals `total` units of `unit_bytes` each. From any thread.
  std::vector<Lane> deal(const Region& source, const RemoteRegion& remote, size_t total,
                         uint64_t unit_bytes);

 private:
  // Bytes that each domain had beyond the one that had least.
  using Loads = std::vector<uint64_t>;
  std::vector<size_t> shares(Loads* loads, size_t total, uint64_t unit_bytes) const;

  const size_t domains_;
  const uint64_t rotation_;
  std::mutex mutex_;
  std::map<std::pair<uint64_t, uint64_t>, std::pair<Loads, Loads>> loads_;  // by both sets
};

}  // namespace ffi_transport
