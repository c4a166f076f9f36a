// The room of a staging ring: nothing overlaps, nothing is lost, nobody waits for ever.
#include <random>
#include <vector>

#include "check.h"
#include "staging_space.h"

using ffi_transport::StagingSpace;

namespace {

constexpr uint64_t kMiB = 1 << 20;

struct Piece {
  int64_t owner;
  uint64_t offset, bytes;
};

}  // namespace

TEST(staging_space_never_hands_out_what_is_held) {
  std::mt19937 random(5);
  StagingSpace space(4 * kMiB);
  // Who holds each byte, counted one by one: the slow way that cannot be wrong.
  std::vector<int> holders(4 * kMiB);
  std::vector<Piece> held;
  int refused = 0;
  for (int turn = 0; turn < 3000; ++turn) {
    const int64_t owner = random() % 5;
    if (random() % 2 != 0 && !held.empty()) {
      const size_t index = random() % held.size();
      const Piece piece = held[index];
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(index));
      for (uint64_t i = 0; i < piece.bytes; ++i) --holders[piece.offset + i];
      space.give_back(piece.owner, piece.offset, piece.bytes);
    } else {
      const uint64_t bytes = 1 + random() % (random() % 4 != 0 ? 40'000 : kMiB);
      const auto offset = space.take(owner, bytes);
      if (!offset) {
        ++refused;
        continue;
      }
      CHECK(*offset + bytes <= space.capacity());
      for (uint64_t i = 0; i < bytes; ++i) CHECK_EQ(++holders[*offset + i], 1);
      held.push_back({owner, *offset, bytes});
    }
  }
  CHECK(refused > 0);
  for (const Piece& piece : held) space.give_back(piece.owner, piece.offset, piece.bytes);
  CHECK_EQ(space.used(), 0u);
  // All of it in one piece again.
  CHECK(space.take(9, 4 * kMiB).has_value());
}

TEST(staging_space_leaves_room_for_an_owner_that_comes) {
  StagingSpace space(8 * kMiB);
  uint64_t first = 0;
  while (space.take(1, kMiB)) ++first;
  CHECK_EQ(first, 4u);  // a half, as long as it is alone
  CHECK(space.take(2, kMiB).has_value());
  CHECK(space.take(2, kMiB).has_value());
  CHECK(!space.take(2, kMiB).has_value());  // a third would be 2.67
  CHECK(space.take(3, kMiB).has_value());
  // Over its share by far, as there are more owners now; it is not in line for it.
  CHECK(!space.take(1, kMiB).has_value());
  CHECK(space.take(4, kMiB).has_value());
}

TEST(staging_space_does_not_starve_a_large_piece) {
  StagingSpace space(4 * kMiB);
  std::vector<Piece> small;
  for (int64_t owner = 1; owner <= 16; ++owner) {
    const auto offset = space.take(owner, kMiB / 4);
    CHECK(offset.has_value());
    small.push_back({owner, *offset, kMiB / 4});
  }
  CHECK(!space.take(99, kMiB).has_value());
  // Every second one comes free: room enough for another small one, but the large one was first.
  for (size_t i = 0; i < small.size(); i += 2) {
    space.give_back(small[i].owner, small[i].offset, small[i].bytes);
    CHECK(!space.take(small[i].owner, kMiB / 4).has_value());
    CHECK(!space.take(99, kMiB).has_value());
  }
  space.give_back(small[1].owner, small[1].offset, small[1].bytes);
  CHECK(!space.take(99, kMiB).has_value());  // three quarters
  space.give_back(small[3].owner, small[3].offset, small[3].bytes);
  CHECK(space.take(99, kMiB).has_value());
  CHECK(space.take(1, kMiB / 4).has_value());
}

TEST(staging_space_forgets_who_stopped_waiting) {
  StagingSpace space(2 * kMiB);
  const auto half = space.take(1, kMiB);
  CHECK(half.has_value());
  CHECK(!space.take(2, 2 * kMiB).has_value());
  CHECK(!space.take(3, 4096).has_value());
  space.leave(3);  // not the one in line
  CHECK(!space.take(3, 4096).has_value());
  space.leave(2);
  CHECK(space.take(3, 4096).has_value());
}
