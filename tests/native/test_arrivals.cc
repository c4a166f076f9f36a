#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "arrivals.h"
#include "check.h"
#include "fake_driver.h"

using namespace ffi_transport;
using check::eventually;
using check::FakeDriver;

namespace {

constexpr uint64_t kPage = 4096;
constexpr int kPages = 64;

// "Device" memory with a mirror, as the engine registers a region that no NIC reaches.
struct Device {
  std::vector<char> memory;
  RegionPtr region = std::make_shared<Region>();

  explicit Device(int ordinal, MemoryMode mode = MemoryMode::kStaged)
      : memory(kPages * kPage, 'p') {
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

struct Fixture {
  FakeDriver fake;
  EventQueue events;
  Stats stats;
  ImmCounters counters;
  Arrivals arrivals;

  explicit Fixture(int wait_ms = 20000)
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
  void add(uint32_t slot, uint32_t weight) { counters.add(counters.codec().encode(slot, weight)); }
  Event next() {
    std::vector<Event> got;
    CHECK(eventually([&] { return !(got = events.poll(0.01)).empty(); }));
    CHECK_EQ(got.size(), 1u);
    return got[0];
  }
};

std::vector<std::string> lines(const std::string& words) {
  std::vector<std::string> found;
  std::istringstream log(fake_cuda_log());
  for (std::string line; std::getline(log, line);) {
    if (line.find(words) != std::string::npos) found.push_back(line);
  }
  return found;
}

size_t place(const std::string& words) {
  const size_t at = std::string(fake_cuda_log()).find(words);
  CHECK(at != std::string::npos);
  return at;
}

// What the test sees: that a slot's last unit was counted, then what the driver was asked.
void counted(Fixture& f, uint32_t slot, uint32_t weight) {
  fake_cuda_note("counted");
  f.add(slot, weight);
}

}  // namespace

TEST(landing_joins_pages_that_follow_each_other) {
  Device device(0);
  auto landing = Landing::of_pages({device.region}, {3, 4, 5, 9, 8, 63}, kPage);
  CHECK_OK(landing.status());
  CHECK_EQ(landing->runs.size(), 4u);
  CHECK_EQ(landing->runs[0].offset, 3 * kPage);
  CHECK_EQ(landing->runs[0].length, 3 * kPage);
  CHECK_EQ(landing->runs[3].offset, 63 * kPage);
  CHECK_FAILS(Landing::of_pages({device.region}, {1, 64}, kPage).status(), Code::kInvalid,
              "page 64 of 4096 bytes is beyond");
  CHECK_FAILS(Landing::of_pages({device.region}, {0}, kPages * kPage + 1).status(), Code::kInvalid,
              "is beyond");
  CHECK_FAILS(Landing::of_pages({device.region}, {0}, 0).status(), Code::kInvalid, "page_bytes: 0");
}

TEST(arrival_in_host_memory_opens_no_device) {
  Fixture f;
  Device host(-1, MemoryMode::kHost);
  CHECK_OK(f.arm(5, 2, {host.region}, {1, 2}));
  f.add(5, 2);
  const auto events = f.events.poll(0);  // told by who counted, at once
  CHECK_EQ(events.size(), 1u);
  CHECK(events[0].kind == EventKind::kCounterReached);
  CHECK(std::string(fake_cuda_log()).empty());
}

TEST(arrival_is_told_after_its_pages_are_in_the_device) {
  Fixture f;
  fake_cuda_set_delay(3, 2000);
  Device one(0), other(2);
  CHECK_OK(f.arm(7, 4, {one.region, other.region}, {10, 11, 20}));
  for (Device* device : {&one, &other}) {
    for (const uint32_t page : {10u, 11u, 20u}) device->land(page, static_cast<char>(page));
    device->land(12, 'x');  // another request's, on its way
  }
  f.add(7, 3);
  CHECK(lines("cuMemcpyHtoDAsync_v2").empty());
  counted(f, 7, 1);
  const Event event = f.next();
  CHECK(event.kind == EventKind::kCounterReached);
  CHECK_EQ(event.id, 7);
  CHECK_EQ(event.first, 4);
  for (const Device* device : {&one, &other}) {
    for (const uint32_t page : {10u, 11u, 20u}) {
      CHECK(device->holds(page, static_cast<char>(page)));
      CHECK(device->given_back(page));
    }
    for (const uint32_t page : {0u, 9u, 12u, 19u, 21u, 63u}) CHECK(device->holds(page, 'p'));
    CHECK_EQ(device->region->mirror->address()[12 * kPage], 'x');
    CHECK_EQ(device->region->in_flight.load(), 0);
  }
  // Counted, then copies, then an event that was seen after they ran.
  CHECK(place("counted") < place("cuMemcpyHtoDAsync_v2"));
  CHECK(place("ran cuMemcpyHtoDAsync_v2") < place("ran cuEventRecord"));
  CHECK(place("ran cuEventRecord") < place("cuEventQuery"));
  CHECK_EQ(lines("ran cuMemcpyHtoDAsync_v2").size(), 4u);
  CHECK_EQ(f.stats.arrival_copies.load(), 4u);
  CHECK_EQ(f.stats.arrival_bytes.load(), 6 * kPage);
  CHECK_EQ(f.stats.arrival_flushes.load(), 0u);
  CHECK_OK(f.disarm(7));
  CHECK_EQ(f.stats.arrivals_dropped.load(), 0u);
}

TEST(arrival_flushes_what_a_nic_wrote_where_the_device_asks_for_it) {
  for (const int ordering :
       {cuda::kOrderingNone, cuda::kOrderingOwner, cuda::kOrderingAllDevices}) {
    Fixture f;
    fake_cuda_set_attribute(1, cuda::kAttributeRdmaWritesOrdering, ordering);
    fake_cuda_set_attribute(1, cuda::kAttributeFlushWritesOptions, cuda::kFlushOptionHost);
    Device device(1, MemoryMode::kDirect);
    for (const uint32_t slot : {1u, 2u}) {
      CHECK_OK(f.arm(slot, 3, {device.region, device.region}, {1, 2}));
      f.add(slot, 2);
      counted(f, slot, 1);
      CHECK(f.next().kind == EventKind::kCounterReached);
    }
    const size_t flushes = ordering == cuda::kOrderingNone ? 2 : 0;  // one for each request
    CHECK_EQ(lines("cuFlushGPUDirectRDMAWrites").size(), flushes);
    CHECK_EQ(f.stats.arrival_flushes.load(), flushes);
    CHECK(lines("cuMemcpy").empty());
    CHECK_EQ(lines("cuDeviceGetAttribute 118").size(), 1u);  // asked once per device
    if (flushes > 0) CHECK(place("counted") < place("cuFlushGPUDirectRDMAWrites"));
  }
}

TEST(arrival_fails_where_a_flush_is_needed_and_there_is_none) {
  Fixture f;
  Device device(0, MemoryMode::kDirect);  // no ordering, no options: the fake's default
  CHECK_FAILS(DeviceLane::needs_flush(**CudaDevice::open(0)).status(), Code::kUnavailable,
              "offers no flush");
  CHECK_OK(f.arm(1, 1, {device.region}, {1}));
  f.add(1, 1);
  const Event event = f.next();
  CHECK(event.kind == EventKind::kArrivalFailed);
  CHECK_EQ(event.id, 1);
  CHECK(event.text.find("offers no flush") != std::string::npos);
  CHECK_EQ(f.stats.arrivals_failed.load(), 1u);
}

TEST(arrival_that_cannot_open_its_device_is_not_armed) {
  Fixture f;
  fake_cuda_set_devices(2);
  Device device(2);
  CHECK_FAILS(f.arm(1, 1, {device.region}, {1}), Code::kInvalid, "this process sees 2");
  CHECK_EQ(device.region->in_flight.load(), 0);
}

TEST(arrival_whose_copy_fails_is_told_and_harms_no_other) {
  Fixture f;
  fake_cuda_set_delay(5, 1000);
  Device device(0);
  fake_cuda_fail("cuMemcpyHtoDAsync_v2", cuda::kInvalidValue, 1, 1);
  CHECK_OK(f.arm(1, 1, {device.region}, {1, 3, 5}));
  CHECK_OK(f.arm(2, 1, {device.region}, {7}));
  device.land(1, 'a');
  device.land(7, 'b');
  f.add(1, 1);
  const Event event = f.next();
  CHECK(event.kind == EventKind::kArrivalFailed);
  CHECK(event.text.find("CUDA_ERROR_INVALID_VALUE") != std::string::npos);
  CHECK(device.holds(1, 'a'));  // the copy before it has ended, too
  CHECK_OK(f.disarm(1));
  f.add(2, 1);
  CHECK(f.next().kind == EventKind::kCounterReached);
  CHECK(device.holds(7, 'b'));
  CHECK_EQ(device.region->in_flight.load(), 0);
}

TEST(disarming_before_the_copies_leaves_the_device_alone) {
  Fixture f;
  Device device(0);
  CHECK_OK(f.arm(1, 2, {device.region}, {1, 2}));
  CHECK_FAILS(f.arm(1, 2, {device.region}, {1, 2}), Code::kInvalid, "already armed");
  device.land(1, 'a');
  f.add(1, 1);
  CHECK_OK(f.disarm(1));
  CHECK(device.given_back(1));
  CHECK_EQ(device.region->in_flight.load(), 0);
  f.add(1, 1);  // late
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(f.events.poll(0).empty());
  CHECK(device.holds(1, 'p'));
  CHECK_EQ(f.stats.arrivals_dropped.load(), 1u);
  // The slot and the pages are another request's now.
  CHECK_OK(f.arm(1, 1, {device.region}, {1}));
  device.land(1, 'b');
  f.add(1, 1);
  CHECK(f.next().kind == EventKind::kCounterReached);
  CHECK(device.holds(1, 'b'));
}

TEST(disarming_waits_for_the_copies_that_have_begun) {
  Fixture f;
  Device device(0);
  std::vector<uint32_t> pages;
  for (uint32_t page = 0; page < kPages; page += 2) pages.push_back(page);  // no two are one copy
  // More than one batch, so that what has not begun when the slot is dropped is left out.
  const std::vector<RegionPtr> regions(12, device.region);
  CHECK_OK(f.arm(1, 1, regions, pages));
  for (const uint32_t page : pages) device.land(page, 'a');
  fake_cuda_hold(1);
  f.add(1, 1);
  CHECK(eventually([] { return !lines("cuEventRecord").empty(); }));
  std::atomic<bool> dropped{false};
  std::thread other([&] {
    CHECK_OK(f.disarm(1));
    dropped = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  CHECK(!dropped);  // a copy may still land
  fake_cuda_hold(0);
  other.join();
  std::fill(device.memory.begin(), device.memory.end(), 'n');  // the pages are another's now
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  CHECK(std::ranges::all_of(device.memory, [](char byte) { return byte == 'n'; }));
  CHECK_EQ(lines("ran cuMemcpyHtoDAsync_v2").size(), 256u);  // of 384
  CHECK(f.events.poll(0).empty());
  CHECK_EQ(device.region->in_flight.load(), 0);
}

TEST(a_late_word_of_an_earlier_arming_copies_nothing) {
  Fixture f;
  Device device(0);
  CHECK_OK(f.arm(1, 2, {device.region}, {1}));
  f.add(1, 1);
  Event late;  // by a thread that counted for whom had the slot before, and was slow
  late.kind = EventKind::kCounterReached;
  late.id = 1;
  late.first = 2;
  CHECK(f.arrivals.take(late));
  device.land(1, 'a');
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(lines("cuMemcpyHtoDAsync_v2").empty());
  CHECK(f.events.poll(0).empty());
  f.add(1, 1);
  CHECK(f.next().kind == EventKind::kCounterReached);
  CHECK(device.holds(1, 'a'));
}

TEST(an_overshot_slot_is_not_told_as_reached) {
  Fixture f;
  Device device(0);
  CHECK_OK(f.arm(1, 2, {device.region}, {1}));
  fake_cuda_hold(1);
  f.add(1, 2);
  f.add(1, 1);
  CHECK(f.next().kind == EventKind::kCounterOvershoot);
  fake_cuda_hold(0);
  CHECK(eventually([&] { return f.stats.arrivals_dropped.load() == 1; }));
  CHECK(f.events.poll(0).empty());
  CHECK_OK(f.disarm(1));
}

TEST(a_hung_device_fails_its_slots_and_keeps_their_pages) {
  Fixture f(30);
  Device hung(0), sound(1);
  CHECK_OK(f.arm(1, 1, {hung.region}, {1}));
  CHECK_OK(f.arm(2, 1, {hung.region}, {2}));
  CHECK_OK(f.arm(3, 1, {hung.region, sound.region}, {3}));
  hung.land(1, 'a');
  fake_cuda_hold(1);
  f.add(1, 1);
  Event event = f.next();
  CHECK(event.kind == EventKind::kArrivalFailed);
  CHECK(event.text.find("did not end in time") != std::string::npos);
  CHECK_FAILS(f.disarm(1), Code::kTimeout, "its pages are not safe");
  f.add(2, 1);
  event = f.next();
  CHECK(event.text.find("earlier copies") != std::string::npos);
  CHECK_OK(f.disarm(2));  // nothing of it had begun
  fake_cuda_hold(0);
  CHECK(eventually([] { return !lines("ran cuEventRecord").empty(); }));
  CHECK(hung.holds(1, 'a'));
  sound.land(3, 'b');
  f.add(3, 1);  // it has come round
  CHECK(f.next().kind == EventKind::kCounterReached);
  CHECK(sound.holds(3, 'b'));
}

TEST(arrivals_that_are_closed_copy_nothing_more) {
  Device device(0);
  {
    Fixture f;
    CHECK_OK(f.arm(1, 1, {device.region}, {1}));
    CHECK_OK(f.arm(2, 1, {device.region}, {2}));
    fake_cuda_hold(1);
    f.add(1, 1);
    CHECK(eventually([] { return !lines("cuEventRecord").empty(); }));
    f.add(2, 1);
    std::thread closing([&] { f.arrivals.close(); });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    fake_cuda_hold(0);
    closing.join();
    std::fill(device.memory.begin(), device.memory.end(), 'n');
    CHECK_EQ(lines("ran cuMemcpyHtoDAsync_v2").size(), 1u);
    CHECK(f.events.poll(0).empty());
    CHECK_FAILS(f.arm(3, 1, {device.region}, {3}), Code::kClosed, "closed");
  }
  CHECK_EQ(fake_cuda_live("stream"), 0);
  CHECK_EQ(fake_cuda_live("event"), 0);
  CHECK_EQ(fake_cuda_live("context"), 0);
  CHECK(device.holds(2, 'n'));
}

TEST(arrivals_race_with_counting_and_disarming) {
  Fixture f;
  fake_cuda_set_delay(11, 200);
  Device device(0);
  std::atomic<int> told{0};
  std::thread poller([&] {
    for (int idle = 0; idle < 200;) {
      const auto events = f.events.poll(0.005);
      idle = events.empty() ? idle + 1 : 0;
      for (const Event& event : events) told += event.kind == EventKind::kCounterReached;
    }
  });
  for (uint32_t round = 0; round < 60; ++round) {
    const uint32_t page = round % kPages;
    CHECK_OK(f.arm(round % 4, 2, {device.region}, {page}));
    device.land(page, 'a');
    std::thread one([&] { f.add(round % 4, 1); }), two([&] { f.add(round % 4, 1); });
    if (round % 2 != 0) std::this_thread::sleep_for(std::chrono::microseconds(37 * round));
    CHECK_OK(f.disarm(round % 4));
    std::fill_n(device.memory.begin() + page * kPage, kPage, 'n');
    one.join();
    two.join();
    CHECK(device.holds(page, 'n'));
  }
  poller.join();
  CHECK(told <= 60);
  CHECK_EQ(device.region->in_flight.load(), 0);
}
