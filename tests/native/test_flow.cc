#include <deque>
#include <memory>

#include "check.h"
#include "flow.h"

using namespace ffi_transport;

namespace {

struct Queue {
  std::deque<uint64_t> writes;
  uint64_t posted = 0;
  bool refuses = false;
  uint64_t credit = 0;
  uint64_t next_bytes() { return writes.empty() ? 0 : writes.front(); }
  bool post_next() {
    if (refuses) return false;
    posted += writes.front();
    writes.pop_front();
    return true;
  }
};

}  // namespace

TEST(window_limits_bytes_and_posts) {
  FlowWindow window(100, 3);
  CHECK(window.admits(100));
  CHECK(window.admits(500));  // larger than the window: alone
  window.take(60);
  CHECK(!window.admits(41));
  CHECK(window.admits(40));
  window.take(20);
  window.take(20);
  CHECK(!window.admits(0));  // three posts
  window.give_back(60);
  CHECK(window.admits(60));
  CHECK(!window.admits(61));
  window.give_back(20);
  window.give_back(20);
  CHECK_EQ(window.bytes(), 0u);
  window.take(500);
  CHECK(!window.admits(1));
}

TEST(window_of_a_job_on_several_lanes_is_its_share) {
  FlowWindow window(100, 8);
  CHECK(window.admits(25, 4));
  CHECK(window.admits(26, 4));  // larger than the share: alone
  window.take(20);
  CHECK(window.admits(5, 4));
  CHECK(!window.admits(6, 4));
  CHECK(window.admits(80, 1));
  for (int i = 0; i < 7; ++i) window.take(0);
  CHECK(!window.admits(0, 1));  // eight posts, however many lanes
  for (int i = 0; i < 7; ++i) window.give_back(0);
  window.give_back(20);
  CHECK(window.admits(1, 64));  // never none at all
}

TEST(turns_are_fair_in_bytes_not_in_writes) {
  std::vector<std::unique_ptr<Queue>> queues;
  for (int i = 0; i < 3; ++i) queues.push_back(std::make_unique<Queue>());
  queues[0]->writes.assign(100000, 4096);
  queues[1]->writes.assign(1000, 1 << 20);
  queues[2]->writes.assign(10000, 65536);
  ByteTurns<Queue> turns;
  for (int round = 0; round < 200; ++round) CHECK(turns.round(queues));
  uint64_t least = ~0ull, most = 0;
  for (const auto& queue : queues) {
    least = std::min(least, queue->posted);
    most = std::max(most, queue->posted);
  }
  CHECK(most - least <= 2 * (1 << 20));  // within two of the largest writes, of 50 MiB each
}

TEST(turns_pass_a_blocked_peer_by) {
  std::vector<std::unique_ptr<Queue>> queues;
  for (int i = 0; i < 2; ++i) queues.push_back(std::make_unique<Queue>());
  queues[0]->writes.assign(1000, 1 << 20);
  queues[0]->refuses = true;
  queues[1]->writes.assign(1000, 65536);
  ByteTurns<Queue> turns;
  for (int round = 0; round < 50; ++round) turns.round(queues);
  CHECK_EQ(queues[0]->posted, 0u);
  CHECK_EQ(queues[1]->posted, 50u * kTurnBytes);
  // It saved nothing up: on its return it does not crowd the other out.
  queues[0]->refuses = false;
  for (int round = 0; round < 20; ++round) turns.round(queues);
  CHECK(queues[0]->posted <= 20u * kTurnBytes + 2 * kTurnBytes + (1 << 20));
}

TEST(turns_with_nothing_to_do_say_so) {
  std::vector<std::unique_ptr<Queue>> queues;
  ByteTurns<Queue> turns;
  CHECK(!turns.round(queues));
  queues.push_back(std::make_unique<Queue>());
  CHECK(!turns.round(queues));
}
