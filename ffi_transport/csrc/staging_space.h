// Who may use which bytes of a bounded buffer: room for copies on their way from a device to peers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

namespace ffi_transport {

// Rules, so that a peer that takes nothing (until it is noticed as dead) does not keep the others
// from sending:
//  - an owner that holds something gets no more than its share, the capacity over one more than the
//    owners that hold something: room is left for one that comes;
//  - who finds no room is first in line: nobody else gets any until it has it, leaves, or has come
//    to hold its share. So a large piece is not starved by small ones that fit in between.
// Belongs to one thread.
class StagingSpace {
 public:
  explicit StagingSpace(uint64_t capacity);

  // The offset of `bytes` for `owner`; none when there is no room for it now.
  std::optional<uint64_t> take(int64_t owner, uint64_t bytes);
  void give_back(int64_t owner, uint64_t offset, uint64_t bytes);
  // The owner waits for no room any more.
  void leave(int64_t owner);

  uint64_t capacity() const { return capacity_; }
  uint64_t used() const { return used_; }
  uint64_t held(int64_t owner) const;

 private:
  bool over_share(int64_t owner, uint64_t bytes) const;

  const uint64_t capacity_;
  uint64_t used_ = 0;
  std::map<uint64_t, uint64_t> free_;  // length by offset; no two touch
  std::map<int64_t, uint64_t> held_;   // of owners that hold something
  std::optional<int64_t> first_in_line_;
};

}  // namespace ffi_transport
