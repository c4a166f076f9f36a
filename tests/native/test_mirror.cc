// Host mirrors: memory only where bytes landed, given back page by page.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "check.h"
#include "mirror.h"

using namespace ffi_transport;

namespace {

// How many of the system's pages of a mirror are in memory.
size_t resident(const Mirror& mirror) {
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> pages((mirror.length() + page - 1) / page);
  CHECK_EQ(::mincore(mirror.address(), mirror.length(), pages.data()), 0);
  return std::ranges::count_if(pages, [](unsigned char one) { return (one & 1) != 0; });
}

}  // namespace

TEST(a_mirror_is_committed_only_where_bytes_landed) {
  auto mirror = Mirror::create(1ull << 36, true);  // more than is there to commit
  CHECK_OK(mirror.status());
  (*mirror)->address()[(1ull << 36) - 1] = 7;
  CHECK_EQ((*mirror)->address()[0], 0);
  auto small = Mirror::create(64 * 4096, true);
  CHECK_OK(small.status());
  CHECK_EQ(resident(**small), 0u);
  std::fill_n((*small)->address() + 4096, 3 * 4096, 'x');
  CHECK_EQ(resident(**small), 3u);
}

TEST(a_mirror_gives_whole_pages_back_and_leaves_its_neighbours) {
  auto made = Mirror::create(16 * 4096, true);
  CHECK_OK(made.status());
  Mirror& mirror = **made;
  std::fill_n(mirror.address(), mirror.length(), 'x');
  mirror.discard(4096 + 100, 3 * 4096);  // pages 2 and 3 wholly, parts of 1 and 4
  CHECK_EQ(resident(mirror), 14u);
  CHECK_EQ(mirror.address()[4096 + 99], 'x');
  CHECK_EQ(mirror.address()[4096 + 100], 'x');
  CHECK_EQ(mirror.address()[2 * 4096], '\0');
  CHECK_EQ(mirror.address()[4 * 4096 - 1], '\0');
  CHECK_EQ(mirror.address()[4 * 4096], 'x');
  mirror.discard(5 * 4096 + 1, 4096);  // no page wholly
  CHECK_EQ(mirror.address()[6 * 4096], 'x');
}

TEST(a_mirror_that_a_nic_pins_keeps_its_pages) {
  auto mirror = Mirror::create(4 * 4096, false);
  CHECK_OK(mirror.status());
  std::fill_n((*mirror)->address(), 4 * 4096, 'x');
  (*mirror)->discard(0, 4 * 4096);
  CHECK_EQ((*mirror)->address()[0], 'x');
}
