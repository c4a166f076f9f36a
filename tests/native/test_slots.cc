// Slots and the thread that polls them, with a thread of the test that plays the device.
#include <algorithm>
#include <atomic>
#include <random>
#include <thread>

#include "check.h"
#include "slot_fixture.h"

using namespace ffi_transport;
using check::board_of;
using check::kLayers;
using Fixture = check::SlotFixture;

TEST(slots_refuse_what_they_cannot_hold) {
  const auto refuses = [](std::vector<int> ordinals, int layers, const char* words) {
    CHECK_FAILS(SlotBoard::create(ordinals, layers, false).status(), Code::kInvalid, words);
  };
  refuses({}, 1, "ordinals: 0 of them, not 1..64");
  refuses({0, 3, 0}, 1, "ordinals: 0 is there twice");
  refuses({0, -1}, 1, "ordinals: -1 is negative");
  refuses({0}, 0, "layers: 0 is not in 1..512");
  refuses({0}, 513, "layers: 513 is not in 1..512");
  Fixture f({5, 2}, 3);
  CHECK_OK(f.poller.check({2, 5}, 3));
  CHECK_FAILS(f.poller.check({2}, 4), Code::kInvalid, "layers: 4, slots were opened for 3");
  CHECK_FAILS(f.poller.check({2, 3}, 3), Code::kInvalid, "no slots were opened for ordinal 3");
}

TEST(slots_compare_steps_round_the_wrap) {
  CHECK(SlotBoard::reached(7, 7));
  CHECK(SlotBoard::reached(8, 7));
  CHECK(!SlotBoard::reached(6, 7));
  CHECK(SlotBoard::reached(0, 0xFFFFFFFFu));
  CHECK(!SlotBoard::reached(-1, 0));
  CHECK(SlotBoard::reached(static_cast<int32_t>(0x80000000u), 0x7FFFFFFFu));
  CHECK(!SlotBoard::reached(0x7FFFFFFF, 0x80000000u));
}

TEST(slots_of_two_ordinals_share_no_line) {
  auto board = board_of({3, 9}, 5, false);
  const auto at = [&](int place, int layer) {
    return reinterpret_cast<uintptr_t>(board->slot(place, layer));
  };
  CHECK_EQ(at(0, 1) - at(0, 0), 4u);
  CHECK(at(0, 0) % 64 == 0);
  CHECK(at(1, 0) / 64 > at(0, 4) / 64);
}

TEST(poller_sends_each_layer_once_in_order) {
  Fixture f({4, 6});
  f.poller.watch(1, {4, 6}, kLayers);
  for (int layer = 0; layer < kLayers; ++layer) {
    f.store(1, 6, layer);
    CHECK(f.reads(2 * static_cast<size_t>(layer) + 1));
    f.store(1, 4, layer);
    CHECK(f.reads(2 * static_cast<size_t>(layer) + 2));
  }
  CHECK_EQ(f.triggers().size(), 2u * kLayers);
  CHECK_EQ(f.stats.triggers.load(), 2u * kLayers);
  CHECK_EQ(f.stats.slot_values_skipped.load(), 0u);
  for (int layer = 0; layer < kLayers; ++layer) {
    CHECK_EQ(f.seen[2 * layer].layer, layer);
    CHECK_EQ(f.seen[2 * layer].ordinal, 6);
    CHECK_EQ(f.seen[2 * layer].wrong_address, 0u);
  }
  CHECK(f.sleeps());
  const uint64_t blocks = f.stats.thread_blocks.load();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK_EQ(f.stats.thread_blocks.load(), blocks);  // for good, not by and by
}

// A slot that skips ahead says that all before it are written; a later step that all of this are.
TEST(poller_sends_all_up_to_what_it_saw) {
  Fixture f;
  f.poller.watch(1, {0}, kLayers);
  f.poller.watch(2, {0}, kLayers);
  f.board->store(0, 17, 1);  // 0 to 16 were late, or were not seen
  CHECK(f.reads(18));
  CHECK_EQ(f.stats.slot_values_skipped.load(), 17u);
  f.board->store(0, 3, 2);  // step 2's layer 3: all of step 1, and 0 to 3 of step 2
  f.board->store(0, kLayers - 1, 1);
  CHECK(f.reads(kLayers + 4));
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK_EQ(f.read(), kLayers + 4u);
  f.board->store(0, kLayers - 1, 3);  // a step without a plan overwrote all
  CHECK(f.reads(2 * kLayers));
  CHECK_EQ(f.triggers().size(), 2u * kLayers);
  CHECK(f.sleeps());
}

TEST(poller_leaves_alone_what_no_plan_awaits) {
  Fixture f({0, 1});
  for (int layer = 0; layer < kLayers; ++layer) f.store(0, 0, layer);  // warm-up
  f.poller.watch(5, {0}, kLayers);                                     // ordinal 1 has no part
  for (int layer = 0; layer < 3; ++layer) {
    f.store(5, 0, layer);
    f.store(5, 1, layer);
  }
  CHECK(f.reads(3));
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK_EQ(f.read(), 3u);
  f.poller.forget(5);  // dropped
  f.store(5, 0, 3);
  CHECK(f.sleeps());
  CHECK_EQ(f.read(), 3u);
  f.board->store(0, 20, 9);      // none of the step's business:
  f.poller.watch(6, {0, 1}, 4);  // it has fewer layers than there are slots
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK_EQ(f.read(), 3u);
  for (int layer = 0; layer < 4; ++layer) {
    f.store(6, 0, layer);
    f.store(6, 1, layer);
  }
  CHECK(f.reads(11));
  CHECK(f.sleeps());
}

// What was dropped is not told, however soon a later value comes.
TEST(poller_has_forgotten_when_it_says_so) {
  std::vector<int> ordinals;
  for (int i = 0; i < TriggerHub::kOrdinals; ++i) ordinals.push_back(i);
  Fixture f(ordinals, TriggerHub::kLayers);  // a round of the poller takes its time
  for (uint32_t step = 1; step <= 100; ++step) {
    f.poller.watch(step, ordinals, TriggerHub::kLayers);
    f.poller.forget(step);
    f.board->store(ordinals.back(), TriggerHub::kLayers - 1, static_cast<int32_t>(step));
  }
  CHECK(f.sleeps());
  CHECK_EQ(f.read(), 0u);
}

// Fresh pinned memory, or the numbers of warm-up, may look like a step that is to come.
TEST(poller_is_not_deceived_by_what_was_there) {
  for (const uint32_t step : {1u, 0x7FFFFFFFu, 0x80000000u, 0xFFFFFFFFu}) {
    for (const uint32_t left :
         {0u, step, step + 1, step + 0x7FFFFFFFu, step + 0x80000000u, 0x80000000u, 0xABABABABu}) {
      Fixture f({0}, 3);
      for (int layer = 0; layer < 3; ++layer) {
        f.board->store(0, layer, static_cast<int32_t>(left));
      }
      f.poller.watch(step, {0}, 3);
      std::this_thread::sleep_for(std::chrono::microseconds(300));
      CHECK_EQ(f.read(), 0u);
      for (int layer = 0; layer < 3; ++layer) f.store(step, 0, layer);
      CHECK(f.reads(3));
      f.poller.watch(int64_t{step} + 1, {0}, 3);
      f.store(step + 1, 0, 0);
      CHECK(f.reads(4));
      std::this_thread::sleep_for(std::chrono::microseconds(300));
      CHECK_EQ(f.read(), 4u);
    }
  }
}

// prepare() runs while earlier steps' stores are on their way: it must overwrite none of them.
TEST(poller_keeps_the_stores_of_steps_in_flight) {
  Fixture f({0}, 1, 1 << 14);
  constexpr uint32_t kFirst = 0x7FFFFFFFu - 300, kSteps = 600;  // over the wrap
  std::atomic<uint32_t> filed{0};
  std::thread device([&] {
    for (uint32_t i = 0; i < kSteps; ++i) {
      while (filed.load(std::memory_order_acquire) <= i) std::this_thread::yield();
      f.store(kFirst + i, 0, 0);
    }
  });
  for (uint32_t i = 0; i < kSteps; ++i) {
    while (f.read() + 4 <= i) std::this_thread::yield();  // at most four are live
    f.poller.watch(int64_t{kFirst} + i, {0}, 1);
    filed.store(i + 1, std::memory_order_release);
  }
  device.join();
  CHECK(f.reads(kSteps));
  CHECK_EQ(f.triggers().size(), size_t{kSteps});
}

TEST(poller_waits_for_room_in_the_ring) {
  Fixture f({0}, kLayers, 16);
  f.poller.watch(1, {0}, kLayers);
  f.board->store(0, kLayers - 1, 1);
  CHECK(check::eventually([&] { return f.stats.triggers.load() == 16; }));
  CHECK(f.reads(kLayers));
  for (int layer = 0; layer < kLayers; ++layer) CHECK_EQ(f.seen[layer].layer, layer);
  CHECK_EQ(f.stats.ring_overflows.load(), 0u);
  CHECK(!f.hub.take_overflow());
}

TEST(poller_tells_of_a_cache_that_moved) {
  Fixture f({0}, 2);
  f.hub.set_address(0, 0, 0x1000);
  f.hub.set_address(0, 1, 0x2000);
  f.poller.watch(1, {0}, 2);
  f.store(1, 0, 0);
  f.store(1, 0, 1);
  CHECK(f.reads(2));
  CHECK_EQ(f.seen[0].wrong_address, 0u);
  CHECK_EQ(f.seen[1].wrong_address, 0x1000u);
}

TEST(poller_stops_while_it_polls) {
  for (int round = 0; round < 50; ++round) {
    Fixture f;
    std::atomic<bool> stop{false};
    std::thread device([&] {
      for (uint32_t layer = 0; !stop.load(); ++layer) f.store(1, 0, layer % kLayers);
    });
    f.poller.watch(1, {0}, kLayers);
    f.poller.watch(2, {0}, kLayers);
    f.poller.stop();
    f.poller.stop();
    f.poller.watch(3, {0}, kLayers);  // after the end: nothing
    f.poller.forget(1);
    stop.store(true);
    device.join();
  }
}

// Random: up to four steps in flight on several devices, each by its own stream, values skipped at
// will, some steps dropped before they run, across the wrap. Every trigger of a step that ran comes
// once, and none before its layer was stored.
TEST(poller_follows_several_devices_and_steps) {
  constexpr int kDevices = 3, kDepth = 7;
  constexpr uint32_t kFirst = 0xFFFFFFFFu - 100, kSteps = 250;
  Fixture f({0, 1, 2}, kDepth, 1 << 14);
  std::atomic<uint32_t> filed{0};
  // How many calls each device has passed, counted before the store of each.
  std::atomic<uint64_t> begun[kDevices] = {};
  const auto dropped = [](uint32_t i) { return i % 17 == 5; };
  std::vector<std::thread> devices;
  for (int d = 0; d < kDevices; ++d) {
    devices.emplace_back([&, d] {
      std::minstd_rand random(static_cast<unsigned>(d + 1));
      for (uint32_t i = 0; i < kSteps; ++i) {
        while (filed.load(std::memory_order_acquire) <= i) std::this_thread::yield();
        if (dropped(i)) continue;
        for (int layer = 0; layer < kDepth; ++layer) {
          begun[d].store(uint64_t{i} * kDepth + layer + 1, std::memory_order_release);
          if (layer == kDepth - 1 || random() % 4 != 0) f.store(kFirst + i, d, layer);
          if (random() % 8 == 0) std::this_thread::yield();
        }
      }
    });
  }
  size_t expected = 0, checked = 0;
  const auto check_new = [&] {
    f.read();
    for (; checked < f.seen.size(); ++checked) {
      const TriggerRecord& r = f.seen[checked];
      const uint32_t i = r.step_low - kFirst;
      CHECK(i < kSteps && !dropped(i));
      CHECK(begun[r.ordinal].load(std::memory_order_acquire) > uint64_t{i} * kDepth + r.layer);
    }
  };
  for (uint32_t i = 0; i < kSteps; ++i) {
    f.poller.watch(int64_t{kFirst} + i, {0, 1, 2}, kDepth);
    if (dropped(i)) {
      f.poller.forget(int64_t{kFirst} + i);
    } else {
      expected += kDevices * kDepth;
    }
    filed.store(i + 1, std::memory_order_release);
    while (f.seen.size() + 4 * kDevices * kDepth <= expected) {
      check_new();
      std::this_thread::yield();
    }
  }
  for (std::thread& device : devices) device.join();
  CHECK(check::eventually([&] {
    check_new();
    return f.seen.size() == expected;
  }));
  f.triggers();
  CHECK(f.stats.slot_values_skipped.load() > 0);
  CHECK(f.sleeps());
}
