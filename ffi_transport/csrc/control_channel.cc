#include "control_channel.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "control_session.h"
#include "threads.h"

namespace ffi_transport {
namespace {

constexpr size_t kSendBuffers = 128;
constexpr size_t kReceiveBuffers = 256;
constexpr int kFragmentsPerTurn = 16;  // of one session, then the next one's turn
constexpr uint64_t kAcknowledgeAfter = kWindow / 4;
constexpr int kByeMs = 300;

}  // namespace

Result<std::unique_ptr<ControlChannel>> ControlChannel::open(Fabric* fabric, uint16_t port,
                                                             uint64_t epoch,
                                                             const ControlOptions& options,
                                                             DataPlane* data, EventQueue* events,
                                                             Stats* stats) {
  std::unique_ptr<ControlChannel> channel(
      new ControlChannel(fabric, epoch, options, data, events, stats));
  if (Status status = channel->open_endpoint(port); !status.ok()) return status;
  return channel;
}

ControlChannel::ControlChannel(Fabric* fabric, uint64_t epoch, const ControlOptions& options,
                               DataPlane* data, EventQueue* events, Stats* stats)
    : fabric_(fabric),
      epoch_(epoch),
      options_(options),
      data_(data),
      events_(events),
      stats_(stats),
      inbox_(&waiter_) {}

ControlChannel::~ControlChannel() { stop(); }

Status ControlChannel::open_endpoint(uint16_t port) {
  auto domain = fabric_->open_domain("");
  if (!domain.ok()) return domain.status();
  domain_ = domain.take();
  auto endpoint = domain_->open_endpoint(port);
  if (!endpoint.ok()) return endpoint.status();
  endpoint_ = endpoint.take();
  name_ = endpoint_->name();
  address_ = fabric_->format_address(name_);
  const size_t receives = std::min(kReceiveBuffers, domain_->limits().receive_depth);
  const size_t sends = std::min(kSendBuffers, domain_->limits().send_depth);
  const size_t bytes = (receives + sends) * kPacketBytes;
  storage_ = std::make_unique<char[]>(bytes);
  if (domain_->limits().local_descriptors) {
    auto registration = domain_->register_memory(storage_.get(), bytes);
    if (!registration.ok()) return registration.status();
    registration_ = registration.take();
  }
  buffers_.resize(receives + sends);
  for (size_t i = 0; i < buffers_.size(); ++i) {
    buffers_[i].data = storage_.get() + i * kPacketBytes;
    buffers_[i].is_receive = i < receives;
    (buffers_[i].is_receive ? unposted_receive_ : free_send_).push_back(&buffers_[i]);
  }
  waiter_.watch(endpoint_->wait_fd());
  return {};
}

void ControlChannel::start() {
  thread_ = std::thread([this] { loop(); });
  name_thread(thread_, "fabric-control");
}

void ControlChannel::stop() {
  if (!thread_.joinable()) return;
  stopping_.store(true, std::memory_order_seq_cst);
  waiter_.wake();
  thread_.join();
}

void ControlChannel::loop() {
  auto active_until = Clock::now();
  const auto spin = std::chrono::microseconds(options_.spin_us);
  int empty_turns = 0;
  bool leaving = false;
  for (;;) {
    bool progress = inbox_.run();
    if (stopping_.load(std::memory_order_relaxed)) {
      if (!leaving) {
        leaving = true;
        inbox_.close();
        inbox_.run();  // what was accepted before it closed
        std::vector<Session*> all;
        for (auto& [tag, session] : sessions_) all.push_back(session.get());
        for (Session* session : all) leave(*session, nullptr, kByeMs);
      }
      if (sessions_.empty()) break;
    }
    while (!unposted_receive_.empty()) {
      Buffer* buffer = unposted_receive_.back();
      unposted_receive_.pop_back();
      post_receive(*buffer);
      if (!unposted_receive_.empty() && unposted_receive_.back() == buffer) break;  // full
    }
    progress |= poll_endpoint();
    for (auto& [tag, session] : sessions_) progress |= pump(*session);
    const auto now = Clock::now();
    progress |= timers(now);
    dead_.clear();
    if (progress) {
      active_until = now + spin;
      empty_turns = 0;
      continue;
    }
    if (++empty_turns < kEmptyTurns || now < active_until) continue;
    waiter_.announce();
    const bool stop_now = stopping_.load(std::memory_order_seq_cst) && !leaving;
    if (stop_now || !inbox_.empty() || !endpoint_->may_block()) {
      waiter_.retract();
      continue;
    }
    bump(stats_->thread_blocks);
    waiter_.block(block_ms(now));
  }
  waiter_.unwatch(endpoint_->wait_fd());
  endpoint_.reset();
}

// How long nothing needs doing: until the next heartbeat or deadline; a moment when the provider
// refused something; for ever when nobody is connected.
int ControlChannel::block_ms(Clock::time_point now) const {
  if (endpoint_->wait_fd() < 0) return 1;
  auto next = Clock::time_point::max();
  for (const auto& [tag, session] : sessions_) {
    if (session->stalled) return 1;
    next = std::min(next, session->deadline);
    if (session->state == Session::State::kGreeting && session->retry_at > now) {
      next = std::min(next, session->retry_at);
    }
    if (session->state == Session::State::kGreeting) {
      next = std::min(next, session->last_sent + std::chrono::milliseconds(options_.heartbeat_ms));
    }
    if (session->state == Session::State::kHeld) {
      next =
          std::min(next, session->last_heard + std::chrono::milliseconds(options_.peer_timeout_ms));
    }
    if (session->state == Session::State::kConnected) {
      next = std::min({next, session->last_sent + std::chrono::milliseconds(options_.heartbeat_ms),
                       session->last_heard + std::chrono::milliseconds(options_.peer_timeout_ms)});
    }
  }
  if (next == Clock::time_point::max()) return -1;
  const auto wait = std::chrono::duration_cast<std::chrono::milliseconds>(next - now).count();
  return static_cast<int>(std::clamp<int64_t>(wait + 1, 1, 60'000));
}

void ControlChannel::post_receive(Buffer& buffer) {
  void* descriptor = registration_ ? registration_->descriptor() : nullptr;
  if (!endpoint_->recv(buffer.data, kPacketBytes, descriptor, &buffer.context).ok()) {
    unposted_receive_.push_back(&buffer);
  }
}

bool ControlChannel::poll_endpoint() {
  std::array<Completion, 32> completions;
  const int count = endpoint_->poll(completions);
  for (int i = 0; i < count; ++i) {
    const Completion& completion = completions[i];
    if (completion.context == nullptr) continue;
    Buffer& buffer = *reinterpret_cast<Buffer*>(completion.context);
    if (buffer.is_receive) {
      if (completion.error == 0) {
        on_receive({buffer.data, static_cast<size_t>(completion.length)});
      } else {
        bump(stats_->control_packets_malformed);  // longer than any of ours, or a lost connection
      }
      post_receive(buffer);
    } else {
      on_send_done(buffer, completion.error);
    }
  }
  return count > 0;
}

PacketHeader ControlChannel::header_for(const Session& session) const {
  PacketHeader header;
  header.sender_epoch = epoch_;
  header.receiver_epoch = session.remote_epoch;
  header.session = session.tag;
  header.acknowledged = session.in.acknowledged();
  return header;
}

bool ControlChannel::transmit(Session& session, const PacketHeader& header,
                              std::string_view payload) {
  if (free_send_.empty()) {
    session.stalled = true;
    return false;
  }
  Buffer& buffer = *free_send_.back();
  buffer.session = session.tag;
  const size_t size = write_packet(header, payload, {buffer.data, kPacketBytes});
  void* descriptor = registration_ ? registration_->descriptor() : nullptr;
  const Status status =
      endpoint_->send(session.remote, buffer.data, size, descriptor, &buffer.context);
  session.stalled = !status.ok();
  if (!status.ok()) return false;
  free_send_.pop_back();
  bump(stats_->control_packets_sent);
  session.last_sent = Clock::now();
  session.acknowledged_sent = header.acknowledged;
  return true;
}

// A packet outside the ordered stream; where the provider is full it is dropped, as the next
// heartbeat repeats what it says.
void ControlChannel::send_bare(Session& session, PacketType type, std::string_view payload) {
  if (!session.has_remote) return;
  PacketHeader header = header_for(session);
  header.type = type;
  transmit(session, header, payload.substr(0, kFragmentBytes));
}

bool ControlChannel::pump(Session& session) {
  if (!session.has_remote || session.state == Session::State::kGone) return false;
  session.stalled = false;
  if (session.state == Session::State::kGreeting && Clock::now() < session.retry_at) return false;
  bool sent = false;
  for (int i = 0; i < kFragmentsPerTurn && session.out.ready(); ++i) {
    PacketHeader header = header_for(session);
    const std::string_view payload = session.out.peek(&header);
    if (!transmit(session, header, payload)) break;
    if (header.kind == MessageKind::kUser) {
      session.backlog->fetch_sub(static_cast<int64_t>(payload.size()), std::memory_order_relaxed);
      if (header.last) bump(stats_->messages_sent);
    }
    session.out.advance();
    sent = true;
  }
  if (session.in.acknowledged() - session.acknowledged_sent >= kAcknowledgeAfter) {
    send_bare(session, PacketType::kHeartbeat, {});
  }
  return sent;
}

void ControlChannel::on_send_done(Buffer& buffer, int error) {
  free_send_.push_back(&buffer);
  if (error == 0) return;
  const auto it = sessions_.find(buffer.session);
  if (it == sessions_.end()) return;
  Session& session = *it->second;
  if (session.state == Session::State::kGreeting) {
    // Nobody listens there yet: greet again from the start until the caller's time is over.
    session.out.restart();
    session.retry_at = Clock::now() + std::chrono::milliseconds(20);
    return;
  }
  lose(session, std::string("the control connection failed: ") + std::strerror(error), false);
}

bool ControlChannel::timers(Clock::time_point now) {
  const auto heartbeat = std::chrono::milliseconds(options_.heartbeat_ms);
  const auto timeout = std::chrono::milliseconds(options_.peer_timeout_ms);
  std::vector<Session*> all;
  for (auto& [tag, session] : sessions_) all.push_back(session.get());
  bool acted = false;
  for (Session* session : all) {
    switch (session->state) {
      case Session::State::kGreeting:
      case Session::State::kIncoming:
        if (now >= session->deadline) {
          lose(*session, "no answer to HELLO", true);
          acted = true;
        } else if (session->state == Session::State::kGreeting && !session->out.ready() &&
                   now >= session->retry_at && now - session->last_sent >= heartbeat) {
          // The HELLO is out. The peer may hold it until its application is ready: still here.
          send_bare(*session, PacketType::kHeartbeat, {});
        }
        break;
      case Session::State::kHeld:
        if (now - session->last_heard >= timeout) {
          lose(*session, "it stopped asking before this node was ready", false);
          acted = true;
        }
        break;
      case Session::State::kConnected:
        if (now - session->last_heard >= timeout) {
          lose(*session, "no sign of life", false);
          acted = true;
        } else if (now - session->last_sent >= heartbeat) {
          send_bare(*session, PacketType::kHeartbeat, {});
        }
        break;
      case Session::State::kLeaving:
        if (session->out.all_acknowledged() || now >= session->deadline) {
          if (session->waiting) session->waiting->finish({});
          remove(*session);
          acted = true;
        }
        break;
      case Session::State::kGone:
        break;
    }
  }
  return acted;
}

void ControlChannel::on_receive(std::string_view bytes) {
  Packet packet;
  const Status status = parse_packet(bytes, &packet);
  const PacketHeader& header = packet.header;
  const bool greets = header.type == PacketType::kFragment && header.kind == MessageKind::kHello &&
                      header.receiver_epoch == 0;
  if (!status.ok()) {
    bump(stats_->control_packets_malformed);
    if (header.version != kProtocolVersion && greets && header.first) {
      refuse_stranger(hello_reply_name(packet.payload), header.session, header.sender_epoch,
                      status.text());
    }
    return;
  }
  bump(stats_->control_packets_received);
  auto it = sessions_.find(header.session);
  if (it == sessions_.end() && greets && !stopping_.load(std::memory_order_relaxed)) {
    size_t incoming = 0;
    for (auto& [tag, session] : sessions_) {
      incoming +=
          session->state == Session::State::kIncoming || session->state == Session::State::kHeld;
    }
    constexpr size_t kMaxIncoming = 128;  // strangers may not fill our memory
    if (incoming < kMaxIncoming) {
      add_session(header.session, header.sender_epoch);
      it = sessions_.find(header.session);
    }
  }
  if (it == sessions_.end()) {
    bump(stats_->control_packets_stale);
    return;
  }
  on_packet(*it->second, packet);
}

}  // namespace ffi_transport
