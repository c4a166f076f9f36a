#include "event_queue.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <chrono>

namespace ffi_transport {

EventQueue::EventQueue() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}

EventQueue::~EventQueue() {
  if (fd_ >= 0) ::close(fd_);
}

void EventQueue::push(Event event) {
  std::lock_guard lock(mutex_);
  events_.push_back(std::move(event));
  if (events_.size() == 1) {
    // Under the lock, so that the descriptor is readable exactly while events wait. A full
    // eventfd is readable too, so a failed write loses nothing.
    const uint64_t one = 1;
    [[maybe_unused]] ssize_t written = ::write(fd_, &one, sizeof one);
    ready_.notify_all();
  }
}

std::vector<Event> EventQueue::poll(double timeout_s) {
  std::unique_lock lock(mutex_);
  if (events_.empty() && !closed_ && timeout_s > 0) {
    // A year stands for "for ever": a larger duration would overflow the clock.
    const auto wait = std::chrono::duration<double>(timeout_s < 3.15e7 ? timeout_s : 3.15e7);
    ready_.wait_until(lock,
                      std::chrono::steady_clock::now() +
                          std::chrono::duration_cast<std::chrono::steady_clock::duration>(wait),
                      [this] { return closed_ || !events_.empty(); });
  }
  std::vector<Event> taken;
  taken.swap(events_);
  if (!taken.empty()) {
    uint64_t value;
    [[maybe_unused]] ssize_t got = ::read(fd_, &value, sizeof value);
  }
  return taken;
}

void EventQueue::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  ready_.notify_all();
}

}  // namespace ffi_transport
