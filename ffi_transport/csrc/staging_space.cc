#include "staging_space.h"

namespace ffi_transport {
namespace {

// Pieces begin where a copy engine likes them to.
constexpr uint64_t kGrain = 256;

uint64_t rounded(uint64_t bytes) { return (bytes + kGrain - 1) / kGrain * kGrain; }

}  // namespace

StagingSpace::StagingSpace(uint64_t capacity) : capacity_(capacity / kGrain * kGrain) {
  if (capacity_ > 0) free_[0] = capacity_;
}

uint64_t StagingSpace::held(int64_t owner) const {
  const auto it = held_.find(owner);
  return it == held_.end() ? 0 : it->second;
}

bool StagingSpace::over_share(int64_t owner, uint64_t bytes) const {
  const auto it = held_.find(owner);
  // One piece is always allowed, else a share below its size would never let it go.
  if (it == held_.end()) return false;
  return it->second + bytes > capacity_ / (held_.size() + 1);
}

std::optional<uint64_t> StagingSpace::take(int64_t owner, uint64_t bytes) {
  bytes = rounded(bytes);
  if (over_share(owner, bytes)) {
    leave(owner);
    return std::nullopt;
  }
  if (first_in_line_ && *first_in_line_ != owner) return std::nullopt;
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const auto [offset, length] = *it;
    if (length < bytes) continue;
    free_.erase(it);
    if (length > bytes) free_[offset + bytes] = length - bytes;
    used_ += bytes;
    held_[owner] += bytes;
    first_in_line_.reset();
    return offset;
  }
  first_in_line_ = owner;
  return std::nullopt;
}

void StagingSpace::give_back(int64_t owner, uint64_t offset, uint64_t bytes) {
  bytes = rounded(bytes);
  used_ -= bytes;
  const auto holder = held_.find(owner);
  if ((holder->second -= bytes) == 0) held_.erase(holder);
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + bytes == next->first) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free_[offset] = bytes;
}

void StagingSpace::leave(int64_t owner) {
  if (first_in_line_ == owner) first_in_line_.reset();
}

}  // namespace ffi_transport
