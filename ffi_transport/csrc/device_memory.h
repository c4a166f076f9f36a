// Device memory as the kernel and NICs may be told of it.
#pragma once

#include <cstdint>

#include "cuda_driver.h"
#include "status.h"

namespace ffi_transport {

// The whole pages that hold [address, address + length).
struct PageRange {
  uint64_t address = 0;
  uint64_t length = 0;
};
PageRange page_range(uint64_t address, uint64_t length, uint64_t page);

// A dma-buf: a descriptor of device memory's pages that other drivers understand.
class DmaBuf {
 public:
  // Of the pages that hold the range. kRegistration when the device or the memory has none, such as
  // memory of cuMemCreate without gpuDirectRDMACapable.
  static Result<DmaBuf> open(const CudaDevice& device, uint64_t address, uint64_t length);
  DmaBuf() = default;
  DmaBuf(DmaBuf&& other) noexcept : fd_(other.fd_), base_(other.base_) { other.fd_ = -1; }
  DmaBuf& operator=(DmaBuf&& other) noexcept;
  ~DmaBuf();  // what a provider registered of it stays

  int fd() const { return fd_; }
  uint64_t base() const { return base_; }  // the device address at which it begins

 private:
  DmaBuf(int fd, uint64_t base) : fd_(fd), base_(base) {}

  int fd_ = -1;
  uint64_t base_ = 0;
};

// kInvalid if the driver knows the first byte or the last as another device's or the host's, or the
// first alone: then the range leaves what was allocated. Ok if it does not know the first at all:
// then its first copy says so. The ends are asked for, not an allocation's size, since one range
// may be mapped of several.
Status check_owner(const CudaDevice& device, uint64_t address, uint64_t length);

}  // namespace ffi_transport
