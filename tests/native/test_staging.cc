// Sending from device memory that the NIC cannot read: through pinned memory, over the fake driver.
#include <cstring>
#include <set>
#include <thread>

#include "device_nodes.h"
#include "stranger.h"

using namespace check;
using namespace ffi_transport;

namespace {

constexpr size_t kPage = 4096;
constexpr PageUnit kWhole{kPage, 0, kPage, 0, kPage};

EngineOptions staged(uint64_t bytes = 8 << 20, uint32_t delay = 0, uint64_t seed = 1) {
  EngineOptions how = options(delay, seed);
  how.staging_bytes = bytes;
  return how;
}

void check_pages(const DeviceBuffer& from, const Node& to, const PageLists& lists) {
  for (size_t i = 0; i < lists.source.size(); ++i) {
    CHECK(std::memcmp(from.memory.data() + lists.source[i] * kPage,
                      to.memory.data() + lists.destination[i] * kPage, kPage) == 0);
  }
}

void check_completed(Node& node, int64_t transfer) {
  const Event ended = node.wait(EventKind::kTransferEnded);
  CHECK_EQ(ended.text, "");
  CHECK_EQ(ended.id, transfer);
  CHECK_EQ(ended.outcome, static_cast<int>(TransferOutcome::kCompleted));
}

bool drained(Node& node) {
  return eventually([&] { return node.stat("staging_bytes_held") == 0; });
}

// What of a device is alive, which tests before may have left: no more may be when engines are
// gone.
struct Alive {
  static constexpr const char* kWhat[] = {"host", "stream", "event", "context"};
  std::vector<int> before;
  Alive() {
    for (const char* what : kWhat) before.push_back(fake_cuda_live(what));
  }
  void check_nothing_more() const {
    for (size_t i = 0; i < before.size(); ++i) CHECK_EQ(fake_cuda_live(kWhat[i]), before[i]);
  }
};

}  // namespace

TEST(staged_pages_arrive_whole_and_in_any_order) {
  FakeDriver driver;
  const Alive alive;
  int round = 0;
  for (const Shape& shape : kShapes) {
    for (const uint32_t delay : {0u, 20u}) {
      for (const uint64_t bytes : {6u << 20, 64u << 20}) {
        ++round;
        fake_cuda_set_delay(round, round % 2 ? 200 : 0);
        Node a(with_domains(staged(bytes, delay, round), shape.here), 4096);
        Node b(with_domains(staged(bytes, delay, round), shape.there), 16 << 20);
        DeviceBuffer from(a, 16 << 20);
        CHECK_EQ(static_cast<int>(a.engine->memory_mode(from.region)->first),
                 static_cast<int>(MemoryMode::kStaged));
        const int64_t peer = connect(a, b);
        const PageLists lists = shuffled(4096, round);
        CHECK_OK(b.engine->counters().arm(5, 4096, false));
        const int64_t transfer = *a.engine->open_transfer(peer, 5);
        CHECK_OK(a.engine->write_paged(transfer, from.region, b.remote, lists, kWhole));
        CHECK_OK(a.engine->seal(transfer));
        check_completed(a, transfer);
        b.wait(EventKind::kCounterReached);
        check_pages(from, b, lists);
        CHECK_EQ(a.stat("staged_bytes"), uint64_t{16 << 20});
        CHECK_EQ(a.stat("staged_writes"), a.stat("writes_completed"));
        CHECK_EQ(b.stat("staged_bytes"), 0u);
        CHECK(drained(a));
        CHECK_OK(a.engine->deregister(from.region));
      }
    }
  }
  alive.check_nothing_more();
}

TEST(staged_writes_wait_for_their_copies) {
  FakeDriver driver;
  Node a(staged()), b(staged());
  DeviceBuffer from(a, 1 << 20);
  const int64_t peer = connect(a, b);
  fake_cuda_hold(1);
  CHECK_OK(b.engine->counters().arm(5, 256, false));
  const int64_t transfer = *a.engine->open_transfer(peer, 5);
  const PageLists lists = shuffled(256, 3);
  CHECK_OK(a.engine->write_paged(transfer, from.region, b.remote, lists, kWhole));
  CHECK_OK(a.engine->seal(transfer));
  CHECK(eventually([&] { return a.stat("staged_bytes") == 1 << 20; }));
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  CHECK_EQ(a.stat("writes_posted"), 0u);
  // The device computes until the copy reads it: what it holds then is what is sent.
  randomize(&from.memory, 99);
  fake_cuda_hold(0);
  check_completed(a, transfer);
  b.wait(EventKind::kCounterReached);
  check_pages(from, b, lists);
  CHECK_EQ(count_in_log("ran cuMemcpyDtoHAsync_v2"), count_in_log("cuMemcpyDtoHAsync_v2") / 2);
}

TEST(staged_and_registered_memory_share_a_transfer) {
  FakeDriver driver;
  EngineOptions how = staged();
  how.bytes_in_flight = 64 << 10;
  Node a(how, 4 << 20), b(how, 16 << 20);
  randomize(&a.memory, 8);
  DeviceBuffer first(a, 4 << 20, 0), second(a, 4 << 20, 1);
  const int64_t peer = connect(a, b);
  CHECK_OK(b.engine->counters().arm(1, 2 * 1024 + 4, false));
  const int64_t transfer = *a.engine->open_transfer(peer, 1);
  CHECK_OK(a.engine->write_paged(transfer, first.region, b.remote, shuffled(1024, 1), kWhole));
  // In writes of a MiB, each more than the window.
  CHECK_OK(a.engine->write(transfer, a.region, 0, b.remote, 4 << 20, 4 << 20, 4));
  CHECK_OK(
      a.engine->write_paged(transfer, second.region, b.remote, shuffled(1024, 2, 2048), kWhole));
  CHECK_OK(a.engine->seal(transfer));
  check_completed(a, transfer);
  b.wait(EventKind::kCounterReached);
  check_pages(first, b, shuffled(1024, 1));
  check_pages(second, b, shuffled(1024, 2, 2048));
  CHECK(std::memcmp(a.memory.data(), b.memory.data() + (4 << 20), 4 << 20) == 0);
}

TEST(staged_room_is_bounded_and_waited_for) {
  FakeDriver driver;
  fake_cuda_set_delay(3, 100);
  Node a(staged(2 << 20, 30)), b(staged(2 << 20, 30), 16 << 20);
  DeviceBuffer from(a, 16 << 20);
  const int64_t peer = connect(a, b);
  const int64_t transfer = *a.engine->open_transfer(peer, 1);
  // Units of a MiB: each is half of the ring.
  CHECK_OK(a.engine->write(transfer, from.region, 0, b.remote, 0, 16 << 20, 16));
  CHECK_OK(a.engine->seal(transfer));
  uint64_t most = 0;
  bool ended = false;
  CHECK(eventually([&] {
    most = std::max(most, a.stat("staging_bytes_held"));
    ended = a.has(EventKind::kTransferEnded);
    return ended;
  }));
  CHECK(most > 0);
  CHECK(most <= 2 << 20);
  CHECK(a.stat("staging_waits") > 0);
  CHECK(from.memory == std::vector<char>(b.memory.begin(), b.memory.end()));
}

TEST(staged_cancel_ends_after_its_copies) {
  FakeDriver driver;
  Node a(staged()), b(staged());
  DeviceBuffer from(a, 1 << 20);
  const int64_t peer = connect(a, b);
  fake_cuda_hold(1);
  const int64_t transfer = *a.engine->open_transfer(peer, 3);
  CHECK_OK(a.engine->write_paged(transfer, from.region, b.remote, shuffled(256, 1), kWhole));
  CHECK(eventually([&] { return a.stat("staged_bytes") == 1 << 20; }));
  CHECK_OK(a.engine->cancel(transfer));
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  CHECK(!a.has(EventKind::kTransferEnded));
  fake_cuda_hold(0);
  const Event ended = a.wait(EventKind::kTransferEnded);
  CHECK_EQ(ended.outcome, static_cast<int>(TransferOutcome::kCancelled));
  CHECK_EQ(ended.first, 0);
  CHECK(drained(a));
  CHECK_EQ(a.stat("writes_posted"), 0u);
  CHECK_EQ(b.stat("units_received"), 0u);
}

TEST(staged_room_of_a_fenced_peer_is_kept_until_its_copies_end) {
  FakeDriver driver;
  EngineOptions how = staged(2 << 20);
  Node a(how), lost(how), next(how);
  DeviceBuffer from(a, 1 << 20);
  const int64_t peer = connect(a, lost), other = connect(a, next);
  fake_cuda_hold(1);
  const int64_t transfer = *a.engine->open_transfer(peer, 3);
  CHECK_OK(a.engine->write_paged(transfer, from.region, lost.remote, shuffled(256, 1), kWhole));
  CHECK(eventually([&] { return a.stat("staged_bytes") == 1 << 20; }));  // all that it may hold
  CHECK_OK(a.engine->control().fence(peer));
  CHECK_EQ(a.wait(EventKind::kTransferEnded).outcome, static_cast<int>(TransferOutcome::kFailed));
  a.wait(EventKind::kPeerLost);
  // The device goes on writing there, so the other half is all that there is.
  const PageLists lists = shuffled(256, 2);
  const int64_t second = *a.engine->open_transfer(other, 4);
  CHECK_OK(a.engine->write_paged(second, from.region, next.remote, lists, kWhole));
  CHECK_OK(a.engine->seal(second));
  CHECK(eventually([&] { return a.stat("staged_bytes") > 1 << 20; }));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  std::set<std::string> targets;
  const std::string log = fake_cuda_log();
  size_t copies = 0;
  for (size_t at = log.find("cuMemcpyDtoHAsync_v2 "); at != std::string::npos;
       at = log.find("cuMemcpyDtoHAsync_v2 ", at + 1)) {
    const size_t begin = at + std::strlen("cuMemcpyDtoHAsync_v2 ");
    targets.insert(log.substr(begin, log.find(' ', begin) - begin));
    ++copies;
  }
  CHECK_EQ(targets.size(), copies);  // no place twice
  std::thread release([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    fake_cuda_hold(0);
  });
  check_completed(a, second);
  release.join();
  check_pages(from, next, lists);
  CHECK(drained(a));
  CHECK_EQ(lost.stat("units_received"), 0u);
}

TEST(staged_deregister_waits_for_copies) {
  FakeDriver driver;
  Node a(staged()), b(staged());
  DeviceBuffer from(a, 1 << 20);
  const int64_t peer = connect(a, b);
  fake_cuda_hold(1);
  const int64_t transfer = *a.engine->open_transfer(peer, 3);
  CHECK_OK(a.engine->write_paged(transfer, from.region, b.remote, shuffled(256, 1), kWhole));
  CHECK(eventually([&] { return a.stat("staged_bytes") == 1 << 20; }));
  CHECK_OK(a.engine->control().fence(peer));
  std::thread release([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    fake_cuda_note("released");
    fake_cuda_hold(0);
  });
  CHECK_OK(a.engine->deregister(from.region));
  fake_cuda_note("deregistered");
  release.join();
  const std::string log = fake_cuda_log();
  CHECK(log.find("released") < log.find("deregistered"));
  CHECK(log.rfind("ran cuMemcpyDtoHAsync_v2") < log.find("deregistered"));
}

TEST(staged_failures_of_the_device_fail_their_transfer_alone) {
  const Alive alive;
  constexpr int kIllegalAddress = 700;
  struct Case {
    const char* function;
    int skip;  // calls that succeed, such as those that make the ring
  };
  for (const Case& one :
       {Case{"cuMemcpyDtoHAsync_v2", 0}, Case{"cuMemcpyDtoHAsync_v2", 2}, Case{"cuEventCreate", 0},
        Case{"cuEventRecord", 0}, Case{"cuEventQuery", 0}, Case{"cuCtxPushCurrent_v2", 1}}) {
    FakeDriver driver;
    Node a(staged()), b(staged());
    DeviceBuffer from(a, 1 << 20);
    const int64_t peer = connect(a, b);
    fake_cuda_fail(one.function, kIllegalAddress, one.skip, 1);
    const PageLists lists = shuffled(256, 1);
    const int64_t broken = *a.engine->open_transfer(peer, 3);
    CHECK_OK(a.engine->write_paged(broken, from.region, b.remote, lists, kWhole));
    CHECK_OK(a.engine->seal(broken));
    const Event ended = a.wait(EventKind::kTransferEnded);
    CHECK_EQ(ended.outcome, static_cast<int>(TransferOutcome::kFailed));
    CHECK(ended.text.find("CUDA error 700") != std::string::npos);
    CHECK_EQ(a.stat("staging_failures"), 1u);
    CHECK(drained(a));
    const int64_t next = *a.engine->open_transfer(peer, 4);
    CHECK_OK(a.engine->write_paged(next, from.region, b.remote, lists, kWhole));
    CHECK_OK(a.engine->seal(next));
    check_completed(a, next);
    check_pages(from, b, lists);
    CHECK(drained(a));
  }
  alive.check_nothing_more();
}

namespace {

// A peer whose data endpoint is there but takes nothing.
struct Deaf : Stranger {
  std::unique_ptr<Endpoint> data = domain->open_endpoint(0).take();
  explicit Deaf(Node& node) : Stranger(node.engine->control_address()) {
    Hello greeting_of = hello("loopback", 0);
    greeting_of.data_names.push_back(data->name());
    send(greeting(greeting_of));
  }
};

}  // namespace

TEST(staged_peers_that_take_nothing_leave_room_for_others) {
  FakeDriver driver;
  EngineOptions how = staged(4 << 20);
  how.bytes_in_flight = 256 << 10;
  Node a(how), b(how);
  DeviceBuffer from(a, 1 << 20);
  Deaf deaf(a);
  const int64_t stuck = a.wait(EventKind::kPeerConnected).peer;
  const int64_t peer = connect(a, b);
  RemoteRegion nowhere;
  nowhere.length = 1 << 20;
  nowhere.domains = {{0, 1, 0}};
  const int64_t hopeless = *a.engine->open_transfer(stuck, 1);
  for (int i = 0; i < 16; ++i) {
    CHECK_OK(a.engine->write_paged(hopeless, from.region, nowhere, shuffled(256, i), kWhole));
  }
  CHECK(eventually([&] { return a.stat("staging_waits") > 0; }));
  for (int i = 0; i < 8; ++i) {
    const PageLists lists = shuffled(256, 50 + i);
    const int64_t transfer = *a.engine->open_transfer(peer, 2);
    CHECK_OK(a.engine->write_paged(transfer, from.region, b.remote, lists, kWhole));
    CHECK_OK(a.engine->seal(transfer));
    check_completed(a, transfer);
    check_pages(from, b, lists);
  }
  // What was copied for it but not posted does not hold a cancel up; what was posted does.
  CHECK_OK(a.engine->cancel(hopeless));
  CHECK_OK(a.engine->control().fence(stuck));
  a.wait(EventKind::kTransferEnded);
  CHECK(drained(a));
}

TEST(staged_sources_of_a_plan_are_sent_when_their_triggers_fire) {
  FakeDriver driver;
  fake_cuda_set_delay(7, 300);
  Node a(with_domains(staged(8 << 20, 10), 2)), b(with_domains(staged(8 << 20, 10), 2));
  DeviceBuffer first(a, 256 << 10, 0, std::vector<int64_t>{0});
  DeviceBuffer second(a, 256 << 10, 1, std::vector<int64_t>{1});
  const DeviceBuffer* sources[] = {&first, &second};
  const int64_t peer = connect(a, b);
  for (int ordinal = 0; ordinal < 2; ++ordinal) {
    CHECK_OK(a.engine->set_source_region(ordinal, 0, sources[ordinal]->region));
  }
  CHECK_OK(b.engine->counters().arm(1, 64 * 2, false));
  const int64_t transfer = *a.engine->open_transfer(peer, 1);
  std::vector<Engine::PlanRequest> requests(2);
  for (int ordinal = 0; ordinal < 2; ++ordinal) {
    requests[ordinal].transfer = transfer;
    requests[ordinal].ordinal = ordinal;
    requests[ordinal].pages = shuffled(64, ordinal, ordinal * 64);
    requests[ordinal].unit = kWhole;
    requests[ordinal].remotes = {b.remote};
  }
  CHECK_OK(a.engine->add_plan(1, {0, 1}, 1, std::move(requests), 20));
  CHECK_OK(a.engine->seal(transfer));
  for (int ordinal = 0; ordinal < 2; ++ordinal) {
    TriggerRegistry::fire(a.engine->index(), 1, ordinal, 0, sources[ordinal]->memory.data());
  }
  check_completed(a, transfer);
  b.wait(EventKind::kCounterReached);
  for (int ordinal = 0; ordinal < 2; ++ordinal) {
    check_pages(*sources[ordinal], b, shuffled(64, ordinal, ordinal * 64));
  }
  CHECK_EQ(a.stat("trigger_faults"), 0u);
}

TEST(staged_engines_close_in_the_middle_of_copies) {
  FakeDriver driver;
  const Alive alive;
  for (int round = 0; round < 12; ++round) {
    const Shape& shape = kShapes[round % 2];
    fake_cuda_set_delay(round, 400);
    Node a(with_domains(staged(8 << 20, 10, round), shape.here));
    Node b(with_domains(staged(8 << 20, 10, round + 100), shape.there), 4 << 20);
    DeviceBuffer from(a, 1 << 20, round % 3);
    const int64_t peer = connect(a, b);
    for (int i = 0; i < 4; ++i) {
      const int64_t transfer = *a.engine->open_transfer(peer, i);
      CHECK_OK(a.engine->write_paged(transfer, from.region, b.remote, shuffled(256, i, 256 * i),
                                     kWhole));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
    if (round % 2) b.engine->close();
    a.engine->close();
    int ended = 0;
    for (const Event& event : a.engine->poll(0)) ended += event.kind == EventKind::kTransferEnded;
    CHECK_EQ(ended, 4);
    alive.check_nothing_more();
  }
  alive.check_nothing_more();
}
