#include <atomic>
#include <set>
#include <thread>

#include "check.h"
#include "trigger_hub.h"

using namespace ffi_transport;

namespace {

struct Fixture {
  Waiter waiter;
  Stats stats;
  std::atomic<uint64_t> order{1};
  TriggerHub hub;
  explicit Fixture(size_t capacity = 1 << 10, bool trace = false)
      : hub(&waiter, &order, &stats, trace, capacity) {}
};

const void* address(uint64_t value) { return reinterpret_cast<const void*>(value); }

}  // namespace

TEST(ring_keeps_order_and_says_when_it_is_full) {
  TriggerRing ring(8);
  TriggerRecord record;
  CHECK(ring.empty());
  CHECK(!ring.pop(&record));
  for (int round = 0; round < 5; ++round) {
    for (int i = 0; i < 8; ++i) {
      record.layer = i;
      CHECK(ring.push(record));
    }
    CHECK(!ring.push(record));
    for (int i = 0; i < 8; ++i) {
      CHECK(!ring.empty());
      CHECK(ring.pop(&record));
      CHECK_EQ(record.layer, i);
    }
    CHECK(!ring.pop(&record));
  }
}

TEST(ring_loses_nothing_among_many_producers) {
  TriggerRing ring(64);
  constexpr int kThreads = 4, kEach = 20000;
  std::vector<std::thread> producers;
  for (int t = 0; t < kThreads; ++t) {
    producers.emplace_back([&ring, t] {
      TriggerRecord record;
      record.ordinal = t;
      for (int i = 0; i < kEach; ++i) {
        record.layer = i;
        while (!ring.push(record)) std::this_thread::yield();
      }
    });
  }
  int next[kThreads] = {};
  for (int got = 0; got < kThreads * kEach;) {
    TriggerRecord record;
    if (!ring.pop(&record)) {
      std::this_thread::yield();
      continue;
    }
    CHECK_EQ(record.layer, next[record.ordinal]++);  // in order per producer
    ++got;
  }
  for (auto& producer : producers) producer.join();
}

TEST(hub_reports_overflow_once_and_goes_on) {
  Fixture f(16);
  for (int i = 0; i < 20; ++i) f.hub.fire(1, 0, i, nullptr);
  CHECK_EQ(f.stats.triggers.load(), 20u);
  CHECK_EQ(f.stats.ring_overflows.load(), 4u);
  CHECK(!f.hub.empty());
  CHECK(f.hub.take_overflow());
  CHECK(!f.hub.take_overflow());
  TriggerRecord record;
  int popped = 0;
  while (f.hub.pop(&record)) ++popped;
  CHECK_EQ(popped, 16);
  f.hub.fire(2, 0, 0, nullptr);
  CHECK(f.hub.pop(&record));
  CHECK_EQ(record.step_low, 2u);
  CHECK(f.hub.empty());
}

TEST(hub_compares_addresses) {
  Fixture f;
  TriggerRecord record;
  f.hub.fire(1, 2, 3, address(0x1000));  // nothing is registered: warm-up
  CHECK(f.hub.pop(&record));
  CHECK_EQ(record.wrong_address, 0u);
  f.hub.set_address(2, 3, 0x1000);
  f.hub.fire(1, 2, 3, address(0x1000));
  CHECK(f.hub.pop(&record));
  CHECK_EQ(record.wrong_address, 0u);
  f.hub.fire(1, 2, 3, address(0x2000));
  CHECK(f.hub.pop(&record));
  CHECK_EQ(record.wrong_address, 0x2000u);
  f.hub.fire(-5, 1000, -1, address(0x2000));  // out of every range: no crash
  CHECK(f.hub.pop(&record));
  CHECK_EQ(record.step_low, static_cast<uint32_t>(-5));
}

TEST(registry_drops_triggers_of_closed_engines) {
  auto first = std::make_unique<Fixture>();
  const int index = TriggerRegistry::add(&first->hub);
  CHECK(index >= 0);
  TriggerRegistry::fire(index, 1, 0, 0, nullptr);
  CHECK_EQ(first->stats.triggers.load(), 1u);
  TriggerRegistry::remove(index);
  first.reset();
  Fixture second;
  const int other = TriggerRegistry::add(&second.hub);
  CHECK(other != index);  // an old program cannot trigger a new engine
  TriggerRegistry::fire(index, 1, 0, 0, nullptr);
  TriggerRegistry::fire(-1, 1, 0, 0, nullptr);
  TriggerRegistry::fire(1 << 30, 1, 0, 0, nullptr);
  CHECK_EQ(second.stats.triggers.load(), 0u);
  TriggerRegistry::remove(other);
}

TEST(registry_removal_waits_for_handlers) {
  for (int round = 0; round < 200; ++round) {
    auto fixture = std::make_unique<Fixture>(1 << 16);
    const int index = TriggerRegistry::add(&fixture->hub);
    std::atomic<bool> stop{false};
    std::thread handler([&] {
      while (!stop.load()) TriggerRegistry::fire(index, 1, 0, 0, nullptr);
    });
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    TriggerRegistry::remove(index);
    fixture.reset();  // a handler that still used it would be caught by the sanitizer
    stop.store(true);
    handler.join();
  }
}

TEST(waiter_never_misses_a_wake_up) {
  Waiter waiter;
  Inbox inbox(&waiter);
  std::atomic<bool> stop{false};
  int ran = 0;
  std::thread sleeper([&] {
    while (!stop.load()) {
      if (inbox.run()) continue;
      waiter.announce();
      if (!inbox.empty() || stop.load()) {
        waiter.retract();
        continue;
      }
      waiter.block(-1);  // for ever: a missed wake-up would hang the test
    }
  });
  for (int i = 0; i < 20000; ++i) CHECK(inbox.call([&] { ++ran; }));
  stop.store(true);
  waiter.wake();
  sleeper.join();
  CHECK_EQ(ran, 20000);
  inbox.close();
  CHECK(!inbox.post([] {}));
}
