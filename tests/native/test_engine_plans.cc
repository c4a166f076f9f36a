#include <cstring>

#include "engines.h"

using namespace check;
using ffi_transport::Code;
using ffi_transport::TraceKind;
using ffi_transport::TraceRecord;
using ffi_transport::TriggerRegistry;

namespace {

// A request: `layers` layers of a cache whose layers lie one after the other in the memory.
constexpr int kLayers = 4;
constexpr size_t kLayerBytes = 64 << 10;
constexpr size_t kPage = 4096;

struct Layers {
  std::vector<int64_t> ids;
  std::vector<RemoteRegion> remotes;
  explicit Layers(Node& node, bool source) {
    for (int layer = 0; layer < kLayers; ++layer) {
      char* base = node.memory.data() + layer * kLayerBytes;
      auto region = node.engine->register_memory(reinterpret_cast<uint64_t>(base), kLayerBytes);
      CHECK_OK(region.status());
      ids.push_back((*region)->id);
      remotes.push_back(*RemoteRegion::decode(*node.engine->descriptor(ids.back())));
      if (source) CHECK_OK(node.engine->set_source_region(0, layer, ids.back()));
    }
  }
};

Engine::PlanRequest request(int64_t transfer, const PageLists& pages, const Layers& to) {
  Engine::PlanRequest out;
  out.transfer = transfer;
  out.pages = pages;
  out.unit = {kPage, 0, kPage, 0, kPage};
  out.remotes = to.remotes;
  return out;
}

void fire(Node& node, int64_t step, int layer, bool wrong = false) {
  TriggerRegistry::fire(node.engine->index(), static_cast<int32_t>(step), 0, layer,
                        node.memory.data() + layer * kLayerBytes + (wrong ? 64 : 0));
}

}  // namespace

TEST(engine_posts_each_layer_when_its_trigger_fires) {
  EngineOptions how = options(5);
  how.trace = true;
  Node a(how), b(how);
  randomize(&a.memory, 4);
  Layers from(a, true), to(b, false);
  const int64_t peer = connect(a, b);
  const PageLists pages = shuffled(16, 2);
  CHECK_OK(b.engine->counters().arm(1, 16 * kLayers, false));
  const int64_t transfer = *a.engine->open_transfer(peer, 1);
  const int64_t step = (3ll << 32) + 17;
  CHECK_OK(a.engine->add_plan(step, {0}, kLayers, {request(transfer, pages, to)}, 20));
  CHECK_OK(a.engine->seal(transfer));  // what is planned still counts
  for (int layer = 0; layer < kLayers; ++layer) {
    CHECK_EQ(a.stat("units_posted"), 16u * layer);
    fire(a, step, layer);
    CHECK(eventually([&] { return a.stat("units_posted") == 16u * (layer + 1); }));
  }
  CHECK_EQ(a.wait(EventKind::kTransferEnded).first, 16 * kLayers);
  b.wait(EventKind::kCounterReached);
  for (int layer = 0; layer < kLayers; ++layer) {
    for (size_t i = 0; i < 16; ++i) {
      CHECK(std::memcmp(a.memory.data() + layer * kLayerBytes + pages.source[i] * kPage,
                        b.memory.data() + layer * kLayerBytes + pages.destination[i] * kPage,
                        kPage) == 0);
    }
  }
  CHECK_EQ(a.stat("steps_live"), 0u);
  uint64_t last = 0;
  bool posted_before_last_trigger = false, last_trigger = false;
  for (const TraceRecord& record : a.engine->trace()) {
    CHECK(record.order > last);
    last = record.order;
    CHECK_EQ(record.step, step);
    const auto kind = static_cast<TraceKind>(record.kind);
    if (kind == TraceKind::kTrigger) last_trigger = record.layer == kLayers - 1;
    if (kind == TraceKind::kPost && record.layer == 0 && !last_trigger) {
      posted_before_last_trigger = true;
    }
  }
  CHECK(posted_before_last_trigger);
}

TEST(engine_triggers_without_a_plan_do_nothing) {
  Node a, b;
  Layers from(a, true);
  connect(a, b);
  for (int i = 0; i < 100; ++i) fire(a, i, i % kLayers);
  CHECK(eventually([&] { return a.stat("no_plan_triggers") == 100; }));
  CHECK_EQ(a.stat("triggers"), 100u);
  CHECK_EQ(a.stat("writes_posted"), 0u);
  CHECK(!a.has(EventKind::kTriggerFault));
}

TEST(engine_moved_cache_is_a_fault_and_fails_its_transfer) {
  Node a, b;
  Layers from(a, true), to(b, false);
  const int64_t peer = connect(a, b);
  const int64_t transfer = *a.engine->open_transfer(peer, 1);
  CHECK_OK(a.engine->add_plan(1, {0}, kLayers, {request(transfer, shuffled(4, 1), to)}, 20));
  fire(a, 1, 0, true);
  const Event fault = a.wait(EventKind::kTriggerFault);
  CHECK(fault.text == "address_changed");
  CHECK_EQ(fault.id, 1);
  const Event ended = a.wait(EventKind::kTransferEnded);
  CHECK_EQ(ended.outcome, static_cast<int>(TransferOutcome::kFailed));
  for (int layer = 1; layer < kLayers; ++layer) fire(a, 1, layer);
  CHECK(eventually([&] { return a.stat("steps_live") == 0; }));
  CHECK_EQ(a.stat("writes_posted"), 0u);
}

TEST(engine_dropped_step_fails_its_transfers) {
  Node a, b;
  Layers from(a, true), to(b, false);
  const int64_t peer = connect(a, b);
  const int64_t transfer = *a.engine->open_transfer(peer, 1);
  CHECK_OK(a.engine->add_plan(1, {0}, kLayers, {request(transfer, shuffled(4, 1), to)}, 20));
  CHECK_OK(a.engine->seal(transfer));
  fire(a, 1, 0);
  CHECK(eventually([&] { return a.stat("units_completed") == 4; }));
  CHECK_OK(a.engine->drop_plan(1));
  const Event ended = a.wait(EventKind::kTransferEnded);
  CHECK_EQ(ended.outcome, static_cast<int>(TransferOutcome::kFailed));
  CHECK_EQ(ended.first, 4);
  CHECK_EQ(ended.second, 4 * kLayers);
  CHECK_OK(a.engine->drop_plan(1));
}

TEST(engine_cancelled_plan_posts_nothing_more) {
  Node a, b;
  Layers from(a, true), to(b, false);
  const int64_t peer = connect(a, b);
  const int64_t transfer = *a.engine->open_transfer(peer, 1);
  CHECK_OK(a.engine->add_plan(1, {0}, kLayers, {request(transfer, shuffled(4, 1), to)}, 20));
  CHECK_OK(a.engine->cancel(transfer));
  a.wait(EventKind::kTransferEnded);
  for (int layer = 0; layer < kLayers; ++layer) fire(a, 1, layer);
  CHECK(eventually([&] { return a.stat("steps_live") == 0; }));
  CHECK_EQ(a.stat("writes_posted"), 0u);
}

TEST(engine_reports_a_ring_that_overflowed) {
  EngineOptions how = options();
  how.trigger_ring = 4;
  Node a(how);
  CHECK(eventually([&] {
    for (int i = 0; i < 1000; ++i) fire(a, 1, 0);
    return a.stat("ring_overflows") > 0;
  }));
  CHECK(a.wait(EventKind::kTriggerFault).text == "ring_overflow");
}

TEST(engine_spreads_a_plan_over_domains) {
  for (const Shape& shape : kShapes) {
    EngineOptions how = options(10);
    Node a(with_domains(how, shape.here)), b(with_domains(how, shape.there));
    randomize(&a.memory, 9);
    Layers from(a, true), to(b, false);
    const int64_t peer = connect(a, b);
    CHECK_OK(b.engine->counters().arm(1, 16 * kLayers, false));
    const int64_t transfer = *a.engine->open_transfer(peer, 1);
    CHECK_OK(a.engine->add_plan(1, {0}, kLayers, {request(transfer, shuffled(16, 1), to)}, 20));
    CHECK_OK(a.engine->seal(transfer));
    for (int layer = 0; layer < kLayers; ++layer) fire(a, 1, layer);
    CHECK_EQ(a.wait(EventKind::kTransferEnded).first, 16 * kLayers);
    b.wait(EventKind::kCounterReached);
  }
}
