// Engines with several domains, also with unequal numbers of them. The loopback network gives every
// domain its own keys, so a write by the wrong lane is refused.
#include <cstring>

#include "engines.h"

using namespace check;
using ffi_transport::Code;
using ffi_transport::RegionPtr;

namespace {

constexpr size_t kPage = 512;
constexpr PageUnit kWhole{kPage, 0, kPage, 0, kPage};

EngineOptions with_domains(size_t count, uint32_t delay = 0, uint64_t seed = 1) {
  EngineOptions out = options(delay, seed);
  for (size_t i = 0; i < count; ++i) out.domains.push_back("nic" + std::to_string(i));
  return out;
}

struct Totals {
  std::vector<uint64_t> posted, completed, counted;
  explicit Totals(Node& node) {
    for (const Engine::DomainCounters& one : node.engine->domain_counters()) {
      posted.push_back(one.units_posted);
      completed.push_back(one.units_completed);
      counted.push_back(one.units_counted);
      CHECK_EQ(one.bytes_posted, one.units_posted * kPage);
      CHECK_EQ(one.bytes_completed, one.units_completed * kPage);
    }
  }
};

void check_even(const std::vector<uint64_t>& units, uint64_t total) {
  uint64_t sum = 0;
  for (const uint64_t one : units) {
    CHECK(one == total / units.size() || one == (total + units.size() - 1) / units.size());
    sum += one;
  }
  CHECK_EQ(sum, total);
}

}  // namespace

TEST(domains_in_unequal_numbers_share_the_units_of_both_sides) {
  for (const auto& [here, there] : std::vector<std::pair<size_t, size_t>>{
           {1, 2}, {2, 3}, {3, 2}, {4, 1}, {5, 5}, {1, 32}, {32, 7}}) {
    Node a(with_domains(here, 20, here)), b(with_domains(there, 20, there));
    randomize(&a.memory, 1);
    const int64_t peer = connect(a, b);
    constexpr size_t kPages = 1000;
    const PageLists lists = shuffled(kPages, 7);
    CHECK_OK(b.engine->counters().arm(5, kPages, false));
    const int64_t transfer = *a.engine->open_transfer(peer, 5);
    // In portions that divide by nothing.
    for (size_t at = 0; at < kPages;) {
      const size_t end = std::min(kPages, at + 7);
      PageLists part;
      part.source.assign(lists.source.begin() + at, lists.source.begin() + end);
      part.destination.assign(lists.destination.begin() + at, lists.destination.begin() + end);
      CHECK_OK(a.engine->write_paged(transfer, a.region, b.remote, part, kWhole));
      at = end;
    }
    CHECK_OK(a.engine->seal(transfer));
    CHECK_EQ(a.wait(EventKind::kTransferEnded).first, static_cast<int64_t>(kPages));
    b.wait(EventKind::kCounterReached);
    for (size_t i = 0; i < kPages; ++i) {
      CHECK(std::memcmp(a.memory.data() + lists.source[i] * kPage,
                        b.memory.data() + lists.destination[i] * kPage, kPage) == 0);
    }
    const Totals from(a), to(b);
    CHECK_EQ(from.posted.size(), here);
    CHECK_EQ(to.counted.size(), there);
    check_even(from.posted, kPages);
    check_even(from.completed, kPages);
    check_even(to.counted, kPages);
    check_even(to.posted, 0);
  }
}
