#include "mirror.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace ffi_transport {
namespace {

uint64_t system_page() {
  static const auto bytes = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

}  // namespace

Result<std::unique_ptr<Mirror>> Mirror::create(uint64_t length, bool give_back) {
  void* address = ::mmap(nullptr, length, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) {
    return Status(Code::kRegistration, "no address space for a host mirror of " +
                                           std::to_string(length) +
                                           " bytes: " + std::strerror(errno));
  }
  // A page that one huge page backs would bring its whole neighbourhood into memory with it.
  ::madvise(address, length, MADV_NOHUGEPAGE);
  return std::unique_ptr<Mirror>(new Mirror(static_cast<char*>(address), length, give_back));
}

Mirror::~Mirror() {
  if (!kept_) ::munmap(address_, length_);
}

void Mirror::discard(uint64_t offset, uint64_t length) {
  if (!give_back_) return;
  const uint64_t page = system_page();
  const uint64_t first = (offset + page - 1) / page * page;
  const uint64_t last = (offset + length) / page * page;
  if (first < last) ::madvise(address_ + first, last - first, MADV_DONTNEED);
}

}  // namespace ffi_transport
