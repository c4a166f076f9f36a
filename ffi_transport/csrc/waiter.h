// How a native thread sleeps: it spins for a short while after its last progress, then blocks on
// its descriptors. Producers wake it only when it sleeps, so a busy engine makes no system calls
// for that and an idle one uses no CPU.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace ffi_transport {

using Clock = std::chrono::steady_clock;

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
      .count();
}

// Turns without progress before a thread blocks, however short it spins: a poll that returns
// nothing may still have read something.
constexpr int kEmptyTurns = 4;

class Waiter {
 public:
  Waiter();
  ~Waiter();
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

  // By the sleeping thread alone. A descriptor of -1 is ignored; one that is watched twice must be
  // unwatched twice (endpoints of one domain may share one).
  void watch(int fd);
  void unwatch(int fd);

  // The sleeper's side: announce(); look once more at every queue; then block() or retract().
  // Announcement, last look, the producer's store of its work and wake() are all sequentially
  // consistent: either the last look sees the work, or wake() sees the announcement.
  void announce() { sleeping_.store(true, std::memory_order_seq_cst); }
  void retract() { sleeping_.store(false, std::memory_order_relaxed); }
  void block(int timeout_ms);  // -1: for ever

  // The producer's side, after it stored its work. Costs a load when the thread is awake.
  void wake() {
    if (sleeping_.load(std::memory_order_seq_cst)) signal();
  }

 private:
  void signal();

  std::atomic<bool> sleeping_{false};
  int event_ = -1;
  int epoll_ = -1;
  std::map<int, int> watched_;
};

// Work handed to a thread by others.
class Inbox {
 public:
  explicit Inbox(Waiter* waiter) : waiter_(waiter) {}
  // False when the thread has stopped: then the work will not run.
  bool post(std::function<void()> work);
  // Runs `work` on the thread and waits for it. False when the thread has stopped.
  bool call(const std::function<void()>& work);
  // By the owning thread: runs what is there; true if there was something.
  bool run();
  bool empty() const { return !filled_.load(std::memory_order_seq_cst); }
  // Refuses later work; what was accepted before still runs in the last run().
  void close();

 private:
  Waiter* waiter_;
  std::mutex mutex_;
  std::vector<std::function<void()>> queue_;
  std::atomic<bool> filled_{false};
  bool closed_ = false;
};

}  // namespace ffi_transport
