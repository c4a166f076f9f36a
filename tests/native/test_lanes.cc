#include <algorithm>
#include <map>
#include <random>

#include "check.h"
#include "lanes.h"

using namespace ffi_transport;

namespace {

RegionPtr source_of(const std::vector<uint32_t>& domains) {
  auto region = std::make_shared<Region>();
  for (const uint32_t domain : domains) region->domains.push_back({domain, nullptr});
  return region;
}

RemoteRegion remote_of(const std::vector<uint32_t>& domains) {
  RemoteRegion region;
  for (const uint32_t domain : domains) region.domains.push_back({domain, 0, 0});
  return region;
}

std::vector<uint32_t> first(size_t count) {
  std::vector<uint32_t> out;
  for (uint32_t i = 0; i < count; ++i) out.push_back(i);
  return out;
}

uint64_t spread(const std::vector<uint64_t>& values) {
  const auto [least, most] = std::ranges::minmax(values);
  return most - least;
}

// Deals a job and adds its units to what each side's domains had. Every unit is in one lane.
void deal(PeerLanes& lanes, const RegionPtr& from, const RemoteRegion& to, size_t total,
          uint64_t bytes, std::vector<uint64_t>* here, std::vector<uint64_t>* there) {
  size_t at = 0;
  const auto dealt = lanes.deal(*from, to, total, bytes);
  CHECK(dealt.size() <= from->domains.size() + to.domains.size() - 1);
  for (const Lane& lane : dealt) {
    CHECK_EQ(lane.begin, at);
    CHECK(lane.end > lane.begin);
    at = lane.end;
    if (from->domains.size() == to.domains.size()) CHECK_EQ(lane.source, lane.remote);
    here->at(lane.source) += (lane.end - lane.begin) * bytes;
    there->at(lane.remote) += (lane.end - lane.begin) * bytes;
  }
  CHECK_EQ(at, total);
}

}  // namespace

TEST(lanes_stay_within_one_unit_of_each_other) {
  std::mt19937 random(5);
  for (size_t here = 1; here <= 9; ++here) {
    for (size_t there = 1; there <= 9; ++there) {
      PeerLanes lanes(there, random());
      const RegionPtr from = source_of(first(here));
      const RemoteRegion to = remote_of(first(there));
      std::vector<uint64_t> sent(here), received(there);
      for (int job = 0; job < 200; ++job) {
        deal(lanes, from, to, random() % (job % 2 ? 5 : 200), 1, &sent, &received);
        CHECK(spread(sent) <= 1);
        CHECK(spread(received) <= 1);
      }
    }
  }
}

TEST(lanes_of_mixed_units_stay_within_the_longest) {
  std::mt19937 random(6);
  for (const auto& [here, there] :
       std::vector<std::pair<size_t, size_t>>{{4, 4}, {2, 3}, {4, 1}, {1, 4}, {32, 4}}) {
    PeerLanes lanes(there, 3);
    const RegionPtr from = source_of(first(here));
    const RemoteRegion to = remote_of(first(there));
    std::vector<uint64_t> sent(here), received(there);
    for (int job = 0; job < 1000; ++job) {
      // The pattern that would put all large units on one domain if turns were taken by job.
      deal(lanes, from, to, 1 + random() % 3, job % 2 ? 65536 : 4096, &sent, &received);
      CHECK(spread(sent) <= 65536);
      CHECK(spread(received) <= 65536);
    }
  }
}

TEST(lanes_between_other_sets_have_remainders_of_their_own) {
  // One unit a job, to two groups by turns: each group's domains still share.
  PeerLanes lanes(4, 0);
  const RegionPtr from = source_of({0, 1});
  std::vector<uint64_t> sent(2), one(2), two(2);
  for (int job = 0; job < 20; ++job) {
    deal(lanes, from, remote_of({0, 1}), 1, 1, &sent, &one);
    deal(lanes, from, remote_of({2, 3}), 1, 1, &sent, &two);
  }
  CHECK_EQ(one[0], 10u);
  CHECK_EQ(two[0], 10u);
}

TEST(lanes_of_several_peers_do_not_all_begin_with_the_first_domain) {
  std::vector<uint64_t> sent(4);
  for (uint64_t peer = 1; peer <= 40; ++peer) {
    PeerLanes lanes(4, peer);
    std::vector<uint64_t> received(4);
    deal(lanes, source_of(first(4)), remote_of(first(4)), 1, 1, &sent, &received);
  }
  for (const uint64_t units : sent) CHECK_EQ(units, 10u);
}
