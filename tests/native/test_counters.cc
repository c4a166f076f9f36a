#include <thread>

#include "check.h"
#include "imm_counters.h"

using namespace ffi_transport;

namespace {

struct Fixture {
  EventQueue events;
  Stats stats;
  ImmCounters counters;
  explicit Fixture(uint32_t slot_bits = 20) : counters(slot_bits, &events, &stats) {}
  void add(uint32_t slot, uint32_t weight) { counters.add(counters.codec().encode(slot, weight)); }
  int64_t seen(int64_t slot) { return *counters.seen(slot); }
};

}  // namespace

TEST(immediate_codec_keeps_slot_and_weight_apart) {
  const ImmediateCodec codec(20);
  for (uint32_t slot : {0u, 1u, 777u, (1u << 20) - 1}) {
    for (uint32_t weight : {1u, 2u, 4095u}) {
      uint32_t got_slot, got_weight;
      CHECK(codec.decode(codec.encode(slot, weight), &got_slot, &got_weight));
      CHECK_EQ(got_slot, slot);
      CHECK_EQ(got_weight, weight);
    }
  }
  uint32_t slot, weight;
  CHECK(!codec.decode(codec.encode(5, 0), &slot, &weight));
  CHECK(!ImmediateCodec(10).decode(1024u << 12 | 1, &slot, &weight));
  CHECK(ImmediateCodec(10).decode(1023u << 12 | 1, &slot, &weight));
}

TEST(counter_reaches_its_count_once) {
  Fixture f;
  CHECK_OK(f.counters.arm(7, 10, false));
  f.add(7, 4);
  f.add(7, 5);
  CHECK(f.events.poll(0).empty());
  f.add(7, 1);
  const auto events = f.events.poll(0);
  CHECK_EQ(events.size(), 1u);
  CHECK(events[0].kind == EventKind::kCounterReached);
  CHECK_EQ(events[0].id, 7);
  CHECK_EQ(events[0].first, 10);
  CHECK_EQ(f.seen(7), 10);
}

TEST(counter_of_nothing_is_reached_at_once) {
  Fixture f;
  CHECK_OK(f.counters.arm(0, 0, false));
  const auto events = f.events.poll(0);
  CHECK_EQ(events.size(), 1u);
  CHECK(events[0].kind == EventKind::kCounterReached);
}

TEST(counter_reports_overshoot_once) {
  Fixture f;
  CHECK_OK(f.counters.arm(3, 5, false));
  f.add(3, 5);
  CHECK_EQ(f.events.poll(0).size(), 1u);
  f.add(3, 1);
  f.add(3, 1);
  auto events = f.events.poll(0);
  CHECK_EQ(events.size(), 1u);
  CHECK(events[0].kind == EventKind::kCounterOvershoot);
  CHECK_EQ(events[0].first, 5);
  CHECK_EQ(events[0].second, 6);
  CHECK_EQ(f.stats.overshoots.load(), 1u);
  // A jump over the count is an overshoot and never counts as reached.
  CHECK_OK(f.counters.arm(4, 5, false));
  f.add(4, 3);
  f.add(4, 3);
  events = f.events.poll(0);
  CHECK_EQ(events.size(), 1u);
  CHECK(events[0].kind == EventKind::kCounterOvershoot);
}

TEST(counter_drops_stale_immediates) {
  Fixture f;
  f.add(9, 3);
  CHECK_EQ(f.stats.stale_immediates.load(), 1u);
  CHECK_OK(f.counters.arm(9, 4, false));
  CHECK_EQ(f.seen(9), 0);
  f.add(9, 4);
  CHECK_EQ(f.events.poll(0).size(), 1u);
  CHECK_OK(f.counters.disarm(9));
  f.add(9, 1);
  CHECK_EQ(f.stats.stale_immediates.load(), 2u);
  CHECK(f.events.poll(0).empty());
  CHECK_OK(f.counters.arm(9, 1, false));
  CHECK(f.events.poll(0).empty());
}

TEST(counter_adopts_early_immediates_when_asked) {
  Fixture f;
  f.add(2, 3);
  CHECK_OK(f.counters.arm(2, 4, true));
  CHECK_EQ(f.seen(2), 3);
  CHECK(f.events.poll(0).empty());
  f.add(2, 1);
  CHECK_EQ(f.events.poll(0).size(), 1u);
  f.add(6, 2);
  CHECK_OK(f.counters.arm(6, 2, true));  // complete before it was armed
  const auto events = f.events.poll(0);
  CHECK_EQ(events.size(), 1u);
  CHECK(events[0].kind == EventKind::kCounterReached);
  CHECK_EQ(f.stats.units_adopted.load(), 5u);
}

TEST(counter_refuses_misuse) {
  Fixture f(10);
  CHECK_OK(f.counters.arm(1023, 1, false));
  CHECK_FAILS(f.counters.arm(1023, 1, false), Code::kInvalid, "already armed");
  CHECK_FAILS(f.counters.arm(1024, 1, false), Code::kInvalid, "0..1023");
  CHECK_FAILS(f.counters.arm(-1, 1, false), Code::kInvalid, "slot -1");
  CHECK_FAILS(f.counters.arm(1, 1ll << 31, false), Code::kInvalid, "expected count");
  CHECK_FAILS(f.counters.disarm(5000), Code::kInvalid, "slot 5000");
  CHECK_FAILS(f.counters.seen(5000).status(), Code::kInvalid, "slot 5000");
}

TEST(counter_slots_wrap_with_ten_bits) {
  Fixture f(10);
  // Three rounds through all slots: each use is a new life, and what comes late for the former one
  // counts for nothing while the slot is not armed.
  for (int use = 0; use < 3 * 1024; ++use) {
    const uint32_t slot = use % 1024;
    f.add(slot, 7);  // a straggler
    CHECK_OK(f.counters.arm(slot, 2, false));
    f.add(slot, 2);
    const auto events = f.events.poll(0);
    CHECK_EQ(events.size(), 1u);
    CHECK(events[0].kind == EventKind::kCounterReached);
    CHECK_EQ(events[0].id, static_cast<int64_t>(slot));
    CHECK_OK(f.counters.disarm(slot));
  }
  CHECK_EQ(f.stats.stale_immediates.load(), 3u * 1024);
  f.counters.add(1024u << 12 | 1);  // a slot that ten bits do not have
  f.counters.add(5u << 12);         // no weight
  CHECK_EQ(f.stats.immediates_malformed.load(), 2u);
}

TEST(counter_stale_flood_does_not_carry) {
  Fixture f;
  for (int i = 0; i < (1 << 20) + 10; ++i) f.add(1, 4095);  // more than 2^32 units
  CHECK_OK(f.counters.arm(1, 3, false));
  CHECK(f.events.poll(0).empty());
  f.add(1, 3);
  CHECK_EQ(f.events.poll(0).size(), 1u);
}

TEST(counter_crossing_is_seen_by_one_of_many_threads) {
  for (int round = 0; round < 50; ++round) {
    Fixture f;
    constexpr int kThreads = 4, kEach = 500;
    CHECK_OK(f.counters.arm(1, kThreads * kEach * 2, false));
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < kEach; ++i) f.add(1, 2);
      });
    }
    for (auto& thread : threads) thread.join();
    CHECK_EQ(f.events.poll(0).size(), 1u);
    CHECK_EQ(f.seen(1), kThreads * kEach * 2);
  }
}

TEST(counter_arm_and_add_race_reports_once) {
  for (int round = 0; round < 300; ++round) {
    Fixture f;
    std::thread adder([&] {
      for (int i = 0; i < 8; ++i) f.add(1, 1);
    });
    CHECK_OK(f.counters.arm(1, 8, true));
    adder.join();
    const auto events = f.events.poll(0);
    CHECK_EQ(events.size(), 1u);
    CHECK(events[0].kind == EventKind::kCounterReached);
  }
}
