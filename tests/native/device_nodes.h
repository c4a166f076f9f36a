// Engines with the fake driver's device memory, for tests.
#pragma once

#include <string>
#include <vector>

#include "engines.h"
#include "fake_driver.h"

namespace check {

using ffi_transport::DeviceMemory;

// "Device" memory of a node: other bytes than the node's own, registered for a device.
struct DeviceBuffer {
  Node& node;
  std::vector<char> memory;
  int64_t region = 0;

  DeviceBuffer(Node& owner, size_t bytes, int device = 0,
               std::optional<std::vector<int64_t>> domains = std::nullopt)
      : node(owner), memory(bytes) {
    randomize(&memory, static_cast<uint32_t>(bytes + device));
    auto made = node.engine->register_memory(address(), bytes, std::move(domains), device);
    CHECK_OK(made.status());
    region = (*made)->id;
  }
  // It outlives every copy from it, also of transfers that a test leaves behind.
  ~DeviceBuffer() { node.engine->close(); }
  uint64_t address() const { return reinterpret_cast<uint64_t>(memory.data()); }
};

inline size_t count_in_log(const std::string& words) {
  const std::string log = fake_cuda_log();
  size_t count = 0;
  for (size_t at = log.find(words); at != std::string::npos; at = log.find(words, at + 1)) ++count;
  return count;
}

}  // namespace check
