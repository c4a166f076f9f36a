// A network inside the process, for unit tests and for one-process use. Bytes land when the target
// polls, as with the software providers of libfabric. It can delay operations by a seeded random
// number of polls, which also reorders them: nothing above may rely on order.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "fabric.h"

namespace ffi_transport {

struct LoopbackOptions {
  uint64_t seed = 0;
  uint32_t max_delay_polls = 0;  // 0: in order, at once
  size_t pieces = 4;
  size_t send_depth = 256;
  size_t max_write = 1ull << 40;
  // Plays a NIC that reaches device memory, which must then be memory of this process (a fake
  // driver's); with dma-bufs or without. Whether one takes a range, a test decides.
  bool device_memory = false;
  bool dmabuf = false;
  std::function<Status(const DeviceRange&)> take_device_memory;
};

std::unique_ptr<Fabric> make_loopback(const LoopbackOptions& options = {});

}  // namespace ffi_transport
