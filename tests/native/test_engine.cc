#include <cstring>

#include "engines.h"

using namespace check;
using ffi_transport::Code;

namespace {

void check_pages(const Node& a, const Node& b, const PageLists& lists, size_t page) {
  for (size_t i = 0; i < lists.source.size(); ++i) {
    CHECK(std::memcmp(a.memory.data() + lists.source[i] * page,
                      b.memory.data() + lists.destination[i] * page, page) == 0);
  }
}

}  // namespace

TEST(engine_moves_pages_and_counts_them_in_any_order) {
  for (uint32_t delay : {0u, 30u}) {
    for (size_t domains : {1, 3}) {
      EngineOptions how = options(delay, delay + domains);
      how.domains.assign(domains, "");
      Node a(how), b(how);
      randomize(&a.memory, 1);
      const int64_t peer = connect(a, b);
      constexpr size_t kPage = 512, kPages = 2048;
      const PageLists lists = shuffled(kPages, 7);
      CHECK_OK(b.engine->counters().arm(5, kPages, false));
      const int64_t transfer = *a.engine->open_transfer(peer, 5);
      CHECK_OK(
          a.engine->write_paged(transfer, a.region, b.remote, lists, {kPage, 0, kPage, 0, kPage}));
      CHECK_OK(a.engine->seal(transfer));
      const Event ended = a.wait(EventKind::kTransferEnded);
      CHECK_EQ(ended.outcome, static_cast<int>(TransferOutcome::kCompleted));
      CHECK_EQ(ended.first, static_cast<int64_t>(kPages));
      CHECK_EQ(ended.bytes, static_cast<int64_t>(kPages * kPage));
      const Event reached = b.wait(EventKind::kCounterReached);
      CHECK_EQ(reached.id, 5);
      check_pages(a, b, lists, kPage);
      CHECK_EQ(a.stat("units_completed"), kPages);
      CHECK_EQ(b.stat("units_received"), kPages);
      CHECK_EQ(b.stat("stale_immediates"), 0u);
    }
  }
}

TEST(engine_writes_ranges_with_their_weight) {
  Node a(options(), 3 << 20), b(options(), 3 << 20);
  randomize(&a.memory, 2);
  const int64_t peer = connect(a, b);
  CHECK_OK(b.engine->counters().arm(9, 40, false));
  const int64_t transfer = *a.engine->open_transfer(peer, 9);
  CHECK_OK(a.engine->write(transfer, a.region, 0, b.remote, 0, (2 << 20) + 5, 39));
  CHECK_OK(a.engine->write(transfer, a.region, 2500000, b.remote, 2500000, 1000, 1));
  CHECK_OK(a.engine->seal(transfer));
  b.wait(EventKind::kCounterReached);
  CHECK(std::memcmp(a.memory.data(), b.memory.data(), (2 << 20) + 5) == 0);
  CHECK(std::memcmp(a.memory.data() + 2500000, b.memory.data() + 2500000, 1000) == 0);
  CHECK_EQ(a.wait(EventKind::kTransferEnded).first, 40);
}

TEST(engine_checks_both_ranges_before_it_posts) {
  Node a, b;
  const int64_t peer = connect(a, b);
  const int64_t transfer = *a.engine->open_transfer(peer, 1);
  const uint64_t size = a.memory.size();
  CHECK_FAILS(a.engine->write(transfer, a.region, size - 10, b.remote, 0, 11, 1), Code::kInvalid,
              "source bytes");
  CHECK_FAILS(a.engine->write(transfer, a.region, 0, b.remote, size - 10, 11, 1), Code::kInvalid,
              "destination bytes");
  CHECK_FAILS(a.engine->write(transfer, 99, 0, b.remote, 0, 1, 1), Code::kInvalid,
              "region 99 is not registered");
  CHECK_FAILS(a.engine->write(99, a.region, 0, b.remote, 0, 1, 1), Code::kInvalid,
              "no transfer 99");
  CHECK_FAILS(a.engine->open_transfer(peer, 1 << 20).status(), Code::kInvalid, "slot 1048576");
  CHECK_FAILS(a.engine->open_transfer(77, 1).status(), Code::kInvalid, "no peer 77");
  CHECK_EQ(a.stat("writes_posted"), 0u);
  CHECK_OK(a.engine->seal(transfer));
  CHECK_FAILS(a.engine->write(99, a.region, 0, b.remote, 0, 1, 1), Code::kInvalid, "99");
}

TEST(engine_refuses_writes_on_a_sealed_transfer) {
  Node a, b;
  const int64_t peer = connect(a, b);
  const int64_t transfer = *a.engine->open_transfer(peer, 1);
  PageLists many = shuffled(2048, 1);
  CHECK_OK(a.engine->write_paged(transfer, a.region, b.remote, many, {512, 0, 512, 0, 512}));
  CHECK_OK(a.engine->seal(transfer));
  const auto status = a.engine->write(transfer, a.region, 0, b.remote, 0, 1, 1);
  // Either still under way, and then sealed, or complete already, and then ignored.
  if (!status.ok()) CHECK_FAILS(status, Code::kInvalid, "is sealed");
  a.wait(EventKind::kTransferEnded);
  CHECK_OK(a.engine->write(transfer, a.region, 0, b.remote, 0, 1, 1));
}

TEST(engine_cancel_ends_after_the_drain) {
  for (const Shape& shape : kShapes) {
    EngineOptions how = options(40);
    how.bytes_in_flight = 64 << 10;
    Node a(with_domains(how, shape.here)), b(with_domains(how, shape.there));
    std::fill(a.memory.begin(), a.memory.end(), 1);
    const int64_t peer = connect(a, b);
    const int64_t transfer = *a.engine->open_transfer(peer, 3);
    CHECK_OK(a.engine->write_paged(transfer, a.region, b.remote, shuffled(256, 3),
                                   {4096, 0, 4096, 0, 4096}));
    CHECK(eventually([&] { return a.stat("writes_posted") > 0; }));
    CHECK_OK(a.engine->cancel(transfer));
    const Event ended = a.wait(EventKind::kTransferEnded);
    // Posted equals landed: nothing is on its way when the end is announced.
    CHECK_EQ(a.stat("writes_posted"), a.stat("writes_completed"));
    // The receiver counts a landed write a moment after the sender may know of it.
    const auto landed = static_cast<uint64_t>(ended.first);
    CHECK(eventually([&] { return b.stat("units_received") >= landed; }));
    CHECK_EQ(b.stat("units_received"), landed);
    if (ended.outcome == static_cast<int>(TransferOutcome::kCancelled)) {
      const std::vector<char> before = b.memory;
      CHECK_OK(a.engine->write(transfer, a.region, 0, b.remote, 0, 4096, 1));  // ignored
      const int64_t next = *a.engine->open_transfer(peer, 4);
      CHECK_OK(a.engine->seal(next));
      a.wait(EventKind::kTransferEnded);
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      CHECK(before == b.memory);
      CHECK_EQ(b.stat("units_received"), landed);
    }
    CHECK_OK(a.engine->cancel(transfer));
  }
}

TEST(engine_peers_do_not_block_each_other) {
  EngineOptions how = options();
  how.bytes_in_flight = 32 << 10;
  Node a(with_domains(how, 2)), slow(with_domains(how, 1)), quick(with_domains(how, 3));
  const int64_t to_slow = connect(a, slow), to_quick = connect(a, quick);
  // A receiver that does not poll its data endpoint: its worker is stopped by a full event... it is
  // enough that its window is full, for which a much larger transfer goes first.
  const int64_t big = *a.engine->open_transfer(to_slow, 1);
  for (int i = 0; i < 50; ++i) {
    CHECK_OK(a.engine->write_paged(big, a.region, slow.remote, shuffled(256, i),
                                   {4096, 0, 4096, 0, 4096}));
  }
  CHECK_OK(a.engine->seal(big));
  const int64_t small = *a.engine->open_transfer(to_quick, 1);
  CHECK_OK(a.engine->write(small, a.region, 0, quick.remote, 0, 64, 1));
  CHECK_OK(a.engine->seal(small));
  CHECK_EQ(a.wait(EventKind::kTransferEnded).id, small);  // it overtakes the 50 MiB
  CHECK_EQ(a.wait(EventKind::kTransferEnded).id, big);
}

TEST(engine_deregister_waits_for_its_users) {
  Node a, b;
  const int64_t peer = connect(a, b);
  const int64_t transfer = *a.engine->open_transfer(peer, 1);
  CHECK_OK(a.engine->write(transfer, a.region, 0, b.remote, 0, 1000, 1));
  CHECK_OK(a.engine->seal(transfer));
  a.wait(EventKind::kTransferEnded);
  CHECK_OK(a.engine->deregister(a.region));
  CHECK_FAILS(a.engine->deregister(a.region), Code::kInvalid, "is not registered");
  CHECK_FAILS(a.engine->descriptor(a.region).status(), Code::kInvalid, "is not registered");
  CHECK_FAILS(a.engine->register_memory(0, 10).status(), Code::kInvalid, "an address");
  CHECK_FAILS(a.engine->register_memory(4096, 0).status(), Code::kInvalid, "length");
}

TEST(engine_closes_cleanly_in_the_middle_of_everything) {
  for (int round = 0; round < 20; ++round) {
    const Shape& shape = kShapes[round / 2 % 2];
    Node a(with_domains(options(10, round), shape.here));
    Node b(with_domains(options(10, round + 100), shape.there), 4 << 20);
    const int64_t peer = connect(a, b);
    for (int i = 0; i < 4; ++i) {
      const int64_t transfer = *a.engine->open_transfer(peer, i);
      CHECK_OK(a.engine->write_paged(transfer, a.region, b.remote, shuffled(256, i, 256 * i),
                                     {4096, 0, 4096, 0, 4096}));
      CHECK_OK(a.engine->control().send(peer, std::string(100000, 'x')));
    }
    if (round % 2) a.engine->close();
    b.engine->close();
    a.engine->close();
    a.engine->close();
    int ended = 0;
    for (const Event& event : a.engine->poll(0)) ended += event.kind == EventKind::kTransferEnded;
    CHECK_EQ(ended, 4);
    CHECK_FAILS(a.engine->open_transfer(peer, 1).status(), Code::kClosed, "closed");
    CHECK_FAILS(a.engine->connect("loopback:1", 1).status(), Code::kClosed, "closed");
    CHECK_FAILS(a.engine->register_memory(4096, 1).status(), Code::kClosed, "closed");
  }
}

TEST(engine_respects_the_providers_largest_write) {
  EngineOptions how = options();
  how.loopback.max_write = 10000;
  Node a(how), b(how);
  randomize(&a.memory, 3);
  const int64_t peer = connect(a, b);
  const PageLists lists = shuffled(64, 7);
  int64_t transfer = *a.engine->open_transfer(peer, 1);
  CHECK_OK(a.engine->write_paged(transfer, a.region, b.remote, lists, {4096, 0, 4096, 0, 4096}));
  CHECK_OK(a.engine->seal(transfer));
  CHECK_EQ(a.wait(EventKind::kTransferEnded).first, 64);
  CHECK(a.stat("writes_posted") >= 32);
  check_pages(a, b, lists, 4096);
  transfer = *a.engine->open_transfer(peer, 1);
  CHECK_OK(a.engine->write(transfer, a.region, 0, b.remote, 0, 20000, 1));
  const Event ended = a.wait(EventKind::kTransferEnded);
  CHECK_EQ(ended.outcome, static_cast<int>(TransferOutcome::kFailed));
  CHECK(ended.text.find("a unit of 20000 bytes exceeds") != std::string::npos);
}
