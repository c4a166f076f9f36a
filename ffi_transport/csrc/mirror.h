// The host mirror of device memory that the NIC cannot reach: what peers write instead of it. A
// page's bytes land here and are then copied into the device (arrivals.h).
//
// A mirror is as long as the device's region, so that offsets are the same in both, but it is only
// address space: the system commits memory where bytes land, and takes it back when they have been
// copied. A page that a revoked request leaves here is plain memory that no device sees.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "status.h"

namespace ffi_transport {

class Mirror {
 public:
  // `give_back`: whether `discard` may take pages away. Not where the provider pins registered
  // memory: a NIC would go on writing into pages that the process no longer sees.
  static Result<std::unique_ptr<Mirror>> create(uint64_t length, bool give_back);
  ~Mirror();
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;

  char* address() const { return address_; }
  uint64_t length() const { return length_; }

  // Gives the memory of these bytes back to the system; they read as zeros from then on. Only whole
  // pages of the system's: what shares one with its neighbours stays, since a neighbour may be
  // another request's and not copied yet.
  void discard(uint64_t offset, uint64_t length);
  // The mapping outlives this object, to the end of the process: a device may still read it. False
  // if that was said before.
  bool keep() { return !kept_.exchange(true); }

 private:
  Mirror(char* address, uint64_t length, bool give_back)
      : address_(address), length_(length), give_back_(give_back) {}

  char* const address_;
  const uint64_t length_;
  const bool give_back_;
  std::atomic<bool> kept_{false};
};

}  // namespace ffi_transport
