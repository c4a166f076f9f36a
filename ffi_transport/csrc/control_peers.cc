// How peers come and go, on the control thread: the handshake, messages, and the one way in which a
// peer is lost.
#include <algorithm>
#include <chrono>
#include <random>

#include "control_channel.h"
#include "control_session.h"

namespace ffi_transport {
namespace {

Clock::duration seconds(double value) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(value));
}

double since(Clock::time_point then) {
  return std::chrono::duration<double>(Clock::now() - then).count();
}

uint64_t random_tag() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

Status closed() { return Status(Code::kClosed, "the engine is closed"); }

}  // namespace

ControlChannel::Session* ControlChannel::find_peer(int64_t peer) {
  for (auto& [tag, session] : sessions_) {
    if (session->peer == peer) return session.get();
  }
  return nullptr;
}

ControlChannel::Session& ControlChannel::add_session(uint64_t tag, uint64_t remote_epoch) {
  auto session = std::make_unique<Session>();
  session->tag = tag;
  session->peer = next_peer_++;
  session->remote_epoch = remote_epoch;
  session->last_heard = session->last_sent = session->begun = Clock::now();
  session->deadline = Clock::now() + std::chrono::milliseconds(options_.peer_timeout_ms);
  Session& reference = *session;
  sessions_[tag] = std::move(session);
  return reference;
}

// Out of the table at once; freed at the end of the turn, as callers still look at it.
void ControlChannel::remove(Session& session) {
  session.state = Session::State::kGone;
  const auto it = sessions_.find(session.tag);
  if (it == sessions_.end()) return;
  dead_.push_back(std::move(it->second));
  sessions_.erase(it);
}

Hello ControlChannel::own_hello(std::vector<std::string> data_names) const {
  Hello hello;
  hello.control_name = name_;
  hello.control_address = address_;
  hello.provider = options_.data_provider;
  hello.slot_bits = options_.slot_bits;
  hello.data_names = std::move(data_names);
  hello.application = hello_.value_or("");
  return hello;
}

void ControlChannel::begin_connect(const std::string& address, double timeout_s,
                                   const WaitingPtr& waiting) {
  if (!hello_) {
    waiting->finish(Status(Code::kInvalid, "set_hello() must come before connect()"));
    return;
  }
  auto name = fabric_->parse_address(address);
  if (!name.ok()) {
    waiting->finish(name.status());
    return;
  }
  auto remote = endpoint_->insert(*name);
  if (!remote.ok()) {
    waiting->finish(remote.status());
    return;
  }
  uint64_t tag = random_tag();
  while (sessions_.contains(tag)) tag = random_tag();
  Session& session = add_session(tag, 0);
  session.state = Session::State::kGreeting;
  session.remote = *remote;
  session.has_remote = true;
  session.remote_name = *name;
  session.remote_address = address;
  session.timeout_s = timeout_s;
  session.deadline = Clock::now() + seconds(timeout_s);
  session.waiting = waiting;
  auto names = data_->open_data(session.peer);
  Status status = names.status();
  if (status.ok()) {
    status = session.out.queue(MessageKind::kHello, encode_hello(own_hello(names.take())));
  }
  if (!status.ok()) {
    data_->close_data(session.peer, "never connected");
    waiting->finish(status);
    remove(session);
  }
}

void ControlChannel::on_packet(Session& session, const Packet& packet) {
  const PacketHeader& header = packet.header;
  const bool greeting = session.state == Session::State::kGreeting;
  // A peer that we have not answered cannot know our epoch.
  const bool unanswered =
      session.state == Session::State::kIncoming || session.state == Session::State::kHeld;
  if (greeting && session.remote_epoch == 0 && header.receiver_epoch == epoch_ &&
      header.type != PacketType::kHeartbeat) {
    session.remote_epoch = header.sender_epoch;
  }
  if (header.sender_epoch != session.remote_epoch ||
      (header.receiver_epoch != epoch_ && !(header.receiver_epoch == 0 && unanswered))) {
    bump(stats_->control_packets_stale);  // another life of the same address
    return;
  }
  session.last_heard = Clock::now();
  if (header.type == PacketType::kRefuse) {
    lose(session, std::string(packet.payload), false);
    return;
  }
  if (Status status = session.out.acknowledge(header.acknowledged); !status.ok()) {
    lose(session, status.text(), true);
    return;
  }
  if (header.type != PacketType::kFragment) return;
  std::vector<Message> messages;
  bool duplicate = false;
  const Status status = session.in.accept(packet, &messages, &duplicate);
  if (duplicate) bump(stats_->control_packets_duplicate);
  for (Message& message : messages) {
    on_message(session, std::move(message));
    if (session.state == Session::State::kGone) return;
  }
  if (!status.ok()) lose(session, status.text(), true);
}

void ControlChannel::on_message(Session& session, Message message) {
  using State = Session::State;
  if (session.state == State::kLeaving) return;  // we have said goodbye
  if (message.kind == MessageKind::kHello && session.state == State::kIncoming) {
    on_hello(session, message);
  } else if (message.kind == MessageKind::kHelloAck && session.state == State::kGreeting) {
    on_hello_ack(session, message);
  } else if (message.kind == MessageKind::kUser && session.state == State::kConnected) {
    bump(stats_->messages_received);
    Event event;
    event.kind = EventKind::kMessage;
    event.peer = session.peer;
    event.payload = std::move(message.payload);
    events_->push(std::move(event));
  } else if (message.kind == MessageKind::kBye && session.state != State::kIncoming) {
    send_bare(session, PacketType::kHeartbeat, {});  // the last acknowledgement: it waits for it
    lose(session, message.payload, false);
  } else {
    lose(session,
         "a message of kind " + std::to_string(static_cast<uint32_t>(message.kind)) +
             " came out of turn",
         true);
  }
}

void ControlChannel::on_hello(Session& session, const Message& message) {
  auto hello = decode_hello(message.payload);
  if (!hello.ok()) {
    lose(session, hello.status().text(), true);
    return;
  }
  auto remote = endpoint_->insert(hello->control_name);
  if (!remote.ok()) {
    lose(session, "the address in HELLO cannot be used: " + remote.status().text(), false);
    return;
  }
  session.remote = *remote;
  session.has_remote = true;
  session.remote_name = hello->control_name;
  session.remote_address = hello->control_address;
  session.hello = hello.take();
  session.state = Session::State::kHeld;
  // Held while the application warms up, for as long as the peer goes on asking (its heartbeats).
  session.deadline = Clock::time_point::max();
  lose_former(session);
  if (hello_) accept(session);
}

// A process that restarted on the same address: its former life is over, before anything of the new
// one is set up.
void ControlChannel::lose_former(const Session& session) {
  std::vector<Session*> former;
  for (auto& [tag, other] : sessions_) {
    const bool known =
        other->state == Session::State::kConnected || other->state == Session::State::kHeld;
    if (other.get() != &session && known && other->remote_name == session.remote_name &&
        other->remote_epoch != session.remote_epoch) {
      former.push_back(other.get());
    }
  }
  for (Session* other : former) lose(*other, "the peer restarted", false);
}

void ControlChannel::accept(Session& session) {
  const Hello& hello = session.hello;
  if (hello.provider != options_.data_provider) {
    refuse(session,
           "provider: this node uses " + options_.data_provider + ", the peer " + hello.provider);
  } else if (hello.slot_bits != options_.slot_bits) {
    refuse(session, "slot_bits: this node uses " + std::to_string(options_.slot_bits) +
                        ", the peer " + std::to_string(hello.slot_bits));
  } else if (hello.data_names.empty()) {
    refuse(session, "domains: the peer has none");
  } else {
    auto names = data_->open_data(session.peer);
    Status status = names.status();
    if (status.ok()) status = data_->connect_data(session.peer, hello.data_names);
    if (status.ok()) {
      status = session.out.queue(MessageKind::kHelloAck, encode_hello(own_hello(names.take())));
    }
    if (!status.ok()) {
      refuse(session, status.text());
      return;
    }
    admit(session, hello);
    Event event;
    event.kind = EventKind::kPeerConnected;
    event.peer = session.peer;
    event.text = session.remote_address;
    event.payload = hello.application;
    events_->push(std::move(event));
  }
}

void ControlChannel::on_hello_ack(Session& session, const Message& message) {
  auto hello = decode_hello(message.payload);
  Status status = hello.status();
  if (status.ok() && hello->data_names.empty()) {
    status = Status(Code::kProtocol, "domains: the peer has none");
  }
  if (status.ok()) status = data_->connect_data(session.peer, hello->data_names);
  if (!status.ok()) {
    lose(session, status.text(), true);
    return;
  }
  admit(session, *hello);
  session.waiting->finish({}, session.peer);
  session.waiting = nullptr;
}

void ControlChannel::admit(Session& session, const Hello& hello) {
  session.state = Session::State::kConnected;
  session.deadline = Clock::time_point::max();
  session.last_heard = Clock::now();
  bump(stats_->peers_connected);
  std::lock_guard lock(directory_mutex_);
  newest_peer_ = std::max(newest_peer_, session.peer);
  Entry& entry = directory_[session.peer];
  entry.hello = hello.application;
  entry.address = session.remote_address;
  entry.backlog = session.backlog;
}

void ControlChannel::refuse(Session& session, const std::string& reason) {
  lose(session, reason, true);
}

void ControlChannel::refuse_stranger(std::string_view name, uint64_t tag, uint64_t epoch,
                                     const std::string& reason) {
  if (name.empty()) return;
  auto remote = endpoint_->insert(name);
  if (!remote.ok()) return;
  Session stranger;
  stranger.tag = tag;
  stranger.remote_epoch = epoch;
  stranger.remote = *remote;
  stranger.has_remote = true;
  send_bare(stranger, PacketType::kRefuse, reason);
}

void ControlChannel::leave(Session& session, const WaitingPtr& waiting, int deadline_ms) {
  if (session.state != Session::State::kConnected) {
    // Never finished its handshake, or is leaving already.
    if (session.state == Session::State::kLeaving) {
      if (waiting) waiting->finish({});
      return;
    }
    lose(session, "the engine is closed", true);
    if (waiting) waiting->finish({});
    return;
  }
  data_->close_data(session.peer, "this node disconnected");
  {
    std::lock_guard lock(directory_mutex_);
    Entry& entry = directory_[session.peer];
    entry.lost = true;
    entry.reason = "this node disconnected";
    forget_details(session.peer);
  }
  session.state = Session::State::kLeaving;
  session.deadline = Clock::now() + std::chrono::milliseconds(deadline_ms);
  session.waiting = waiting;
  [[maybe_unused]] Status queued = session.out.queue(MessageKind::kBye, "the peer disconnected");
}

// Of a lost peer only the reason is kept, and of long lost ones nothing. Under the directory's
// mutex.
void ControlChannel::forget_details(int64_t peer) {
  constexpr size_t kKept = 1024;
  directory_[peer].hello = {};
  directory_[peer].backlog = nullptr;
  lost_.push_back(peer);
  if (lost_.size() > kKept) {
    directory_.erase(lost_.front());
    lost_.pop_front();
  }
}

// The one way out (R13): the data endpoints are fenced first, which ends the peer's transfers as
// failed, and only then is anyone told.
void ControlChannel::lose(Session& session, const std::string& reason, bool notify) {
  using State = Session::State;
  if (session.state == State::kGone) return;
  const State before = session.state;
  const double elapsed =
      before == State::kGreeting ? since(session.begun) : since(session.last_heard);
  if (before != State::kLeaving) data_->close_data(session.peer, reason);
  if (notify) {
    send_bare(session, PacketType::kRefuse,
              before == State::kConnected ? "the peer gave up this session: " + reason : reason);
  }
  remove(session);
  if (session.waiting) {
    Status::Detail detail;
    detail.peer = session.peer;
    detail.elapsed_s = elapsed;
    Status status;
    if (stopping_.load(std::memory_order_relaxed)) {
      status = closed();
    } else if (before == State::kGreeting) {
      const bool timed_out = Clock::now() >= session.deadline;
      detail.text = timed_out ? "no answer to HELLO from " + session.remote_address + " within " +
                                    std::to_string(session.timeout_s) + " s"
                              : session.remote_address + " refused the connection: " + reason;
      if (timed_out) detail.missing = "HELLO_ACK";
      status = Status(timed_out ? Code::kTimeout : Code::kProtocol, std::move(detail));
    }
    session.waiting->finish(std::move(status));
    session.waiting = nullptr;
  }
  if (before != State::kConnected) return;
  {
    std::lock_guard lock(directory_mutex_);
    Entry& entry = directory_[session.peer];
    entry.lost = true;
    entry.elapsed_s = elapsed;
    entry.reason = reason;
    forget_details(session.peer);
  }
  bump(stats_->peers_lost);
  Event event;
  event.kind = EventKind::kPeerLost;
  event.peer = session.peer;
  event.elapsed_s = elapsed;
  event.text = reason;
  events_->push(std::move(event));
}

}  // namespace ffi_transport
