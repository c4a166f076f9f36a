// Arrivals over the fake CUDA driver: device memory with a mirror, and what tests do to it.
#pragma once

#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

#include "arrivals.h"
#include "check.h"
#include "fake_driver.h"

namespace check {

using namespace ffi_transport;

inline constexpr uint64_t kPage = 4096;
inline constexpr int kPages = 64;

// "Device" memory with a mirror, as the engine registers a region that no NIC reaches.
struct Device {
  std::vector<char> memory;
  RegionPtr region = std::make_shared<Region>();

  explicit Device(int ordinal, MemoryMode mode = MemoryMode::kStaged, uint64_t pages = kPages)
      : memory(pages * kPage, 'p') {
    region->address = reinterpret_cast<uint64_t>(memory.data());
    region->length = memory.size();
    region->device = ordinal;
    region->mode = mode;
    if (mode == MemoryMode::kStaged) region->mirror = Mirror::create(memory.size(), true).take();
  }
  // As a peer's write.
  void land(uint32_t page, char value) {
    std::fill_n(region->mirror->address() + page * kPage, kPage, value);
  }
  bool holds(uint32_t page, char value) const {
    const auto begin = memory.begin() + static_cast<std::ptrdiff_t>(page * kPage);
    return std::all_of(begin, begin + kPage, [&](char byte) { return byte == value; });
  }
  bool given_back(uint32_t page) const { return region->mirror->address()[page * kPage] == '\0'; }
};

struct ArrivalsFixture {
  FakeDriver fake;
  EventQueue events;
  Stats stats;
  ImmCounters counters;
  Arrivals arrivals;

  explicit ArrivalsFixture(int wait_ms = 20000)
      : counters(10, &events, &stats),
        arrivals(&counters, &events, &stats, std::chrono::milliseconds(wait_ms)) {
    counters.set_gate(&arrivals);
  }
  Status arm(int64_t slot, int64_t expected, const std::vector<RegionPtr>& regions,
             const std::vector<uint32_t>& pages) {
    auto landing = Landing::of_pages(regions, pages, kPage);
    if (!landing.ok()) return landing.status();
    std::vector<Landing> landings;
    landings.push_back(landing.take());
    if (Status status = arrivals.expect(slot, std::move(landings)); !status.ok()) return status;
    return counters.arm(slot, expected, false);
  }
  Status disarm(int64_t slot) {
    CHECK_OK(counters.disarm(slot));
    return arrivals.drop(slot);
  }
  // Whether a slot is known; after `drop` has begun it is not.
  bool knows(int64_t slot) {
    Event again;
    again.kind = EventKind::kCounterReached;
    again.id = slot;
    return arrivals.take(again);
  }
  void add(uint32_t slot, uint32_t weight) { counters.add(counters.codec().encode(slot, weight)); }
  Event next() {
    std::vector<Event> got;
    CHECK(eventually([&] { return !(got = events.poll(0.01)).empty(); }));
    CHECK_EQ(got.size(), 1u);
    return got[0];
  }
};

inline std::vector<std::string> lines(const std::string& words) {
  std::vector<std::string> found;
  std::istringstream log(fake_cuda_log());
  for (std::string line; std::getline(log, line);) {
    if (line.find(words) != std::string::npos) found.push_back(line);
  }
  return found;
}

}  // namespace check
