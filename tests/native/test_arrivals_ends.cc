// Arrivals of many pages, and those that are given up, overshot, hung or closed.
#include <atomic>
#include <thread>

#include "arrivals_fixture.h"

using namespace ffi_transport;
using check::Device;
using check::eventually;
using check::kPage;
using check::kPages;
using check::lines;
using Fixture = check::ArrivalsFixture;

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
  CHECK(eventually([&] { return !f.knows(1); }));
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

namespace {

// A long lease whose pages follow each other: one run of 72 MiB.
struct LongRun {
  static constexpr uint64_t kBatch = 32 << 20;
  static constexpr uint32_t kFirst = 3, kCount = 18432;
  Device device{0, MemoryMode::kStaged, kFirst + kCount + 2};
  std::vector<uint32_t> pages;

  LongRun() {
    for (uint32_t page = kFirst; page < kFirst + kCount; ++page) {
      pages.push_back(page);
      device.land(page, static_cast<char>(page % 113));
    }
  }
  bool holds(uint32_t begin, uint32_t end) const {
    for (uint32_t page = begin; page < end; ++page) {
      if (!device.holds(page, static_cast<char>(page % 113))) return false;
    }
    return true;
  }
};

}  // namespace

TEST(a_long_run_is_copied_in_batches) {
  Fixture f;
  LongRun run;
  CHECK_OK(f.arm(1, 1, {run.device.region}, run.pages));
  f.add(1, 1);
  CHECK(f.next().kind == EventKind::kCounterReached);
  const auto copies = lines("ran cuMemcpyHtoDAsync_v2");
  CHECK_EQ(copies.size(), 3u);
  const uint64_t lengths[] = {LongRun::kBatch, LongRun::kBatch, 8 << 20};
  for (size_t i = 0; i < 3; ++i) {
    CHECK(copies[i].find(" " + std::to_string(lengths[i]) + " stream") != std::string::npos);
  }
  CHECK_EQ(lines("ran cuEventRecord").size(), 3u);
  CHECK(run.holds(LongRun::kFirst, LongRun::kFirst + LongRun::kCount));
  for (const uint32_t page : {0u, 2u, 3u + LongRun::kCount}) CHECK(run.device.holds(page, 'p'));
  CHECK_EQ(f.stats.arrival_bytes.load(), LongRun::kCount * kPage);
}

TEST(disarming_waits_for_one_batch_of_a_long_run) {
  Fixture f;
  LongRun run;
  CHECK_OK(f.arm(1, 1, {run.device.region}, run.pages));
  fake_cuda_hold(1);
  f.add(1, 1);
  CHECK(eventually([] { return !lines("cuMemcpyHtoDAsync_v2").empty(); }));
  std::thread other([&] { CHECK_OK(f.disarm(1)); });
  CHECK(eventually([&] { return !f.knows(1); }));
  fake_cuda_hold(0);
  other.join();
  CHECK_EQ(lines("ran cuMemcpyHtoDAsync_v2").size(), 1u);
  const uint32_t copied = LongRun::kFirst + LongRun::kBatch / kPage;
  CHECK(run.holds(LongRun::kFirst, copied));
  for (const uint32_t page : {copied, copied + 1}) CHECK(run.device.holds(page, 'p'));
  CHECK(f.events.poll(0).empty());
  CHECK_EQ(run.device.region->in_flight.load(), 0);
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
  Fixture f(500);  // a sound one has ended by then
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

// A mirror is pageable memory: the driver may take the call that copies from it for as long as the
// device takes.
TEST(disarming_does_not_wait_for_a_driver_that_hangs_in_a_copy) {
  Fixture f(500);
  LongRun run;
  CHECK_OK(f.arm(1, 1, {run.device.region}, run.pages));
  fake_cuda_hold(1);
  f.add(1, 1);
  CHECK(eventually([] { return !lines("cuMemcpyHtoDAsync_v2").empty(); }));
  CHECK_FAILS(f.disarm(1), Code::kTimeout, "its pages are not safe");
  CHECK(run.device.region->in_flight.load() > 0);  // it cannot be deregistered
  fake_cuda_hold(0);
  CHECK(eventually([&] { return run.device.region->in_flight.load() == 0; }));
  CHECK(eventually([&] { return f.stats.arrivals_dropped.load() == 1; }));
  CHECK(f.events.poll(0).empty());
  CHECK_OK(f.arm(1, 1, {run.device.region}, {1}));  // the slot serves again
  run.device.land(1, 'b');
  f.add(1, 1);
  CHECK(f.next().kind == EventKind::kCounterReached);
}

TEST(arrivals_end_when_the_driver_is_gone) {
  Device device(0);
  Fixture f;
  CHECK_OK(f.arm(1, 1, {device.region}, {1}));
  fake_cuda_hold(1);
  f.add(1, 1);
  CHECK(eventually([] { return !lines("cuEventRecord").empty(); }));
  fake_cuda_shut_down();
  const Event event = f.next();
  CHECK(event.kind == EventKind::kArrivalFailed);
  CHECK(event.text.find("CUDA error 4") != std::string::npos);
  CHECK_OK(f.disarm(1));
  f.arrivals.close();
  fake_cuda_reset();
}

TEST(mirrors_that_hung_copies_read_outlive_their_regions) {
  for (const bool disarmed : {false, true}) {
    Fixture f(30);
    Device hung(0), other(0), unused(0);
    CHECK_OK(f.arm(1, 1, {hung.region, other.region}, {1}));
    CHECK_OK(f.arm(2, 1, {unused.region}, {1}));
    for (Device* device : {&hung, &other}) device->land(1, 'a');
    fake_cuda_hold(1);
    f.add(1, 1);
    CHECK(f.next().kind == EventKind::kArrivalFailed);
    f.add(2, 1);
    CHECK(f.next().kind == EventKind::kArrivalFailed);  // no copy of it has begun
    if (disarmed) CHECK_FAILS(f.disarm(1), Code::kTimeout, "its pages are not safe");
    f.arrivals.close();
    CHECK_EQ(f.stats.mirrors_kept.load(), 2u);
    for (Device* device : {&hung, &other, &unused}) {
      CHECK_EQ(device->region.use_count(), 1);
      device->region.reset();
    }
    fake_cuda_hold(0);
    CHECK(eventually([] { return !lines("ran cuEventRecord").empty(); }));
    CHECK(hung.holds(1, 'a'));
    CHECK(other.holds(1, 'a'));
  }
}

TEST(mirrors_of_copies_that_have_ended_after_all_are_not_kept) {
  Fixture f(30);
  Device device(0);
  CHECK_OK(f.arm(1, 1, {device.region}, {1}));
  fake_cuda_hold(1);
  f.add(1, 1);
  CHECK(f.next().kind == EventKind::kArrivalFailed);
  fake_cuda_hold(0);
  CHECK(eventually([] { return !lines("ran cuEventRecord").empty(); }));
  f.arrivals.close();
  CHECK_EQ(f.stats.mirrors_kept.load(), 0u);
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
    CHECK(eventually([&] {  // known till then, and so refused as well
      return f.arm(3, 1, {device.region}, {3}).code() == Code::kClosed;
    }));
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
