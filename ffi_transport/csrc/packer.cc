#include "packer.h"

#include <algorithm>
#include <string>

#include "immediate.h"

namespace ffi_transport {
namespace {

Status outside(const char* side, uint64_t offset, uint64_t length, uint64_t region) {
  return Status(Code::kInvalid, std::string(side) + " bytes " + std::to_string(offset) + " to " +
                                    std::to_string(offset + length) +
                                    " lie outside their region of " + std::to_string(region) +
                                    " bytes");
}

// Overflow-safe: is [offset, offset + length) within a region of `region` bytes?
bool within(uint64_t offset, uint64_t length, uint64_t region) {
  return offset <= region && length <= region - offset;
}

Status check_pages(const char* side, const std::vector<uint32_t>& pages, uint64_t page_bytes,
                   uint64_t offset, uint64_t length, uint64_t region) {
  if (page_bytes == 0 || page_bytes > (1ull << 31)) {
    return Status(Code::kInvalid, std::string(side) + "_page_bytes is " +
                                      std::to_string(page_bytes) + ", not in 1..2^31");
  }
  if (!within(offset, length, page_bytes)) {
    return Status(Code::kInvalid, std::string(side) + "_offset " + std::to_string(offset) +
                                      " + length " + std::to_string(length) +
                                      " exceeds the page of " + std::to_string(page_bytes) +
                                      " bytes");
  }
  if (pages.empty()) return {};
  const uint64_t last = *std::max_element(pages.begin(), pages.end());
  // No overflow: the page number has 32 bits and the page at most 2^31 bytes.
  const uint64_t start = last * page_bytes + offset;
  if (!within(start, length, region)) {
    Status status = outside(side, start, length, region);
    return Status(Code::kInvalid,
                  std::string(side) + " page " + std::to_string(last) + ": " + status.text());
  }
  return {};
}

}  // namespace

Result<UnitList> UnitList::pages(std::shared_ptr<const PageLists> lists, const PageUnit& unit,
                                 uint64_t source_length, uint64_t destination_length) {
  if (lists->source.size() != lists->destination.size()) {
    return Status(Code::kInvalid, "source_pages has " + std::to_string(lists->source.size()) +
                                      " pages, destination_pages " +
                                      std::to_string(lists->destination.size()));
  }
  if (unit.length == 0 || unit.length > kMaxWriteBytes) {
    return Status(Code::kInvalid, "a unit of " + std::to_string(unit.length) +
                                      " bytes: allowed are 1 to " + std::to_string(kMaxWriteBytes) +
                                      "; plan a larger page as several units");
  }
  if (Status status = check_pages("source", lists->source, unit.source_page_bytes,
                                  unit.source_offset, unit.length, source_length);
      !status.ok()) {
    return status;
  }
  if (Status status = check_pages("destination", lists->destination, unit.destination_page_bytes,
                                  unit.destination_offset, unit.length, destination_length);
      !status.ok()) {
    return status;
  }
  UnitList list;
  list.count_ = lists->source.size();
  list.lists_ = std::move(lists);
  list.unit_ = unit;
  return list;
}

Result<UnitList> UnitList::range(uint64_t source_offset, uint64_t destination_offset,
                                 uint64_t length, uint64_t units, uint64_t source_length,
                                 uint64_t destination_length) {
  if (!within(source_offset, length, source_length)) {
    return outside("source", source_offset, length, source_length);
  }
  if (!within(destination_offset, length, destination_length)) {
    return outside("destination", destination_offset, length, destination_length);
  }
  const uint64_t fewest = length / kMaxWriteBytes + (length % kMaxWriteBytes != 0);
  if (units == 0 || length < units || fewest > units) {
    return Status(Code::kInvalid, std::to_string(length) + " bytes as " + std::to_string(units) +
                                      " units: a unit has 1 to " + std::to_string(kMaxWriteBytes) +
                                      " bytes");
  }
  UnitList list;
  list.count_ = units;
  list.unit_.source_offset = source_offset;
  list.unit_.destination_offset = destination_offset;
  list.unit_.length = length;
  return list;
}

Unit UnitList::at(size_t index) const {
  if (lists_) {
    return Unit{
        lists_->source[index] * unit_.source_page_bytes + unit_.source_offset,
        lists_->destination[index] * unit_.destination_page_bytes + unit_.destination_offset,
        unit_.length};
  }
  // The split of the remainder keeps the products small.
  const auto cut = [this](uint64_t i) {
    return unit_.length / count_ * i + unit_.length % count_ * i / count_;
  };
  const uint64_t from = cut(index), to = cut(index + 1);
  return Unit{unit_.source_offset + from, unit_.destination_offset + from, to - from};
}

PackedWrite pack_next(const UnitList& units, size_t* cursor, size_t end, size_t max_pieces,
                      uint64_t max_bytes) {
  PackedWrite write;
  max_pieces = std::clamp<size_t>(max_pieces, 1, kMaxPieces);
  max_bytes = std::min(max_bytes, kMaxWriteBytes);
  for (; *cursor < end; ++*cursor) {
    const Unit unit = units.at(*cursor);
    const bool first = write.piece_count == 0;
    if (!first &&
        (write.bytes + unit.length > max_bytes || write.weight == ImmediateCodec::kMaxWeight)) {
      break;
    }
    PackedWrite::Piece* last = first ? nullptr : &write.pieces[write.piece_count - 1];
    if (last && last->source + last->length == unit.source &&
        last->destination + last->length == unit.destination) {
      last->length += unit.length;
    } else if (write.piece_count < max_pieces) {
      write.pieces[write.piece_count++] = {unit.source, unit.destination, unit.length};
    } else {
      break;
    }
    write.bytes += unit.length;
    ++write.weight;
  }
  return write;
}

}  // namespace ffi_transport
