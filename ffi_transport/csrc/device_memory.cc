#include "device_memory.h"

#include <unistd.h>

#include <string>
#include <utility>

namespace ffi_transport {
namespace {

std::string name_of(const CudaDevice& device) {
  return "CUDA device " + std::to_string(device.ordinal());
}

}  // namespace

PageRange page_range(uint64_t address, uint64_t length, uint64_t page) {
  const uint64_t first = address / page * page;
  const uint64_t last = (address + length + page - 1) / page * page;
  return {first, last - first};
}

Result<DmaBuf> DmaBuf::open(const CudaDevice& device, uint64_t address, uint64_t length) {
  const CudaDriver& cuda = device.driver();
  auto offered = device.attribute(cuda::kAttributeDmaBuf);
  if (!offered.ok()) return offered.status();
  if (*offered == 0 || cuda.mem_get_handle_for_address_range == nullptr) {
    return Status(Code::kRegistration, name_of(device) + " or its driver has no dma-buf");
  }
  // The driver wants whole pages of the host's. An allocator's chunks are larger than its buffers,
  // so the rest of a page is some neighbour's; it is never addressed, as the registration's own
  // range is the buffer's.
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  const PageRange range = page_range(address, length, page);
  const CudaCurrent current(device);
  if (!current.status().ok()) return current.status();
  int fd = -1;
  const cuda::Error error = cuda.mem_get_handle_for_address_range(&fd, range.address, range.length,
                                                                  cuda::kRangeHandleDmaBuf, 0);
  Status status =
      cuda.check(error, name_of(device) + ": no dma-buf of this memory", Code::kRegistration);
  if (!status.ok()) return status;
  return DmaBuf(fd, range.address);
}

DmaBuf& DmaBuf::operator=(DmaBuf&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(base_, other.base_);
  return *this;
}

DmaBuf::~DmaBuf() {
  if (fd_ >= 0) ::close(fd_);
}

Status check_owner(const CudaDevice& device, uint64_t address, uint64_t length) {
  const CudaDriver& cuda = device.driver();
  const CudaCurrent current(device);
  if (!current.status().ok()) return current.status();
  for (const uint64_t byte : {address, address + length - 1}) {
    unsigned type = 0;
    int owner = -1;
    if (cuda.pointer_get_attribute(&type, cuda::kPointerMemoryType, byte) != cuda::kSuccess ||
        cuda.pointer_get_attribute(&owner, cuda::kPointerDeviceOrdinal, byte) != cuda::kSuccess) {
      if (byte == address) return {};
      return Status(Code::kInvalid, "length: " + std::to_string(length) +
                                        " bytes end beyond what was allocated on " +
                                        name_of(device));
    }
    if (type == cuda::kMemoryTypeHost) {
      return Status(Code::kInvalid,
                    "device: the address is the host's memory, not " + name_of(device) + "'s");
    }
    if (owner != device.ordinal()) {
      return Status(Code::kInvalid, "device: the memory is CUDA device " + std::to_string(owner) +
                                        "'s, not " + std::to_string(device.ordinal()) + "'s");
    }
  }
  return {};
}

}  // namespace ffi_transport
