#include <algorithm>
#include <map>
#include <numeric>
#include <random>

#include "check.h"
#include "immediate.h"
#include "packer.h"

using namespace ffi_transport;

namespace {

std::shared_ptr<const PageLists> lists(std::vector<uint32_t> source,
                                       std::vector<uint32_t> destination) {
  return std::make_shared<PageLists>(PageLists{std::move(source), std::move(destination)});
}

constexpr uint64_t kBig = 1ull << 40;

std::vector<PackedWrite> pack_all(const UnitList& units, size_t pieces) {
  std::vector<PackedWrite> writes;
  size_t cursor = 0;
  while (cursor < units.size()) {
    const size_t before = cursor;
    writes.push_back(pack_next(units, &cursor, units.size(), pieces));
    CHECK(cursor > before);
  }
  return writes;
}

}  // namespace

TEST(packer_merges_what_is_contiguous_on_both_sides) {
  std::vector<uint32_t> source(32), destination(32);
  std::iota(source.begin(), source.end(), 5);
  std::iota(destination.begin(), destination.end(), 100);
  auto units = UnitList::pages(lists(source, destination), {4096, 0, 4096, 0, 4096}, kBig, kBig);
  const auto writes = pack_all(*units, 1);
  CHECK_EQ(writes.size(), 1u);
  CHECK_EQ(writes[0].piece_count, 1u);
  CHECK_EQ(writes[0].weight, 32u);
  CHECK_EQ(writes[0].bytes, 32u * 4096);
  CHECK_EQ(writes[0].pieces[0].source, 5u * 4096);
  CHECK_EQ(writes[0].pieces[0].destination, 100u * 4096);
}

TEST(packer_does_not_merge_across_gaps) {
  // Contiguous pages, but the unit is only half of each page on the destination's side.
  auto units = UnitList::pages(lists({0, 1}, {0, 1}), {4096, 0, 8192, 4096, 4096}, kBig, kBig);
  CHECK_EQ(pack_all(*units, 1).size(), 2u);
  const auto packed = pack_all(*units, 2);
  CHECK_EQ(packed.size(), 1u);
  CHECK_EQ(packed[0].piece_count, 2u);
  CHECK_EQ(packed[0].pieces[1].destination, 8192u + 4096);
}

TEST(packer_keeps_the_limits_and_covers_every_unit_once) {
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    const size_t count = 1 + random() % 6000;
    const uint64_t length = 1 + random() % (round % 3 ? 600 : 300000);
    std::vector<uint32_t> source(count), destination(count);
    std::iota(source.begin(), source.end(), 0);
    std::iota(destination.begin(), destination.end(), 0);
    if (round % 2) {
      std::shuffle(source.begin(), source.end(), random);
      std::shuffle(destination.begin(), destination.end(), random);
    }
    const PageUnit unit{length, 0, length, 0, length};
    auto units = UnitList::pages(lists(source, destination), unit, kBig, kBig);
    std::map<uint64_t, uint64_t> covered;  // destination start -> source start
    uint64_t weight = 0;
    for (const PackedWrite& write : pack_all(*units, 1 + random() % 8)) {
      CHECK(write.weight >= 1 && write.weight <= ImmediateCodec::kMaxWeight);
      CHECK(write.bytes <= kMaxWriteBytes);
      uint64_t bytes = 0;
      for (size_t i = 0; i < write.piece_count; ++i) {
        const auto& piece = write.pieces[i];
        bytes += piece.length;
        CHECK_EQ(piece.length % length, 0u);  // a unit is never split
        for (uint64_t at = 0; at < piece.length; at += length) {
          CHECK(covered.emplace(piece.destination + at, piece.source + at).second);
        }
      }
      CHECK_EQ(bytes, write.bytes);
      CHECK_EQ(bytes, write.weight * length);
      weight += write.weight;
    }
    CHECK_EQ(weight, count);
    CHECK_EQ(weight, units->size());
    for (size_t i = 0; i < count; ++i) {
      CHECK_EQ(covered.at(destination[i] * length), source[i] * length);
    }
  }
}

TEST(packer_keeps_within_the_domains_limit) {
  std::vector<uint32_t> pages(64);
  std::iota(pages.begin(), pages.end(), 0);
  auto units = UnitList::pages(lists(pages, pages), {4096, 0, 4096, 0, 4096}, kBig, kBig);
  size_t cursor = 0, writes = 0;
  for (; cursor < units->size(); ++writes) {
    CHECK_EQ(pack_next(*units, &cursor, units->size(), 8, 10000).bytes, 8192u);
  }
  CHECK_EQ(writes, 32u);
  cursor = 0;  // a unit is never split: the caller sees that it does not fit
  CHECK_EQ(pack_next(*units, &cursor, units->size(), 8, 1000).bytes, 4096u);
  CHECK_EQ(cursor, 1u);
}

TEST(packer_cuts_a_range_by_bytes_and_units) {
  for (const auto& [length, count] : std::vector<std::pair<uint64_t, uint64_t>>{{1, 1},
                                                                                {1 << 20, 1},
                                                                                {(1 << 20) + 1, 2},
                                                                                {10 << 20, 10},
                                                                                {10 << 20, 37},
                                                                                {100000, 50000},
                                                                                {7 << 20, 20000}}) {
    auto units = UnitList::range(100, 200, length, count, kBig, kBig);
    CHECK_OK(units.status());
    uint64_t bytes = 0;
    CHECK_EQ(units->size(), count);
    for (size_t i = 0; i < units->size(); ++i) {
      const Unit unit = units->at(i);
      CHECK_EQ(unit.source, 100 + bytes);
      CHECK_EQ(unit.destination, 200 + bytes);
      CHECK(unit.length >= 1 && unit.length <= units->unit_bytes());
      bytes += unit.length;
    }
    CHECK_EQ(bytes, length);
    uint64_t packed = 0;
    for (const PackedWrite& write : pack_all(*units, 4)) {
      CHECK(write.bytes <= kMaxWriteBytes && write.weight <= ImmediateCodec::kMaxWeight);
      packed += write.weight;
    }
    CHECK_EQ(packed, count);
  }
}

TEST(packer_refuses_what_leaves_its_region) {
  const PageUnit unit{4096, 0, 4096, 0, 4096};
  CHECK_OK(UnitList::pages(lists({0, 9}, {3, 1}), unit, 10 * 4096, 4 * 4096).status());
  CHECK_FAILS(UnitList::pages(lists({0, 10}, {3, 1}), unit, 10 * 4096, 4 * 4096).status(),
              Code::kInvalid, "source page 10");
  CHECK_FAILS(UnitList::pages(lists({0, 9}, {4, 1}), unit, 10 * 4096, 4 * 4096).status(),
              Code::kInvalid, "destination page 4");
  CHECK_FAILS(UnitList::pages(lists({0}, {0, 1}), unit, kBig, kBig).status(), Code::kInvalid,
              "source_pages has 1");
  CHECK_FAILS(UnitList::pages(lists({0}, {0}), {4096, 4000, 4096, 0, 97}, kBig, kBig).status(),
              Code::kInvalid, "exceeds the page");
  CHECK_FAILS(UnitList::pages(lists({0}, {0}), {4096, 0, 4096, 0, 0}, kBig, kBig).status(),
              Code::kInvalid, "a unit of 0 bytes");
  CHECK_FAILS(
      UnitList::pages(lists({0}, {0}), {2 << 20, 0, 2 << 20, 0, 2 << 20}, kBig, kBig).status(),
      Code::kInvalid, "several units");
  CHECK_FAILS(UnitList::pages(lists({0}, {0}), {0, 0, 4096, 0, 1}, kBig, kBig).status(),
              Code::kInvalid, "source_page_bytes");
  // The largest page number times a large page must not wrap around into the region.
  CHECK_FAILS(
      UnitList::pages(lists({0xffffffff}, {0}), {1ull << 31, 0, 1 << 30, 0, 1}, 1 << 30, 1 << 30)
          .status(),
      Code::kInvalid, "source page 4294967295");
  CHECK_FAILS(UnitList::range(~0ull, 0, 2, 1, 100, 100).status(), Code::kInvalid, "source");
  CHECK_FAILS(UnitList::range(0, 99, 2, 1, 100, 100).status(), Code::kInvalid, "destination");
  CHECK_FAILS(UnitList::range(0, 0, 2 << 20, 1, kBig, kBig).status(), Code::kInvalid, "units");
  CHECK_FAILS(UnitList::range(0, 0, 10, 11, kBig, kBig).status(), Code::kInvalid, "units");
  CHECK_FAILS(UnitList::range(0, 0, 10, 0, kBig, kBig).status(), Code::kInvalid, "units");
  CHECK_FAILS(UnitList::range(0, 0, 0, 1, kBig, kBig).status(), Code::kInvalid, "units");
}
