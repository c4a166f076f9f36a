#include "waiter.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <condition_variable>

namespace ffi_transport {

Waiter::Waiter()
    : event_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)), epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  watch(event_);
}

Waiter::~Waiter() {
  ::close(epoll_);
  ::close(event_);
}

void Waiter::watch(int fd) {
  if (fd < 0 || watched_[fd]++ > 0) return;
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = fd;
  epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
}

void Waiter::unwatch(int fd) {
  const auto it = watched_.find(fd);
  if (it == watched_.end() || --it->second > 0) return;
  watched_.erase(it);
  epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr);
}

void Waiter::block(int timeout_ms) {
  epoll_event events[8];
  epoll_wait(epoll_, events, 8, timeout_ms);  // EINTR is as good as a wake-up
  sleeping_.store(false, std::memory_order_relaxed);
  uint64_t value;
  [[maybe_unused]] ssize_t got = ::read(event_, &value, sizeof value);
}

void Waiter::signal() {
  // Of several producers one is enough; the others skip the system call.
  if (!sleeping_.exchange(false, std::memory_order_relaxed)) return;
  const uint64_t one = 1;
  [[maybe_unused]] ssize_t written = ::write(event_, &one, sizeof one);
}

bool Inbox::post(std::function<void()> work) {
  {
    std::lock_guard lock(mutex_);
    if (closed_) return false;
    queue_.push_back(std::move(work));
    filled_.store(true, std::memory_order_seq_cst);
  }
  waiter_->wake();
  return true;
}

bool Inbox::call(const std::function<void()>& work) {
  std::mutex mutex;
  std::condition_variable done;
  bool finished = false;
  const bool accepted = post([&] {
    work();
    // Notified under the lock: the waiting frame, and with it `done`, is gone right after.
    std::lock_guard lock(mutex);
    finished = true;
    done.notify_one();
  });
  if (!accepted) return false;
  std::unique_lock lock(mutex);
  done.wait(lock, [&] { return finished; });
  return true;
}

bool Inbox::run() {
  if (!filled_.load(std::memory_order_acquire)) return false;
  std::vector<std::function<void()>> work;
  {
    std::lock_guard lock(mutex_);
    work.swap(queue_);
    filled_.store(false, std::memory_order_relaxed);
  }
  for (auto& item : work) item();
  return !work.empty();
}

void Inbox::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
}

}  // namespace ffi_transport
