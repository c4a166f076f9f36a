#include "check.h"
#include "plan_table.h"

using namespace ffi_transport;

namespace {

struct Fixture {
  EventQueue events;
  Stats stats;
  TransferTable transfers{&events};
  PlanTable plans{&events, &stats};
  RemoteRegionPtr remote;

  explicit Fixture(int ordinals = 2, int layers = 3) {
    for (int ordinal = 0; ordinal < ordinals; ++ordinal) {
      for (int layer = 0; layer < layers; ++layer) {
        auto region = std::make_shared<Region>();
        region->id = 1 + ordinal * layers + layer;
        region->address = 0x1000 * region->id;
        region->length = 1 << 20;
        plans.set_source(ordinal, layer, region);
      }
    }
    RemoteRegion target;
    target.length = 1 << 20;
    target.domains = {{0, 1, 0}};
    remote = std::make_shared<RemoteRegion>(target);
  }

  Status add(int64_t step, std::vector<int> ordinals, int layers, std::vector<PlannedWrite> writes,
             double timeout_s = 0) {
    return plans.add(step, std::move(ordinals), layers, std::move(writes), timeout_s);
  }

  PlannedWrite write(TransferPtr transfer, int ordinal, int first_layer, int layers,
                     std::vector<uint32_t> pages = {1, 2}) {
    PlannedWrite out;
    out.transfer = std::move(transfer);
    out.ordinal = ordinal;
    out.first_layer = first_layer;
    out.pages = std::make_shared<PageLists>(PageLists{pages, pages});
    out.unit = {4096, 0, 4096, 0, 4096};
    out.remotes.assign(layers, remote);
    return out;
  }

  std::vector<Job> fire(int64_t step, int ordinal, int layer, uint64_t wrong = 0) {
    TriggerRecord record;
    record.step_low = static_cast<uint32_t>(step);
    record.ordinal = ordinal;
    record.layer = layer;
    record.wrong_address = wrong;
    std::vector<Job> jobs;
    plans.fire(record, &jobs);
    return jobs;
  }
};

}  // namespace

TEST(plan_releases_what_each_trigger_covers) {
  Fixture f;
  const TransferPtr a = f.transfers.open(1, 5, nullptr), b = f.transfers.open(1, 6, nullptr);
  CHECK_OK(
      f.add(10, {0, 1}, 3, {f.write(a, 0, 0, 3), f.write(b, 0, 1, 1), f.write(b, 1, 2, 1, {7})}));
  CHECK_EQ(f.plans.live(), 1u);
  CHECK_EQ(f.fire(10, 0, 0).size(), 1u);
  const auto jobs = f.fire(10, 0, 1);
  CHECK_EQ(jobs.size(), 2u);
  CHECK_EQ(jobs[0].layer, 1);
  CHECK_EQ(jobs[0].step, 10);
  CHECK_EQ(jobs[0].source->id, 2);
  CHECK_EQ(jobs[0].units.size(), 2u);
  CHECK_EQ(f.fire(10, 1, 0).size(), 0u);
  CHECK_EQ(f.fire(10, 1, 2).size(), 1u);
  CHECK_EQ(f.fire(10, 0, 2).size(), 1u);
  CHECK_EQ(f.plans.live(), 1u);
  CHECK_EQ(f.fire(10, 1, 1).size(), 0u);
  CHECK_EQ(f.plans.live(), 0u);  // freed when everything has fired
  CHECK(f.events.poll(0).empty());
}

TEST(trigger_without_a_plan_is_a_counted_no_op) {
  Fixture f;
  CHECK(f.fire(99, 0, 0).empty());
  CHECK_EQ(f.stats.no_plan_triggers.load(), 1u);
  CHECK(f.events.poll(0).empty());
}

TEST(plan_is_found_by_the_low_half_of_its_step) {
  Fixture f(1, 1);
  const int64_t step = (5ll << 32) | 0xfffffff0;  // negative as an int32
  const TransferPtr transfer = f.transfers.open(1, 5, nullptr);
  CHECK_OK(f.add(step, {0}, 1, {f.write(transfer, 0, 0, 1)}));
  CHECK_FAILS(f.add(0xfffffff0, {0}, 1, {}), Code::kInvalid, "low half");
  const auto jobs = f.fire(static_cast<int32_t>(0xfffffff0), 0, 0);
  CHECK_EQ(jobs.size(), 1u);
  CHECK_EQ(jobs[0].step, step);
}

TEST(plan_faults_are_events) {
  Fixture f;
  const TransferPtr transfer = f.transfers.open(1, 5, nullptr);
  CHECK_OK(f.add(1, {0}, 2, {f.write(transfer, 0, 0, 2)}));
  CHECK_EQ(f.fire(1, 0, 0).size(), 1u);
  CHECK(f.fire(1, 0, 0).empty());
  auto events = f.events.poll(0);
  CHECK_EQ(events.size(), 1u);
  CHECK(events[0].text == "repeated");
  CHECK(f.fire(1, 1, 0).empty());  // an ordinal that the step does not have
  CHECK(f.fire(1, 0, 2).empty());
  CHECK(f.fire(1, 0, -1).empty());
  events = f.events.poll(0);
  CHECK_EQ(events.size(), 3u);
  for (const Event& event : events) CHECK(event.text == "outside_plan");
  CHECK_EQ(f.stats.trigger_faults.load(), 4u);
  f.plans.report_overflow();
  CHECK(f.events.poll(0)[0].text == "ring_overflow");
}

TEST(moved_cache_posts_nothing_and_fails_the_transfer) {
  Fixture f;
  const TransferPtr transfer = f.transfers.open(1, 5, nullptr);
  CHECK_OK(f.add(1, {0}, 2, {f.write(transfer, 0, 0, 2)}));
  CHECK(f.fire(1, 0, 0, 0xdead000).empty());
  auto events = f.events.poll(0);
  CHECK_EQ(events.size(), 2u);
  CHECK(events[0].kind == EventKind::kTriggerFault);
  CHECK(events[0].text == "address_changed");
  CHECK(events[0].payload.find("0xdead000") != std::string::npos);
  CHECK(events[1].kind == EventKind::kTransferEnded);
  CHECK(events[1].text.find("moved") != std::string::npos);
  // Told once per address, also without a plan.
  f.fire(50, 0, 0, 0xdead000);
  CHECK(f.events.poll(0).empty());
  f.fire(50, 0, 0, 0xbeef000);
  CHECK_EQ(f.events.poll(0).size(), 1u);
}

TEST(plan_checks_before_it_plans_anything) {
  Fixture f;
  const TransferPtr transfer = f.transfers.open(1, 5, nullptr);
  const auto refused = [&](std::vector<int> ordinals, int layers, PlannedWrite bad,
                           const char* words) {
    std::vector<PlannedWrite> writes;
    writes.push_back(f.write(transfer, 0, 0, 1));
    writes.push_back(std::move(bad));
    CHECK_FAILS(f.add(1, std::move(ordinals), layers, std::move(writes)), Code::kInvalid, words);
    CHECK_EQ(f.plans.live(), 0u);
  };
  refused({0}, 3, f.write(transfer, 1, 0, 1), "not among the step's ordinals");
  refused({0}, 3, f.write(transfer, 0, 2, 2), "in a step of 3");
  refused({0}, 3, f.write(transfer, 0, 0, 1, {300}), "source page 300");
  refused({0, 5}, 3, f.write(transfer, 5, 0, 1), "no source region");
  transfer->seal();  // nothing was planned, so it is complete
  const auto events = f.events.poll(0);
  CHECK_EQ(events.size(), 1u);
  CHECK_EQ(events[0].second, 0);
}

TEST(plan_keeps_four_live_steps) {
  Fixture f(2, 2);
  for (int step = 1; step <= 4; ++step) CHECK_OK(f.add(step, {0, 1}, 2, {}));
  f.fire(1, 0, 0);
  const Status status = f.add(5, {0, 1}, 2, {}, 0.05);
  CHECK_FAILS(status, Code::kTimeout, "4 steps are live already");
  CHECK_FAILS(status, Code::kTimeout,
              "step 1 waits for 3 triggers: (ordinal 0, layer 1) (ordinal 1, layer 0)");
  CHECK(status.detail().elapsed_s >= 0.05);
  CHECK(f.plans.drop(4));
  CHECK(!f.plans.drop(4));
  CHECK_OK(f.add(5, {0, 1}, 2, {}));
}

TEST(plan_waits_for_a_step_to_be_freed) {
  Fixture f(1, 1);
  for (int step = 1; step <= 4; ++step) CHECK_OK(f.add(step, {0}, 1, {}));
  const auto later = [](std::function<void()> work) {
    return std::thread([work] {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      work();
    });
  };
  std::thread fires = later([&] { f.fire(2, 0, 0); });
  CHECK_OK(f.add(5, {0}, 1, {}, 20));
  fires.join();
  std::thread drops = later([&] { f.plans.drop(3); });
  CHECK_OK(f.add(6, {0}, 1, {}, 20));
  drops.join();
  std::thread closes = later([&] { f.plans.close(); });
  CHECK_FAILS(f.add(7, {0}, 1, {}, 20), Code::kClosed, "closed");
  closes.join();
}

TEST(dropped_step_fails_what_has_not_fired) {
  Fixture f(1, 3);
  const TransferPtr open = f.transfers.open(1, 5, nullptr), done = f.transfers.open(1, 6, nullptr);
  CHECK_OK(f.add(1, {0}, 3, {f.write(open, 0, 0, 3), f.write(done, 0, 0, 1)}));
  CHECK_EQ(f.fire(1, 0, 0).size(), 2u);
  CHECK(f.plans.drop(1));
  const auto events = f.events.poll(0);
  CHECK_EQ(events.size(), 1u);
  CHECK_EQ(events[0].id, open->id());
  CHECK(events[0].text.find("step 1 was dropped before ordinal 0, layer 1") != std::string::npos);
  CHECK(f.fire(1, 0, 1).empty());
  CHECK_EQ(f.stats.no_plan_triggers.load(), 1u);
}

TEST(plan_skips_transfers_that_have_ended) {
  Fixture f(1, 1);
  const TransferPtr gone = f.transfers.open(1, 5, nullptr), live = f.transfers.open(1, 6, nullptr);
  gone->cancel();
  f.events.poll(0);
  CHECK_OK(f.add(1, {0}, 1,
                 {f.write(gone, 0, 0, 1), f.write(nullptr, 0, 0, 1), f.write(live, 0, 0, 1)}));
  CHECK_EQ(f.stats.plan_writes_skipped.load(), 2u);
  CHECK_EQ(f.fire(1, 0, 0).size(), 1u);
}

TEST(transfer_ends_once_and_only_when_drained) {
  EventQueue events;
  TransferTable table(&events);
  const TransferPtr transfer = table.open(4, 9, nullptr);
  CHECK(transfer->plan(3) == Transfer::Plan::kPlanned);
  CHECK(transfer->begin_post());
  CHECK(transfer->begin_post());
  transfer->cancel();
  CHECK(!transfer->begin_post());
  CHECK(events.poll(0).empty());  // two writes still fly
  transfer->finish_post(1, 100);
  transfer->fail("too late to matter?");
  CHECK(events.poll(0).empty());
  transfer->abandon_post();
  transfer->cancel();
  transfer->seal();
  const auto ended = events.poll(0);
  CHECK_EQ(ended.size(), 1u);
  CHECK_EQ(ended[0].first, 1);
  CHECK_EQ(ended[0].second, 3);
  CHECK_EQ(ended[0].outcome, static_cast<int>(TransferOutcome::kFailed));  // the worse one
  CHECK(table.find(transfer->id()).ok());
  CHECK(*table.find(transfer->id()) == nullptr);
  CHECK_FAILS(table.find(77).status(), Code::kInvalid, "no transfer 77");
}

TEST(sealed_transfer_completes_with_its_count) {
  EventQueue events;
  TransferTable table(&events);
  const TransferPtr empty = table.open(1, 1, nullptr);
  empty->seal();  // planned nothing: complete at once
  CHECK_EQ(events.poll(0)[0].outcome, static_cast<int>(TransferOutcome::kCompleted));
  const TransferPtr transfer = table.open(1, 1, nullptr);
  transfer->plan(2);
  transfer->seal();
  CHECK(transfer->plan(1) == Transfer::Plan::kSealed);
  CHECK(transfer->begin_post());
  CHECK(events.poll(0).empty());
  transfer->finish_post(2, 64);
  const auto ended = events.poll(0);
  CHECK_EQ(ended[0].outcome, static_cast<int>(TransferOutcome::kCompleted));
  CHECK_EQ(ended[0].bytes, 64);
}
