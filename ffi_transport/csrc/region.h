// Registered memory: ours (Region) and what a peer announced (RemoteRegion).
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fabric.h"
#include "status.h"

namespace ffi_transport {

struct Region {
  int64_t id = 0;
  uint64_t address = 0;
  uint64_t length = 0;
  std::vector<std::unique_ptr<Registration>> domains;  // one per domain of the engine
  // Writes that read from it right now, and the mark that no more may begin. A poster counts
  // itself in and then reads the mark; deregister sets the mark and then reads the count; both
  // sequentially consistent, so that one of them sees the other.
  std::atomic<int64_t> in_flight{0};
  std::atomic<bool> closed{false};

  bool begin() {
    in_flight.fetch_add(1, std::memory_order_seq_cst);
    if (!closed.load(std::memory_order_seq_cst)) return true;
    end();
    return false;
  }
  void end() { in_flight.fetch_sub(1, std::memory_order_release); }
};
using RegionPtr = std::shared_ptr<Region>;

// What travels to a peer: little-endian length, count of domains, then key and base of each.
struct RemoteRegion {
  struct Access {
    uint64_t key = 0;
    uint64_t base = 0;
  };
  uint64_t length = 0;
  std::vector<Access> domains;

  static constexpr size_t kMaxDomains = 64;

  std::string encode() const {
    std::string out(12 + 16 * domains.size(), '\0');
    const auto count = static_cast<uint32_t>(domains.size());
    std::memcpy(out.data(), &length, 8);
    std::memcpy(out.data() + 8, &count, 4);
    std::memcpy(out.data() + 12, domains.data(), 16 * domains.size());
    return out;
  }

  static Result<RemoteRegion> decode(std::string_view bytes) {
    RemoteRegion region;
    uint32_t count = 0;
    if (bytes.size() >= 12) {
      std::memcpy(&region.length, bytes.data(), 8);
      std::memcpy(&count, bytes.data() + 8, 4);
    }
    if (count == 0 || count > kMaxDomains || bytes.size() != 12 + 16 * size_t{count}) {
      return Status(Code::kProtocol, "a region descriptor of " + std::to_string(bytes.size()) +
                                         " bytes is not one of ours");
    }
    region.domains.resize(count);
    std::memcpy(region.domains.data(), bytes.data() + 12, 16 * size_t{count});
    return region;
  }
};
using RemoteRegionPtr = std::shared_ptr<const RemoteRegion>;

static_assert(sizeof(RemoteRegion::Access) == 16);

}  // namespace ffi_transport
