// What libfabric is told of memory to register. Its dma-buf interface came with version 1.20, and
// this is built against 1.17 too: so what is newer is declared here.
#pragma once

#include <rdma/fi_domain.h>

#include <cstddef>
#include <cstdint>

#include "fabric.h"

namespace ffi_transport {

// struct fi_mr_dmabuf: the region is [base + offset, base + offset + length).
struct OfiDmaBuf {
  int fd = -1;
  uint64_t offset = 0;
  size_t length = 0;
  void* base = nullptr;
};
inline constexpr uint64_t kOfiDmaBufFlag = 1ull << 40;            // FI_MR_DMABUF
inline constexpr uint32_t kOfiDmaBufVersion = FI_VERSION(1, 20);  // of the interface asked for
// FI_OPT_CUDA_API_PERMITTED, a bool; of version 1.18.
inline constexpr int kOfiCudaPermitted = 10;

// The arguments of fi_mr_regattr. The attributes point into the object itself.
class OfiMrRequest {
 public:
  OfiMrRequest(void* address, size_t length);
  explicit OfiMrRequest(const DeviceRange& range);
  OfiMrRequest(const OfiMrRequest&) = delete;
  OfiMrRequest& operator=(const OfiMrRequest&) = delete;

  fi_mr_attr& attributes() { return attributes_.known; }
  uint64_t flags() const { return flags_; }
  uint64_t address() const { return address_; }  // of the region, where peers use addresses
  size_t length() const { return length_; }

 private:
  // Later libraries read fields behind those that the headers know: zero says that they are unused.
  struct Attributes {
    fi_mr_attr known{};
    uint64_t newer[8] = {};
  };

  const uint64_t address_;
  const size_t length_;
  iovec range_{};
  OfiDmaBuf dmabuf_;
  Attributes attributes_;
  uint64_t flags_ = 0;
};

}  // namespace ffi_transport
