// The control channel's private structures.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>

#include "control_channel.h"

namespace ffi_transport {

// A Python thread that waits for the control thread.
struct ControlChannel::Waiting {
  std::mutex mutex;
  std::condition_variable done;
  bool finished = false;
  Status status;
  int64_t peer = -1;

  void finish(Status result, int64_t result_peer = -1) {
    std::lock_guard lock(mutex);
    if (finished) return;
    finished = true;
    status = std::move(result);
    peer = result_peer;
    done.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    done.wait(lock, [this] { return finished; });
  }
};

// A packet buffer that is with the provider. The context comes first.
struct ControlChannel::Buffer {
  OpContext context;
  char* data = nullptr;
  bool is_receive = false;
  uint64_t session = 0;  // of a send
};

struct ControlChannel::Session {
  enum class State {
    kGreeting,  // our HELLO is under way
    kIncoming,  // a peer's HELLO is arriving
    kHeld,      // it is here, but the application has not set its own yet
    kConnected,
    kLeaving,  // our BYE is under way
    kGone,
  };

  uint64_t tag = 0;
  int64_t peer = -1;
  State state = State::kIncoming;
  PeerAddress remote = 0;
  bool has_remote = false;
  uint64_t remote_epoch = 0;  // 0 until known
  std::string remote_name, remote_address;
  Hello hello;  // the peer's

  OutStream out;
  InStream in;
  uint64_t acknowledged_sent = 0;
  bool stalled = false;
  Clock::time_point last_heard, last_sent, deadline, retry_at, begun;
  std::shared_ptr<std::atomic<int64_t>> backlog = std::make_shared<std::atomic<int64_t>>(0);
  WaitingPtr waiting;
  double timeout_s = 0;
};

}  // namespace ffi_transport
