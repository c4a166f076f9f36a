// The libfabric implementation of Fabric: chooses a provider by what it is capable of.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "fabric.h"

namespace ffi_transport {

struct OfiOptions {
  std::string provider = "auto";  // auto, efa, verbs, tcp, net, tcp;ofi_rxm
  std::string bind = "127.0.0.1";
  std::string library_path;
  bool software_only = false;  // for control: a provider with IP addresses
};

Result<std::unique_ptr<Fabric>> open_ofi(const OfiOptions& options);

}  // namespace ffi_transport
