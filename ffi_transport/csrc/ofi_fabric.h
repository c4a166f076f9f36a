// The libfabric implementation of Fabric: chooses a provider by what it is capable of.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fabric.h"

namespace ffi_transport {

// Whether a provider shall reach device memory (FI_HMEM), if it can: none, only one of hardware, or
// any.
enum class DeviceMemoryWish : uint8_t { kNone, kHardware, kAny };

struct OfiOptions {
  std::string provider = "auto";  // auto, efa, verbs, tcp, net, tcp;ofi_rxm
  std::string bind = "127.0.0.1";
  std::string library_path;
  bool software_only = false;  // for control: a provider with IP addresses
  DeviceMemoryWish device_memory = DeviceMemoryWish::kNone;
};

Result<std::unique_ptr<Fabric>> open_ofi(const OfiOptions& options);

}  // namespace ffi_transport
