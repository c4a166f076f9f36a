// The one queue through which native threads tell Python what happened.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace ffi_transport {

enum class EventKind : int32_t {
  kPeerConnected,
  kPeerLost,
  kMessage,
  kTransferEnded,
  kCounterReached,
  kCounterOvershoot,
  kTriggerFault,
  kArrivalFailed,
};

enum class TransferOutcome : int32_t { kCompleted, kCancelled, kFailed };

struct Event {
  EventKind kind = EventKind::kMessage;
  int64_t peer = -1;
  int64_t id = -1;     // transfer, slot or step
  int64_t first = 0;   // units done, count, expected, layer
  int64_t second = 0;  // units planned, seen, ordinal
  int64_t bytes = 0;
  int32_t outcome = 0;  // TransferOutcome
  double elapsed_s = 0;
  std::string text;     // address, reason, error, fault kind
  std::string payload;  // hello, message, fault detail
};

class EventQueue {
 public:
  EventQueue();
  ~EventQueue();
  EventQueue(const EventQueue&) = delete;
  EventQueue& operator=(const EventQueue&) = delete;

  void push(Event event);
  // Waits until there is an event, the queue is closed or the time is over; then takes all events.
  std::vector<Event> poll(double timeout_s);
  // Readable while events wait. Owned by the queue.
  int fd() const { return fd_; }
  // Wakes every waiter; poll returns at once from now on.
  void close();

 private:
  std::mutex mutex_;
  std::condition_variable ready_;
  std::vector<Event> events_;
  bool closed_ = false;
  int fd_ = -1;
};

}  // namespace ffi_transport
