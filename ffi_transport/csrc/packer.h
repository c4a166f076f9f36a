// From a list of units to writes: merges units that are neighbours on both sides, packs several
// runs into one write where the provider scatters, and keeps every write within 4095 units and
// 1 MiB (R1). Counts are in units, so no choice made here changes what the receiver waits for.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "fabric.h"
#include "status.h"

namespace ffi_transport {

constexpr uint64_t kMaxWriteBytes = 1 << 20;

// Where one page's part lies on each side; page p of a side starts at p * its page bytes.
struct PageUnit {
  uint64_t source_page_bytes = 0;
  uint64_t source_offset = 0;
  uint64_t destination_page_bytes = 0;
  uint64_t destination_offset = 0;
  uint64_t length = 0;
};

struct PageLists {
  std::vector<uint32_t> source;
  std::vector<uint32_t> destination;
};

// One unit: offsets into the two regions.
struct Unit {
  uint64_t source = 0;
  uint64_t destination = 0;
  uint64_t length = 0;
};

// A lazily evaluated list of units: of pages, or of a range.
class UnitList {
 public:
  // Checks that the lists match, that a unit is not empty and within kMaxWriteBytes, and that
  // every page lies within its region.
  static Result<UnitList> pages(std::shared_ptr<const PageLists> lists, const PageUnit& unit,
                                uint64_t source_length, uint64_t destination_length);
  // `units` units that together are one range: unit i of n is [i * length / n, (i + 1) * length /
  // n).
  static Result<UnitList> range(uint64_t source_offset, uint64_t destination_offset,
                                uint64_t length, uint64_t units, uint64_t source_length,
                                uint64_t destination_length);

  size_t size() const { return count_; }
  // How long a unit is; of a range's, the longest.
  uint64_t unit_bytes() const {
    return lists_ || count_ == 0 ? unit_.length : (unit_.length + count_ - 1) / count_;
  }
  Unit at(size_t index) const;

 private:
  std::shared_ptr<const PageLists> lists_;  // null: a range
  PageUnit unit_;
  size_t count_ = 0;
};

struct PackedWrite {
  struct Piece {
    uint64_t source = 0;
    uint64_t destination = 0;
    uint64_t length = 0;
  };
  std::array<Piece, kMaxPieces> pieces;
  size_t piece_count = 0;
  uint32_t weight = 0;
  uint64_t bytes = 0;
};

// Packs units [*cursor, end) into one write and moves the cursor; *cursor < end is required. The
// write keeps within max_pieces and max_bytes (a domain's limits) unless its first unit alone does
// not.
PackedWrite pack_next(const UnitList& units, size_t* cursor, size_t end, size_t max_pieces,
                      uint64_t max_bytes = kMaxWriteBytes);

}  // namespace ffi_transport
