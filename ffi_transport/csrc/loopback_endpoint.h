// An endpoint of the network inside the process (loopback.h): operations on their way and how they
// land.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <random>
#include <unordered_map>

#include "loopback.h"

namespace ffi_transport {

// The memory that peers may write into, by key. Shared by a domain, its endpoints and its
// registrations.
struct LoopbackMemory {
  struct Range {
    uint64_t address = 0;
    uint64_t length = 0;
  };
  std::mutex mutex;
  std::mt19937_64 keys{std::random_device{}()};
  std::unordered_map<uint64_t, Range> ranges;

  bool has(const void* descriptor) {
    std::lock_guard lock(mutex);
    return ranges.contains(reinterpret_cast<uint64_t>(descriptor));
  }
};

// On a port of the process's network; 0 is a free one. kUnavailable where it is in use.
Result<std::unique_ptr<Endpoint>> open_loopback_endpoint(std::shared_ptr<LoopbackMemory> memory,
                                                         const LoopbackOptions& options,
                                                         uint16_t port);

}  // namespace ffi_transport
