#include <cerrno>
#include <cstring>
#include <numeric>

#include "check.h"
#include "loopback.h"

using namespace ffi_transport;

namespace {

struct Side {
  std::unique_ptr<Domain> domain;
  std::unique_ptr<Endpoint> endpoint;
  std::vector<char> memory;
  std::unique_ptr<Registration> registration;

  Side(Fabric* fabric, size_t bytes) : memory(bytes) {
    domain = fabric->open_domain("").take();
    endpoint = domain->open_endpoint(0).take();
    registration = domain->register_memory(memory.data(), bytes).take();
  }
  std::vector<Completion> poll() {
    std::vector<Completion> out(64);
    out.resize(endpoint->poll(out));
    return out;
  }
};

Status write(Side& from, PeerAddress to, const Side& target, size_t at, size_t length,
             uint32_t immediate, OpContext* context, uint64_t key_change = 0) {
  const LocalPiece local{from.memory.data() + at, length, nullptr};
  const RemotePiece remote{at, length, target.registration->key() + key_change};
  return from.endpoint->write(to, {&local, 1}, {&remote, 1}, immediate, context);
}

}  // namespace

TEST(loopback_lands_bytes_before_it_counts) {
  const auto fabric = make_loopback();
  Side a(fabric.get(), 4096), b(fabric.get(), 4096);
  const PeerAddress to = *a.endpoint->insert(b.endpoint->name());
  std::iota(a.memory.begin(), a.memory.end(), 0);
  OpContext context;
  CHECK_OK(write(a, to, b, 100, 1000, 77, &context));
  CHECK_EQ(b.memory[100], 0);  // nothing lands until the target polls
  CHECK(!b.endpoint->may_block());
  const auto landed = b.poll();
  CHECK_EQ(landed.size(), 1u);
  CHECK(landed[0].kind == Completion::Kind::kImmediate);
  CHECK_EQ(landed[0].immediate, 77u);
  CHECK(std::memcmp(a.memory.data() + 100, b.memory.data() + 100, 1000) == 0);
  CHECK_EQ(b.memory[99], 0);
  const auto done = a.poll();
  CHECK_EQ(done.size(), 1u);
  CHECK(done[0].context == &context && done[0].error == 0);
  CHECK(a.endpoint->may_block() && b.endpoint->may_block());
}

TEST(loopback_reorders_with_a_seed) {
  LoopbackOptions options;
  options.max_delay_polls = 20;
  options.seed = 4;
  const auto fabric = make_loopback(options);
  Side a(fabric.get(), 4096), b(fabric.get(), 4096);
  const PeerAddress to = *a.endpoint->insert(b.endpoint->name());
  std::vector<OpContext> contexts(50);
  for (uint32_t i = 0; i < 50; ++i) CHECK_OK(write(a, to, b, i, 1, i, &contexts[i]));
  std::vector<uint32_t> order;
  for (int turn = 0; turn < 40; ++turn) {
    for (const Completion& one : b.poll()) order.push_back(one.immediate);
  }
  CHECK_EQ(order.size(), 50u);
  CHECK(!std::is_sorted(order.begin(), order.end()));
}

TEST(loopback_refuses_bad_keys_and_ranges) {
  const auto fabric = make_loopback();
  Side a(fabric.get(), 4096), b(fabric.get(), 2048);
  const PeerAddress to = *a.endpoint->insert(b.endpoint->name());
  OpContext context;
  CHECK_OK(write(a, to, b, 0, 100, 1, &context, 12345));
  CHECK_OK(write(a, to, b, 2000, 100, 1, &context));
  b.registration.reset();
  CHECK(b.poll().empty());
  const auto done = a.poll();
  CHECK_EQ(done.size(), 2u);
  CHECK_EQ(done[0].error, EACCES);
  CHECK_EQ(done[1].error, EACCES);
  for (char byte : b.memory) CHECK_EQ(byte, 0);
}

TEST(loopback_keeps_the_memory_of_domains_apart) {
  const auto fabric = make_loopback();
  Side a(fabric.get(), 4096), b(fabric.get(), 4096);
  const PeerAddress to = *a.endpoint->insert(b.endpoint->name());
  OpContext context;
  const RemotePiece remote{0, 10, b.registration->key()};
  LocalPiece local{a.memory.data(), 10, a.registration->descriptor()};
  CHECK_OK(a.endpoint->write(to, {&local, 1}, {&remote, 1}, 1, &context));
  local.descriptor = b.registration->descriptor();
  CHECK_FAILS(a.endpoint->write(to, {&local, 1}, {&remote, 1}, 1, &context), Code::kInvalid,
              "not registered with this domain");
}

TEST(loopback_close_is_a_fence_on_both_sides) {
  const auto fabric = make_loopback();
  Side a(fabric.get(), 4096), b(fabric.get(), 4096);
  const PeerAddress to = *a.endpoint->insert(b.endpoint->name());
  std::fill(a.memory.begin(), a.memory.end(), 1);
  OpContext context;
  CHECK_OK(write(a, to, b, 0, 100, 1, &context));
  b.endpoint.reset();
  auto done = a.poll();
  CHECK_EQ(done.size(), 1u);
  CHECK_EQ(done[0].error, ECONNRESET);
  CHECK_EQ(b.memory[0], 0);
  CHECK_OK(write(a, to, b, 0, 100, 1, &context));
  done = a.poll();
  CHECK_EQ(done.size(), 1u);
  CHECK_EQ(done[0].error, ECONNREFUSED);
  // The sender's side: what it has not delivered reads its memory no more.
  b.endpoint = b.domain->open_endpoint(0).take();
  const PeerAddress again = *a.endpoint->insert(b.endpoint->name());
  CHECK_OK(write(a, again, b, 0, 100, 1, &context));
  a.endpoint.reset();
  std::vector<char>().swap(a.memory);
  CHECK(b.poll().empty());
  CHECK_EQ(b.memory[0], 0);
}

TEST(loopback_ports_are_exclusive) {
  const auto fabric = make_loopback();
  auto domain = fabric->open_domain("").take();
  auto first = domain->open_endpoint(123);
  CHECK_OK(first.status());
  CHECK_FAILS(domain->open_endpoint(123).status(), Code::kUnavailable, "port 123 is in use");
  (*first).reset();
  CHECK_OK(domain->open_endpoint(123).status());
  CHECK_FAILS(fabric->parse_address("nonsense").status(), Code::kInvalid, "nonsense");
  CHECK_FAILS(fabric->parse_address("loopback:0").status(), Code::kInvalid, "loopback:0");
  CHECK_FAILS(fabric->parse_address("loopback:99999").status(), Code::kInvalid, "loopback:99999");
}

TEST(loopback_messages_and_back_pressure) {
  LoopbackOptions options;
  options.send_depth = 2;
  const auto fabric = make_loopback(options);
  Side a(fabric.get(), 16), b(fabric.get(), 16);
  const PeerAddress to = *a.endpoint->insert(b.endpoint->name());
  OpContext contexts[4];
  CHECK_OK(a.endpoint->send(to, "one", 3, nullptr, &contexts[0]));
  CHECK_OK(a.endpoint->send(to, "three", 5, nullptr, &contexts[1]));
  CHECK(a.endpoint->send(to, "x", 1, nullptr, &contexts[2]).code() == Code::kAgain);
  CHECK(b.poll().empty());  // no buffer yet
  char buffers[2][4] = {};
  CHECK_OK(b.endpoint->recv(buffers[0], 4, nullptr, &contexts[2]));
  CHECK_OK(b.endpoint->recv(buffers[1], 4, nullptr, &contexts[3]));
  const auto got = b.poll();
  CHECK_EQ(got.size(), 2u);
  CHECK(got[0].error == 0 && got[0].length == 3 && got[0].context == &contexts[2]);
  CHECK_EQ(got[1].error, EMSGSIZE);  // longer than the buffer
  CHECK_EQ(a.poll().size(), 2u);
  CHECK_OK(a.endpoint->send(to, "x", 1, nullptr, &contexts[0]));
}
