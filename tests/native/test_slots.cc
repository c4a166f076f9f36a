// Slots and the thread that polls them, with a thread of the test (or a fake stream) that plays the
// device.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <random>
#include <set>
#include <thread>

#include "check.h"
#include "cuda_trigger.h"
#include "fake_cuda.h"
#include "fake_driver.h"
#include "slot_board.h"
#include "slot_poller.h"
#include "trigger_hub.h"

using namespace ffi_transport;
using check::FakeDriver;

namespace {

constexpr int kLayers = 40;  // more than a cache line's worth

std::shared_ptr<SlotBoard> board_of(const std::vector<int>& ordinals, int layers, bool device) {
  auto board = SlotBoard::create(ordinals, layers, device);
  CHECK_OK(board.status());
  return board.take();
}

using Trigger = std::tuple<uint32_t, int, int>;  // step, ordinal, layer

struct Fixture {
  Waiter waiter;
  Stats stats;
  std::atomic<uint64_t> order{1};
  TriggerHub hub;
  std::shared_ptr<SlotBoard> board;
  SlotPoller poller;
  std::vector<TriggerRecord> seen;

  explicit Fixture(std::vector<int> ordinals = {0}, int layers = kLayers, size_t ring = 1 << 12)
      : hub(&waiter, &order, &stats, false, ring),
        board(board_of(ordinals, layers, false)),
        poller(board, &hub, &stats) {
    hub.set_slots(board);
  }
  // As the device would: the handler notes the address, the stream stores.
  void store(uint32_t step, int ordinal, int layer) {
    hub.fire(static_cast<int32_t>(step), ordinal, layer, reinterpret_cast<const void*>(0x1000));
  }
  size_t read() {
    TriggerRecord record;
    while (hub.pop(&record)) seen.push_back(record);
    return seen.size();
  }
  bool reads(size_t count) {
    return check::eventually([&] { return read() >= count; });
  }
  bool sleeps() {
    const auto blocks = [&] { return stats.thread_blocks.load(); };
    const uint64_t before = blocks();
    poller.forget(-1);  // wakes it, if it can be woken
    return check::eventually([&] { return blocks() > before; });
  }
  std::set<Trigger> triggers() const {
    std::set<Trigger> out;
    for (const TriggerRecord& r : seen) out.emplace(r.step_low, r.ordinal, r.layer);
    CHECK_EQ(out.size(), seen.size());  // none twice
    return out;
  }
};

}  // namespace

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

namespace {

// A device's stream and memory, and a trigger call as the FFI handler makes it.
struct Stream {
  std::shared_ptr<CudaDevice> device;
  cuda::Stream stream = nullptr;
  int32_t step = 0;  // "device memory"
  std::vector<char> x = std::vector<char>(1000), out = std::vector<char>(1000);

  explicit Stream(int ordinal) {
    auto opened = CudaDevice::open(ordinal);
    CHECK_OK(opened.status());
    device = opened.take();
    CudaCurrent current(*device);
    CHECK_EQ(device->driver().stream_create(&stream, cuda::kStreamNonBlocking), cuda::kSuccess);
  }
  ~Stream() {
    CudaCurrent current(*device);
    device->driver().stream_destroy(stream);
  }
  CudaTrigger call(int engine, int layer) {
    CudaTrigger call;
    call.engine = engine;
    call.ordinal = device->ordinal();
    call.layer = layer;
    call.step = reinterpret_cast<uint64_t>(&step);
    call.x = call.out = reinterpret_cast<uint64_t>(x.data());
    call.bytes = x.size();
    call.cache = reinterpret_cast<const void*>(0x5000);
    call.stream = stream;
    return call;
  }
  void drain() {
    CudaCurrent current(*device);
    CHECK_EQ(device->driver().stream_synchronize(stream), cuda::kSuccess);
  }
};

size_t logged(const std::string& words) {
  const std::string log = fake_cuda_log();
  size_t count = 0;
  for (size_t at = 0; (at = log.find(words, at)) != std::string::npos; ++at) ++count;
  return count;
}

}  // namespace

TEST(cuda_slots_are_pinned_or_refused) {
  FakeDriver fake;
  fake_cuda_set_devices(2);
  CHECK_FAILS(SlotBoard::create({0, 2}, 4, true).status(), Code::kInvalid, "this process sees 2");
  fake_cuda_fail("cuMemHostAlloc", cuda::kOutOfMemory, 0, 1);
  CHECK_FAILS(SlotBoard::create({0, 1}, 4, true).status(), Code::kUnavailable,
              "slots cannot be pinned: CUDA_ERROR_OUT_OF_MEMORY");
  CHECK_EQ(fake_cuda_live("context"), 0);
  {
    auto board = board_of({1, 0}, 4, true);
    CHECK_EQ(fake_cuda_live("host"), 1);
    CHECK_EQ(fake_cuda_live("context"), 2);
    CHECK_EQ(logged("cuMemHostAlloc 256 1\n"), 2u);  // portable; the refused one, too
    CHECK_EQ(board->device(0).ordinal(), 1);
    for (int layer = 0; layer < 4; ++layer) CHECK_EQ(board->load(1, layer), 0);
  }
  CHECK_EQ(fake_cuda_live("host"), 0);
  CHECK_EQ(fake_cuda_live("context"), 0);
}

TEST(cuda_trigger_enqueues_two_copies_and_waits_for_none) {
  FakeDriver fake;
  auto board = board_of({0, 1}, 3, true);
  constexpr int kEngine = TriggerRegistry::kEngines - 1;
  CudaTriggers::install(kEngine, board);
  Stream one(1);
  one.step = 77;
  std::memset(one.x.data(), 5, one.x.size());
  fake_cuda_hold(1);
  CudaTrigger call = one.call(kEngine, 2);
  call.out = reinterpret_cast<uint64_t>(one.out.data());
  std::atomic<int> result{-1};  // it returns, though nothing runs
  std::thread caller([&] { result.store(CudaTriggers::enqueue(call)); });
  CHECK(check::eventually([&] { return result.load() == cuda::kSuccess; }));
  caller.join();
  CHECK_EQ(board->load(1, 2), 0);
  CHECK_EQ(board->address(1, 2), 0x5000u);
  fake_cuda_hold(0);
  one.drain();
  CHECK_EQ(board->load(1, 2), 77);
  CHECK_EQ(board->load(0, 2), 0);
  CHECK(one.out == one.x);
  CHECK_EQ(logged("\ncuMemcpyDtoDAsync_v2"), 1u);
  CHECK_EQ(logged("\ncuMemcpyDtoHAsync_v2"), 1u);
  // In this order: the slot says that everything before it is done.
  const std::string log = fake_cuda_log();
  CHECK(log.find("ran cuMemcpyDtoDAsync_v2") < log.find("ran cuMemcpyDtoHAsync_v2"));

  one.step = 78;  // aliased: one copy
  CHECK_EQ(CudaTriggers::enqueue(one.call(kEngine, 2)), cuda::kSuccess);
  one.drain();
  CHECK_EQ(board->load(1, 2), 78);
  CHECK_EQ(logged("\ncuMemcpyDtoDAsync_v2"), 1u);
  CHECK_EQ(logged("\ncuMemcpyDtoHAsync_v2"), 2u);

  // The thread's current context is as before: here none.
  cuda::Stream stream = nullptr;
  CHECK_EQ(one.device->driver().stream_create(&stream, 0), cuda::kInvalidContext);
}

// A captured graph holds the slots' addresses: they stay, whoever else is gone.
TEST(cuda_slots_outlive_their_owner) {
  FakeDriver fake;
  constexpr int kEngine = TriggerRegistry::kEngines - 5;
  auto board = board_of({0}, 1, true);
  const void* slot = board->slot(0, 0);
  CudaTriggers::install(kEngine, board);
  board.reset();
  Stream stream(0);
  stream.step = 5;
  CHECK_EQ(CudaTriggers::enqueue(stream.call(kEngine, 0)), cuda::kSuccess);
  stream.drain();
  CHECK_EQ(*static_cast<const int32_t*>(slot), 5);
}

TEST(cuda_trigger_without_slots_passes_x_on) {
  FakeDriver fake;
  auto board = board_of({0}, 3, true);
  constexpr int kEngine = TriggerRegistry::kEngines - 2;
  CudaTriggers::install(kEngine, board);
  Stream one(1);
  CudaCurrent xla(*one.device);  // as XLA has it when it calls
  std::memset(one.x.data(), 9, one.x.size());
  for (CudaTrigger call : {one.call(kEngine, 0), one.call(kEngine - 1, 0), one.call(-1, 0),
                           one.call(1 << 30, 0), one.call(kEngine, -1), one.call(kEngine, 3)}) {
    CHECK_EQ(CudaTriggers::enqueue(call), cuda::kSuccess);
    std::fill(one.out.begin(), one.out.end(), 0);
    call.out = reinterpret_cast<uint64_t>(one.out.data());
    CHECK_EQ(CudaTriggers::enqueue(call), cuda::kSuccess);
    one.drain();
    CHECK(one.out == one.x);
  }
  CHECK_EQ(logged("cuMemcpyDtoHAsync_v2"), 0u);
  for (int layer = 0; layer < 3; ++layer) CHECK_EQ(board->load(0, layer), 0);
}

TEST(cuda_trigger_refusals_are_told) {
  FakeDriver fake;
  Fixture f({0}, 3);
  auto board = board_of({0}, 3, true);
  SlotPoller poller(board, &f.hub, &f.stats);
  constexpr int kEngine = TriggerRegistry::kEngines - 3;
  CudaTriggers::install(kEngine, board);
  Stream stream(0);
  stream.step = 1;
  poller.watch(1, {0}, 3);
  fake_cuda_fail("cuMemcpyDtoHAsync_v2", cuda::kInvalidHandle, 1, 1);
  for (int layer = 0; layer < 3; ++layer) {
    CHECK_EQ(CudaTriggers::enqueue(stream.call(kEngine, layer)), cuda::kSuccess);
  }
  CHECK(f.reads(4));
  size_t refused = 0;
  for (const TriggerRecord& record : f.seen) {
    if (record.refusal == cuda::kSuccess) continue;
    ++refused;
    CHECK_EQ(record.refusal, cuda::kInvalidHandle);
    CHECK_EQ(record.layer, 1);
  }
  CHECK_EQ(refused, 1u);
  stream.drain();
  // A copy of x is no trigger: the program needs it.
  fake_cuda_fail("cuMemcpyDtoDAsync_v2", cuda::kInvalidHandle, 0, 1);
  CudaTrigger call = stream.call(kEngine, 0);
  call.out = reinterpret_cast<uint64_t>(stream.out.data());
  CHECK_EQ(CudaTriggers::enqueue(call), cuda::kInvalidHandle);
  stream.drain();
}

// Streams of several devices play graphs: each step's calls are enqueued at once, ahead of the
// device, and what a layer wrote is read when its slot is seen.
TEST(cuda_streams_are_followed_to_what_they_wrote) {
  FakeDriver fake;
  constexpr int kDevices = 2, kDepth = 5, kEngine = TriggerRegistry::kEngines - 4;
  constexpr uint32_t kFirst = 0xFFFFFFFFu - 20, kSteps = 40;
  Fixture f({0}, 1, 1 << 12);
  auto board = board_of({0, 1}, kDepth, true);
  SlotPoller poller(board, &f.hub, &f.stats);
  CudaTriggers::install(kEngine, board);
  fake_cuda_set_delay(11, 60);
  std::vector<std::unique_ptr<Stream>> streams;
  // "Cache": one page of 64 numbers for each step (of four), layer and device, which only the
  // device's stream writes. It is read without a lock, after the trigger, as a NIC would.
  constexpr int kPage = 64;
  static uint64_t source[4][kDepth][kDevices][kPage], cache[4][kDepth][kDevices][kPage];
  static int32_t steps[4];
  for (int d = 0; d < kDevices; ++d) streams.push_back(std::make_unique<Stream>(d));
  size_t checked = 0;
  std::array<uint32_t, kDevices> count = {};
  const auto check_new = [&] {
    f.read();
    for (; checked < f.seen.size(); ++checked) {
      const TriggerRecord& r = f.seen[checked];
      const uint32_t i = r.step_low - kFirst;
      CHECK(i < kSteps);
      ++count[r.ordinal];
      for (const uint64_t value : cache[i % 4][r.layer][r.ordinal]) {
        CHECK_EQ(value, uint64_t{i} * 1000 + r.layer * 10 + r.ordinal);
      }
    }
  };
  for (uint32_t i = 0; i < kSteps; ++i) {
    poller.watch(int64_t{kFirst} + i, {0, 1}, kDepth);
    steps[i % 4] = static_cast<int32_t>(kFirst + i);
    for (int d = 0; d < kDevices; ++d) {
      CudaCurrent current(*streams[d]->device);
      const CudaDriver& driver = streams[d]->device->driver();
      for (int layer = 0; layer < kDepth; ++layer) {
        const auto at = [&](auto& array) { return &array[i % 4][layer][d][0]; };
        std::fill_n(at(source), kPage, uint64_t{i} * 1000 + layer * 10 + d);
        CHECK_EQ(driver.memcpy_dtod_async(reinterpret_cast<uint64_t>(at(cache)),
                                          reinterpret_cast<uint64_t>(at(source)),
                                          kPage * sizeof(uint64_t), streams[d]->stream),
                 cuda::kSuccess);
        CudaTrigger call = streams[d]->call(kEngine, layer);
        call.step = reinterpret_cast<uint64_t>(&steps[i % 4]);
        CHECK_EQ(CudaTriggers::enqueue(call), cuda::kSuccess);
      }
    }
    // Three steps in flight on each device: the page that the next one writes has been read.
    while (std::ranges::min(count) + 3 * kDepth < (i + 1) * kDepth) {
      check_new();
      std::this_thread::yield();
    }
  }
  CHECK(check::eventually([&] {
    check_new();
    return f.seen.size() == kSteps * kDevices * kDepth;
  }));
  f.triggers();
  poller.stop();
}
