// The control channel's calls from other threads: they check the directory of peers and hand the
// work to the control thread.
#include <algorithm>

#include "control_channel.h"
#include "control_session.h"

namespace ffi_transport {
namespace {

constexpr int kDisconnectMs = 1000;
constexpr int64_t kMaxBacklog = 128 << 20;

Status closed() { return Status(Code::kClosed, "the engine is closed"); }

}  // namespace

Result<int64_t> ControlChannel::connect(const std::string& address, double timeout_s) {
  auto waiting = std::make_shared<Waiting>();
  if (!inbox_.post([=, this] { begin_connect(address, timeout_s, waiting); })) return closed();
  waiting->wait();
  if (!waiting->status.ok()) return waiting->status;
  return waiting->peer;
}

void ControlChannel::set_hello(std::string hello) {
  inbox_.call([&] {
    hello_ = std::move(hello);
    std::vector<Session*> held;
    for (auto& [tag, session] : sessions_) {
      if (session->state == Session::State::kHeld) held.push_back(session.get());
    }
    // In the order in which they came: peer ids are given out at arrival.
    std::ranges::sort(held, {}, &Session::peer);
    for (Session* session : held) accept(*session);
  });
}

Status ControlChannel::check_peer(int64_t peer) const {
  std::lock_guard lock(directory_mutex_);
  const auto it = directory_.find(peer);
  if (it == directory_.end() && peer >= 1 && peer <= newest_peer_) {
    Status::Detail detail;
    detail.text = "peer " + std::to_string(peer) + " was lost long ago";
    detail.peer = peer;
    return Status(Code::kPeerLost, std::move(detail));
  }
  if (it == directory_.end()) {
    return Status(Code::kInvalid, "no peer " + std::to_string(peer) + " was ever connected");
  }
  const Entry& entry = it->second;
  if (!entry.lost) return {};
  Status::Detail detail;
  detail.text =
      "peer " + std::to_string(peer) + " (" + entry.address + ") is lost: " + entry.reason;
  detail.peer = peer;
  detail.elapsed_s = entry.elapsed_s;
  return Status(Code::kPeerLost, std::move(detail));
}

Result<std::string> ControlChannel::hello_of(int64_t peer) const {
  if (Status status = check_peer(peer); !status.ok()) return status;
  std::lock_guard lock(directory_mutex_);
  const auto it = directory_.find(peer);
  // Lost since it was checked: as much its hello as before, which is gone.
  return it == directory_.end() ? std::string() : it->second.hello;
}

Status ControlChannel::send(int64_t peer, std::string payload) {
  if (Status status = check_peer(peer); !status.ok()) return status;
  if (payload.size() > kMaxMessageBytes) {
    return Status(Code::kInvalid, "a message of " + std::to_string(payload.size()) +
                                      " bytes; at most " + std::to_string(kMaxMessageBytes) +
                                      " are allowed");
  }
  std::shared_ptr<std::atomic<int64_t>> backlog;
  {
    std::lock_guard lock(directory_mutex_);
    const auto it = directory_.find(peer);
    if (it != directory_.end()) backlog = it->second.backlog;
  }
  if (!backlog) return check_peer(peer);  // lost since it was checked
  const auto bytes = static_cast<int64_t>(payload.size());
  if (backlog->fetch_add(bytes, std::memory_order_relaxed) + bytes > kMaxBacklog) {
    backlog->fetch_sub(bytes, std::memory_order_relaxed);
    Status::Detail detail;
    detail.text = "peer " + std::to_string(peer) +
                  " takes no messages: " + std::to_string(kMaxBacklog >> 20) +
                  " MiB are waiting for it";
    detail.peer = peer;
    return Status(Code::kTimeout, std::move(detail));
  }
  auto shared = std::make_shared<std::string>(std::move(payload));
  const bool posted = inbox_.post([=, this] {
    Session* session = find_peer(peer);
    if (session == nullptr || session->state != Session::State::kConnected) return;
    // Within its limits by the checks above, so it cannot be refused.
    [[maybe_unused]] Status status = session->out.queue(MessageKind::kUser, std::move(*shared));
  });
  return posted ? Status() : closed();
}

Status ControlChannel::fence(int64_t peer) {
  if (Status status = check_peer(peer); status.code() == Code::kInvalid) return status;
  const bool ran = inbox_.call([&] {
    Session* session = find_peer(peer);
    if (session != nullptr) lose(*session, "fenced by this node", true);
  });
  return ran ? Status() : closed();
}

Status ControlChannel::disconnect(int64_t peer) {
  if (Status status = check_peer(peer); status.code() == Code::kInvalid) return status;
  auto waiting = std::make_shared<Waiting>();
  const bool posted = inbox_.post([=, this] {
    Session* session = find_peer(peer);
    if (session == nullptr) {
      waiting->finish({});
    } else {
      leave(*session, waiting, kDisconnectMs);
    }
  });
  if (!posted) return closed();
  waiting->wait();
  return waiting->status;
}

void ControlChannel::report_broken(int64_t peer, std::string reason) {
  inbox_.post([this, peer, reason = std::move(reason)] {
    Session* session = find_peer(peer);
    if (session != nullptr) lose(*session, "the data connection failed: " + reason, true);
  });
}

}  // namespace ffi_transport
