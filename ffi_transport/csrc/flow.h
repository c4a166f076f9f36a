// Fair sharing of a domain between peers (R14): each peer has a window of bytes and posts in
// flight, and peers with work take turns measured in bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace ffi_transport {

class FlowWindow {
 public:
  FlowWindow(uint64_t max_bytes, uint32_t max_posts)
      : max_bytes_(max_bytes), max_posts_(max_posts) {}
  // A write larger than the whole window goes alone, else it would never go. A job that is spread
  // over `domains` of them may use a share of the bytes; posts fill a queue that each has for
  // itself.
  bool admits(uint64_t bytes, size_t domains = 1) const {
    return posts_ == 0 || (posts_ < max_posts_ && bytes_ + bytes <= max_bytes_ / domains);
  }
  void take(uint64_t bytes) {
    bytes_ += bytes;
    ++posts_;
  }
  void give_back(uint64_t bytes) {
    bytes_ -= bytes;
    --posts_;
  }
  uint64_t bytes() const { return bytes_; }
  uint32_t posts() const { return posts_; }

 private:
  uint64_t max_bytes_;
  uint32_t max_posts_;
  uint64_t bytes_ = 0;
  uint32_t posts_ = 0;
};

// Deficit round robin over queues. A Queue offers
//   uint64_t next_bytes()   size of the write at its head; 0: nothing that could go now
//   bool post_next()        posts it; false: the provider refused, try again later
//   uint64_t credit         what is left of its turns, kept here
// so a queue of small writes and one of large writes get the same bytes per round.
inline constexpr uint64_t kTurnBytes = 256 << 10;

template <class Queue>
class ByteTurns {
 public:
  // One round over all queues, starting after the one that was served first last time. Returns
  // whether anything was posted.
  template <class Container>
  bool round(Container& queues) {
    const size_t count = queues.size();
    if (count == 0) return false;
    bool posted = false;
    const size_t start = first_++ % count;
    for (size_t i = 0; i < count; ++i) posted |= turn(*queues[(start + i) % count]);
    return posted;
  }

 private:
  bool turn(Queue& queue) {
    uint64_t bytes = queue.next_bytes();
    if (bytes == 0) {
      queue.credit = 0;  // an idle or blocked peer saves nothing up
      return false;
    }
    // Bounded, so that a peer that the provider refuses does not save turns up either.
    queue.credit = std::min(queue.credit + kTurnBytes, std::max(bytes, 2 * kTurnBytes));
    bool posted = false;
    while (bytes != 0 && bytes <= queue.credit) {
      if (!queue.post_next()) break;
      posted = true;
      queue.credit -= bytes;
      bytes = queue.next_bytes();
    }
    return posted;
  }

  size_t first_ = 0;
};

}  // namespace ffi_transport
