// Engines with several domains, also with unequal numbers of them. The loopback network gives every
// domain its own keys, so a write by the wrong lane is refused.
#include <pthread.h>
#include <sched.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>

#include "engines.h"
#include "stranger.h"

using namespace check;
using namespace ffi_transport;

namespace {

constexpr size_t kPage = 512;
constexpr PageUnit kWhole{kPage, 0, kPage, 0, kPage};

struct Totals {
  std::vector<uint64_t> posted, completed, counted;
  explicit Totals(Node& node) {
    for (const Engine::DomainCounters& one : node.engine->domain_counters()) {
      posted.push_back(one.units_posted);
      completed.push_back(one.units_completed);
      counted.push_back(one.units_counted);
      CHECK_EQ(one.bytes_posted, one.units_posted * kPage);
      CHECK_EQ(one.bytes_completed, one.units_completed * kPage);
    }
  }
};

void check_even(const std::vector<uint64_t>& units, uint64_t total) {
  uint64_t sum = 0;
  for (const uint64_t one : units) {
    CHECK(one == total / units.size() || one == (total + units.size() - 1) / units.size());
    sum += one;
  }
  CHECK_EQ(sum, total);
}

}  // namespace

TEST(domains_in_unequal_numbers_share_the_units_of_both_sides) {
  for (const auto& [here, there] : std::vector<std::pair<size_t, size_t>>{
           {1, 2}, {2, 3}, {3, 2}, {4, 1}, {5, 5}, {1, 32}, {32, 7}}) {
    Node a(with_domains(options(20, here), here)), b(with_domains(options(20, there), there));
    randomize(&a.memory, 1);
    const int64_t peer = connect(a, b);
    constexpr size_t kPages = 1000;
    const PageLists lists = shuffled(kPages, 7);
    CHECK_OK(b.engine->counters().arm(5, kPages, false));
    const int64_t transfer = *a.engine->open_transfer(peer, 5);
    // In portions that divide by nothing.
    for (size_t at = 0; at < kPages;) {
      const size_t end = std::min(kPages, at + 7);
      PageLists part;
      part.source.assign(lists.source.begin() + at, lists.source.begin() + end);
      part.destination.assign(lists.destination.begin() + at, lists.destination.begin() + end);
      CHECK_OK(a.engine->write_paged(transfer, a.region, b.remote, part, kWhole));
      at = end;
    }
    CHECK_OK(a.engine->seal(transfer));
    CHECK_EQ(a.wait(EventKind::kTransferEnded).first, static_cast<int64_t>(kPages));
    b.wait(EventKind::kCounterReached);
    for (size_t i = 0; i < kPages; ++i) {
      CHECK(std::memcmp(a.memory.data() + lists.source[i] * kPage,
                        b.memory.data() + lists.destination[i] * kPage, kPage) == 0);
    }
    const Totals from(a), to(b);
    CHECK_EQ(from.posted.size(), here);
    CHECK_EQ(to.counted.size(), there);
    check_even(from.posted, kPages);
    check_even(from.completed, kPages);
    check_even(to.counted, kPages);
    check_even(to.posted, 0);
  }
}

namespace {

// A peer whose data endpoints are there but take nothing.
struct Deaf : Stranger {
  std::vector<std::unique_ptr<Endpoint>> endpoints;
  Deaf(Node& node, size_t domains) : Stranger(node.engine->control_address()) {
    Hello greeting_of = hello("loopback", 0);
    for (size_t i = 0; i < domains; ++i) {
      endpoints.push_back(domain->open_endpoint(0).take());
      greeting_of.data_names.push_back(endpoints.back()->name());
    }
    send(greeting(greeting_of));
  }
};

RemoteRegion anywhere(const std::vector<uint32_t>& domains, uint64_t length) {
  RemoteRegion region;
  region.length = length;
  for (const uint32_t domain : domains) region.domains.push_back({domain, 1, 0});
  return region;
}

RemoteRegion describe(Node& node, std::vector<int64_t> domains, int64_t* id) {
  auto region = node.engine->register_memory(reinterpret_cast<uint64_t>(node.memory.data()),
                                             node.memory.size(), std::move(domains));
  CHECK_OK(region.status());
  *id = (*region)->id;
  return *RemoteRegion::decode(*node.engine->descriptor(*id));
}

}  // namespace

TEST(domains_of_a_group_alone_carry_its_writes) {
  Node a(with_domains(options(10), 4)), b(with_domains(options(10), 3));
  randomize(&a.memory, 3);
  const int64_t peer = connect(a, b);
  int64_t source = 0, target = 0;
  describe(a, {3, 1}, &source);
  const RemoteRegion remote = describe(b, {2}, &target);
  CHECK_EQ(remote.domains.size(), 1u);
  CHECK_EQ(remote.domains[0].domain, 2u);
  CHECK_OK(b.engine->counters().arm(1, 101, false));
  const int64_t transfer = *a.engine->open_transfer(peer, 1);
  CHECK_OK(a.engine->write_paged(transfer, source, remote, shuffled(101, 1), kWhole));
  CHECK_OK(a.engine->seal(transfer));
  CHECK_EQ(a.wait(EventKind::kTransferEnded).outcome,
           static_cast<int>(TransferOutcome::kCompleted));
  b.wait(EventKind::kCounterReached);
  const Totals from(a), to(b);
  CHECK(from.posted[0] == 0 && from.posted[2] == 0);
  CHECK_EQ(from.posted[1] + from.posted[3], 101u);
  CHECK(from.posted[1] >= 50 && from.posted[3] >= 50);
  CHECK(to.counted == (std::vector<uint64_t>{0, 0, 101}));
}

TEST(triggers_of_two_groups_use_the_domains_of_each) {
  Node a(with_domains(options(10), 5)), b(with_domains(options(10), 3));
  randomize(&a.memory, 4);
  const int64_t peer = connect(a, b);
  constexpr int kSteps = 30, kPages = 7;
  const std::vector<std::vector<int64_t>> here = {{1, 2}, {3, 4}}, there = {{0}, {1, 2}};
  std::vector<RemoteRegion> remotes;
  for (int ordinal = 0; ordinal < 2; ++ordinal) {
    int64_t source = 0, target = 0;
    describe(a, here[ordinal], &source);
    remotes.push_back(describe(b, there[ordinal], &target));
    CHECK_OK(a.engine->set_source_region(ordinal, 0, source));
  }
  CHECK_OK(b.engine->counters().arm(1, 2 * kSteps * kPages, false));
  const int64_t transfer = *a.engine->open_transfer(peer, 1);
  for (int step = 0; step < kSteps; ++step) {
    std::vector<Engine::PlanRequest> requests(2);
    for (int ordinal = 0; ordinal < 2; ++ordinal) {
      Engine::PlanRequest& one = requests[ordinal];
      one.transfer = transfer;
      one.ordinal = ordinal;
      one.pages = shuffled(kPages, step, (2 * step + ordinal) * kPages);
      one.unit = kWhole;
      one.remotes = {remotes[ordinal]};
    }
    CHECK_OK(a.engine->add_plan(step, {0, 1}, 1, std::move(requests), 20));
    for (int ordinal = 0; ordinal < 2; ++ordinal) {
      TriggerRegistry::fire(a.engine->index(), step, ordinal, 0, a.memory.data());
    }
  }
  CHECK_OK(a.engine->seal(transfer));
  CHECK_EQ(a.wait(EventKind::kTransferEnded).outcome,
           static_cast<int>(TransferOutcome::kCompleted));
  b.wait(EventKind::kCounterReached);
  // 210 units of each group: the first domain reads all triggers and carries nothing.
  CHECK(Totals(a).completed == (std::vector<uint64_t>{0, 105, 105, 105, 105}));
  CHECK(Totals(b).counted == (std::vector<uint64_t>{210, 105, 105}));
}

TEST(domains_of_a_region_are_checked) {
  Node a(with_domains(options(), 3));
  const auto refused = [&](std::vector<int64_t> domains) {
    return a.engine
        ->register_memory(reinterpret_cast<uint64_t>(a.memory.data()), a.memory.size(),
                          std::move(domains))
        .status();
  };
  CHECK_FAILS(refused({}), Code::kInvalid, "domains: a region needs at least one");
  CHECK_FAILS(refused({0, 3}), Code::kInvalid, "domains: 3 is not in 0..2");
  CHECK_FAILS(refused({-1}), Code::kInvalid, "domains: -1 is not in 0..2");
  CHECK_FAILS(refused({1, 2, 1}), Code::kInvalid, "domains: 1 is there twice");
  EngineOptions many = with_domains(options(), 65);
  CHECK_FAILS(Engine::create(many, "").status(), Code::kInvalid, "domains: 65, at most 64");
}

TEST(domains_that_a_peer_does_not_have_fail_its_transfer_alone) {
  Node a(with_domains(options(), 2)), b(with_domains(options(), 3));
  const int64_t id = connect(a, b);
  const RemoteRegion wrong = anywhere({0, 3}, 4096);
  const auto check_failed = [&](int64_t transfer) {
    const Event ended = a.wait(EventKind::kTransferEnded);
    CHECK_EQ(ended.id, transfer);
    CHECK_EQ(ended.outcome, static_cast<int>(TransferOutcome::kFailed));
    CHECK(ended.text == "the peer announced memory on its domain 3, but has only 3");
  };
  const int64_t ranged = *a.engine->open_transfer(id, 1);
  CHECK_OK(a.engine->write(ranged, a.region, 0, wrong, 0, 100, 1));
  check_failed(ranged);
  const int64_t paged = *a.engine->open_transfer(id, 1);
  CHECK_OK(a.engine->write_paged(paged, a.region, wrong, shuffled(1, 1), kWhole));
  check_failed(paged);
  CHECK_OK(a.engine->set_source_region(0, 0, a.region));
  // In one step with a good one, which goes on.
  const int64_t bad = *a.engine->open_transfer(id, 1), good = *a.engine->open_transfer(id, 2);
  std::vector<Engine::PlanRequest> requests(2);
  for (Engine::PlanRequest& one : requests) {
    one.pages = shuffled(1, 1);
    one.unit = kWhole;
  }
  requests[0].transfer = bad;
  requests[0].remotes = {wrong};
  requests[1].transfer = good;
  requests[1].remotes = {b.remote};
  CHECK_OK(b.engine->counters().arm(2, 1, false));
  CHECK_OK(a.engine->add_plan(1, {0}, 1, std::move(requests), 1));
  check_failed(bad);
  CHECK_OK(a.engine->seal(good));
  TriggerRegistry::fire(a.engine->index(), 1, 0, 0, a.memory.data());
  CHECK_EQ(a.wait(EventKind::kTransferEnded).outcome,
           static_cast<int>(TransferOutcome::kCompleted));
  b.wait(EventKind::kCounterReached);
  CHECK_EQ(a.stat("writes_posted"), 1u);
}

TEST(hello_without_a_domain_or_with_too_many_is_refused) {
  Node a;
  Deaf none(a, 0);
  CHECK(none.wait_answer().payload.find("domains: the peer has none") != std::string_view::npos);
  Deaf many(a, 65);
  Deaf most(a, 64);  // heard after it
  a.wait(EventKind::kPeerConnected);
  CHECK_EQ(a.stat("peers_connected"), 1u);
  CHECK(many.answer.empty());  // malformed: it said no address to answer to
}

TEST(window_is_shared_by_the_domains_of_a_group_not_of_the_engine) {
  EngineOptions how = with_domains(options(), 32);
  how.bytes_in_flight = 64 << 10;
  Node a(how);
  Deaf peer(a, 4);
  const int64_t id = a.wait(EventKind::kPeerConnected).peer;
  int64_t source = 0;
  describe(a, {0, 1, 2, 3}, &source);
  const int64_t transfer = *a.engine->open_transfer(id, 1);
  // No two pages are neighbours on both sides, so four go to a write and a share holds eight
  // writes.
  PageLists backwards;
  for (uint32_t i = 0; i < 256; ++i) {
    backwards.source.push_back(i);
    backwards.destination.push_back(255 - i);
  }
  for (int i = 0; i < 8; ++i) {
    CHECK_OK(a.engine->write_paged(transfer, source, anywhere({0, 1, 2, 3}, 1 << 20), backwards,
                                   kWhole));
  }
  const auto posted = [&] {
    uint64_t sum = 0;
    for (const auto& one : a.engine->domain_counters()) sum += one.bytes_posted;
    return sum;
  };
  // Nobody polls there: what is posted stays in flight, and fills the window, but no more.
  CHECK(eventually([&] { return posted() == 64 << 10; }));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  for (const auto& one : a.engine->domain_counters()) CHECK(one.bytes_posted <= 16 << 10);
  CHECK_EQ(posted(), uint64_t{64 << 10});
}

TEST(one_broken_domain_loses_the_peer_and_ends_its_transfers_everywhere) {
  Node a(with_domains(options(), 2));
  Deaf peer(a, 3);
  const int64_t id = a.wait(EventKind::kPeerConnected).peer;
  const int64_t transfer = *a.engine->open_transfer(id, 1);
  peer.endpoints[2].reset();
  CHECK_OK(a.engine->write_paged(transfer, a.region, anywhere({0, 1, 2}, 1 << 20), shuffled(300, 1),
                                 kWhole));
  const Event ended = a.wait(EventKind::kTransferEnded);
  CHECK_EQ(ended.id, transfer);
  CHECK_EQ(ended.outcome, static_cast<int>(TransferOutcome::kFailed));
  CHECK(ended.text.find("Connection refused") != std::string::npos);
  CHECK(a.wait(EventKind::kPeerLost).text.find("data connection failed") != std::string::npos);
  CHECK_OK(a.engine->deregister(a.region));  // no domain reads it any more
}

TEST(silent_peer_with_several_domains_is_lost) {
  EngineOptions how = with_domains(options(), 2);
  how.heartbeat_ms = 10;
  how.peer_timeout_ms = 1000;  // by then the transfer is open
  Node a(how);
  Deaf peer(a, 3);
  const int64_t id = a.wait(EventKind::kPeerConnected).peer;
  const int64_t transfer = *a.engine->open_transfer(id, 1);
  CHECK_OK(a.engine->write_paged(transfer, a.region, anywhere({0, 1, 2}, 1 << 20), shuffled(300, 1),
                                 kWhole));
  CHECK_EQ(a.wait(EventKind::kTransferEnded).outcome, static_cast<int>(TransferOutcome::kFailed));
  CHECK(a.wait(EventKind::kPeerLost).text == "no sign of life");
  CHECK(a.stat("writes_fenced") > 0);
  CHECK_OK(a.engine->deregister(a.region));
}

TEST(domain_threads_are_named_and_pinned) {
  cpu_set_t allowed;
  CHECK_EQ(sched_getaffinity(0, sizeof allowed, &allowed), 0);
  int cpu = 0, forbidden = 0;
  while (!CPU_ISSET(cpu, &allowed)) ++cpu;
  while (CPU_ISSET(forbidden, &allowed)) ++forbidden;
  EngineOptions how = with_domains(options(), 3);
  how.domain_cpus = {{cpu}, {}, {cpu}};
  Node a(how);
  std::map<std::string, int> cpus;  // of each native thread, by name
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    cpu_set_t set;
    const int id = std::stoi(task.path().filename());
    if (sched_getaffinity(id, sizeof set, &set) == 0) cpus[name] = CPU_COUNT(&set);
  }
  CHECK_EQ(cpus.at("fabric-0"), 1);
  CHECK_EQ(cpus.at("fabric-1"), CPU_COUNT(&allowed));
  CHECK_EQ(cpus.at("fabric-2"), 1);
  CHECK_EQ(cpus.at("fabric-control"), CPU_COUNT(&allowed));
  CHECK(a.engine->domain_counters()[2].cpus == std::vector<int>{cpu});
  CHECK(a.engine->domain_counters()[2].name == "nic2");
  how.domain_cpus = {{}, {cpu, forbidden}, {}};
  CHECK_FAILS(Engine::create(how, "").status(), Code::kInvalid,
              "domain_cpus: this process may not run on CPU " + std::to_string(forbidden));
  how.domain_cpus = {{}, {-1}, {}};
  CHECK_FAILS(Engine::create(how, "").status(), Code::kInvalid, "domain_cpus: -1 is not in 0..");
  how.domain_cpus = {{cpu}, {cpu}};
  CHECK_FAILS(Engine::create(how, "").status(), Code::kInvalid,
              "domain_cpus: 2 sets for 3 domains");
}
