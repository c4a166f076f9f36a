// What happens before a reached count is told.
#include "arrivals_fixture.h"

using namespace ffi_transport;
using check::Device;
using check::kPage;
using check::kPages;
using check::lines;
using Fixture = check::ArrivalsFixture;

namespace {

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
  // page * page_bytes would be 2^64, 2^64 + 2^33 and 0 bytes.
  const uint64_t wide = 1ull << 33;
  device.region->length = wide;
  for (const uint32_t page : {1u << 31, (1u << 31) + 1, 1u}) {
    CHECK_FAILS(Landing::of_pages({device.region}, {page, 0}, wide).status(), Code::kInvalid,
                "page " + std::to_string(page) + " of 8589934592 bytes is beyond");
  }
  CHECK_OK(Landing::of_pages({device.region}, {0, 0}, wide).status());
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
