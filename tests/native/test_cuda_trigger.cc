// What the trigger puts on a stream, and the poller behind it, with streams of the fake driver.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <thread>

#include "check.h"
#include "cuda_trigger.h"
#include "fake_cuda.h"
#include "fake_driver.h"
#include "slot_fixture.h"

using namespace ffi_transport;
using check::board_of;
using check::FakeDriver;
using Fixture = check::SlotFixture;

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
  void drain() { fake_cuda_drain(stream); }
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

// XLA calls the handler once, while its thread captures, and replays what that recorded: with the
// number that the device holds by then.
TEST(cuda_trigger_is_captured_and_replayed) {
  FakeDriver fake;
  auto board = board_of({0, 1}, 2, true);
  constexpr int kEngine = TriggerRegistry::kEngines - 6;
  CudaTriggers::install(kEngine, board);
  Stream one(1);
  CudaTrigger copies = one.call(kEngine, 1);
  copies.out = reinterpret_cast<uint64_t>(one.out.data());
  fake_cuda_begin_capture(one.stream);
  CHECK_EQ(CudaTriggers::enqueue(one.call(kEngine, 0)), cuda::kSuccess);
  CHECK_EQ(CudaTriggers::enqueue(copies), cuda::kSuccess);
  void* const graph = fake_cuda_end_capture();
  CHECK(graph != nullptr);
  one.drain();
  CHECK_EQ(board->load(1, 0), 0);  // nothing has run
  for (const int32_t step : {7, 8}) {
    one.step = step;
    one.x.assign(one.x.size(), static_cast<char>(step));
    fake_cuda_launch(graph, one.stream);
    one.drain();
    for (const int layer : {0, 1}) CHECK_EQ(board->load(1, layer), step);
    CHECK(one.out == one.x);
  }
  CHECK_EQ(board->load(0, 0), 0);
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
