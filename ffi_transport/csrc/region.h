// Registered memory: ours (Region) and what a peer announced (RemoteRegion).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fabric.h"
#include "mirror.h"
#include "status.h"

namespace ffi_transport {

constexpr size_t kMaxDomains = 64;  // of one engine; a set of them is a 64-bit mask

// The set of the domains that `domains` (elements with a member `domain`) names.
template <class Domains>
uint64_t domain_mask(const Domains& domains) {
  uint64_t mask = 0;
  for (const auto& one : domains) mask |= 1ull << one.domain;
  return mask;
}

// How peers reach a region, and how it is written from.
enum class MemoryMode : uint8_t {
  kHost,    // memory of this process
  kDirect,  // a device's, which the NIC reads and writes itself
  kStaged,  // a device's, which it cannot: copies go through host memory
};

struct Region {
  struct Access {
    uint32_t domain = 0;  // index among the engine's
    std::unique_ptr<Registration> registration;
  };
  int64_t id = 0;
  uint64_t address = 0;  // of the memory itself, be it a device's
  uint64_t length = 0;
  int device = -1;  // the CUDA ordinal, -1 for host memory
  MemoryMode mode = MemoryMode::kHost;
  std::string why_staged;  // and not direct
  // Staged: what is registered and announced in its place; it outlives its registrations below.
  std::unique_ptr<Mirror> mirror;
  std::vector<Access> domains;  // those that it is registered with, ascending; at least one
  // Writes that read from it right now, and the mark that no more may begin. A poster counts
  // itself in and then reads the mark; deregister sets the mark and then reads the count; both
  // sequentially consistent, so that one of them sees the other.
  std::atomic<int64_t> in_flight{0};
  std::atomic<bool> closed{false};
  // Of those in flight, copies out of a staged region: they end by themselves.
  std::atomic<int64_t> copies{0};

  bool begin() {
    in_flight.fetch_add(1, std::memory_order_seq_cst);
    if (!closed.load(std::memory_order_seq_cst)) return true;
    end();
    return false;
  }
  void end() { in_flight.fetch_sub(1, std::memory_order_release); }
  bool begin_copy() {
    copies.fetch_add(1, std::memory_order_seq_cst);
    if (begin()) return true;
    copies.fetch_sub(1, std::memory_order_relaxed);
    return false;
  }
  void end_copy() {
    end();
    copies.fetch_sub(1, std::memory_order_seq_cst);
  }
  uint64_t domain_set() const { return domain_mask(domains); }
};
using RegionPtr = std::shared_ptr<Region>;

// What travels to a peer: little-endian length (u64) and number of domains (u32), then of each
// domain its index at its owner (u32), key (u64) and base (u64); the indices ascend.
struct RemoteRegion {
  struct Access {
    uint32_t domain = 0;
    uint64_t key = 0;
    uint64_t base = 0;
  };
  uint64_t length = 0;
  std::vector<Access> domains;

  uint64_t domain_set() const { return domain_mask(domains); }

  std::string encode() const {
    std::string out(kFixedBytes + kAccessBytes * domains.size(), '\0');
    const auto count = static_cast<uint32_t>(domains.size());
    std::memcpy(out.data(), &length, 8);
    std::memcpy(out.data() + 8, &count, 4);
    char* at = out.data() + kFixedBytes;
    for (const Access& access : domains) {
      std::memcpy(at, &access.domain, 4);
      std::memcpy(at + 4, &access.key, 8);
      std::memcpy(at + 12, &access.base, 8);
      at += kAccessBytes;
    }
    return out;
  }

  static Result<RemoteRegion> decode(std::string_view bytes) {
    RemoteRegion region;
    uint32_t count = 0;
    if (bytes.size() >= kFixedBytes) {
      std::memcpy(&region.length, bytes.data(), 8);
      std::memcpy(&count, bytes.data() + 8, 4);
    }
    if (count == 0 || count > kMaxDomains ||
        bytes.size() != kFixedBytes + kAccessBytes * size_t{count}) {
      return Status(Code::kProtocol, "a region descriptor of " + std::to_string(bytes.size()) +
                                         " bytes is not one of ours");
    }
    region.domains.resize(count);
    const char* at = bytes.data() + kFixedBytes;
    for (size_t i = 0; i < count; ++i, at += kAccessBytes) {
      Access& access = region.domains[i];
      std::memcpy(&access.domain, at, 4);
      std::memcpy(&access.key, at + 4, 8);
      std::memcpy(&access.base, at + 12, 8);
      if (access.domain >= kMaxDomains ||
          (i > 0 && access.domain <= region.domains[i - 1].domain)) {
        return Status(Code::kProtocol, "a region descriptor with domain " +
                                           std::to_string(access.domain) + " in place " +
                                           std::to_string(i) + ": domains are 0 to " +
                                           std::to_string(kMaxDomains - 1) + " and ascend");
      }
    }
    return region;
  }

 private:
  static constexpr size_t kFixedBytes = 12;
  static constexpr size_t kAccessBytes = 20;
};
using RemoteRegionPtr = std::shared_ptr<const RemoteRegion>;

}  // namespace ffi_transport
