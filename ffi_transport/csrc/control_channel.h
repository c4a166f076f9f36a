// The control channel: an endpoint and a thread of its own, so that a short message never waits
// behind bulk data (R12). It greets peers, carries messages, notices dead peers, and is the only
// place where a peer comes and goes: whatever happens to a peer happens on its thread, in order.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "control_stream.h"
#include "event_queue.h"
#include "fabric.h"
#include "stats.h"
#include "waiter.h"

namespace ffi_transport {

// What the channel asks of the engine, on the control thread. All of it returns promptly.
class DataPlane {
 public:
  virtual ~DataPlane() = default;
  // Opens the peer's data endpoints and returns their names, one per domain.
  virtual Result<std::vector<std::string>> open_data(int64_t peer) = 0;
  virtual Status connect_data(int64_t peer, const std::vector<std::string>& names) = 0;
  // The hard fence (R13): when it returns the endpoints are closed and the transfers have ended.
  virtual void close_data(int64_t peer, const std::string& reason) = 0;
};

struct ControlOptions {
  std::string data_provider;  // must be the same on both sides
  uint32_t slot_bits = 20;
  int spin_us = 50;
  int heartbeat_ms = 250;
  int peer_timeout_ms = 5000;
};

class ControlChannel {
 public:
  // Opens the endpoint. `fabric` and `data` outlive the channel.
  static Result<std::unique_ptr<ControlChannel>> open(Fabric* fabric, uint16_t port, uint64_t epoch,
                                                      const ControlOptions& options,
                                                      DataPlane* data, EventQueue* events,
                                                      Stats* stats);
  ~ControlChannel();

  void start();
  void stop();  // says BYE to everyone, waits for the answers a short while, joins

  const std::string& address() const { return address_; }

  // From any thread.
  Result<int64_t> connect(const std::string& address, double timeout_s);
  void set_hello(std::string hello);
  Result<std::string> hello_of(int64_t peer) const;
  Status send(int64_t peer, std::string payload);
  Status fence(int64_t peer);
  Status disconnect(int64_t peer);
  void report_broken(int64_t peer, std::string reason);
  // Ok, or kPeerLost with the reason, or kInvalid for a peer that never was.
  Status check_peer(int64_t peer) const;

 private:
  struct Session;
  struct Buffer;
  struct Waiting;
  using WaitingPtr = std::shared_ptr<Waiting>;

  // What other threads may read about a peer.
  struct Entry {
    bool lost = false;
    double elapsed_s = 0;
    std::string reason, hello, address;
    std::shared_ptr<std::atomic<int64_t>> backlog;  // bytes of user messages not posted yet
  };

  ControlChannel(Fabric* fabric, uint64_t epoch, const ControlOptions& options, DataPlane* data,
                 EventQueue* events, Stats* stats);
  Status open_endpoint(uint16_t port);

  // control_channel.cc: the thread, packets, timers
  void loop();
  bool poll_endpoint();
  bool pump(Session& session);
  bool timers(Clock::time_point now);
  int block_ms(Clock::time_point now) const;
  bool transmit(Session& session, const PacketHeader& header, std::string_view payload);
  void send_bare(Session& session, PacketType type, std::string_view payload);
  void on_receive(std::string_view bytes);
  void on_send_done(Buffer& buffer, int error);
  void post_receive(Buffer& buffer);
  PacketHeader header_for(const Session& session) const;

  // control_peers.cc: peers come and go
  void begin_connect(const std::string& address, double timeout_s, const WaitingPtr& waiting);
  void on_packet(Session& session, const Packet& packet);
  void on_message(Session& session, Message message);
  void on_hello(Session& session, const Message& message);
  void on_hello_ack(Session& session, const Message& message);
  void accept(Session& session);
  void lose_former(const Session& session);
  void forget_details(int64_t peer);
  void admit(Session& session, const Hello& hello);
  void leave(Session& session, const WaitingPtr& waiting, int deadline_ms);
  void lose(Session& session, const std::string& reason, bool notify);
  void refuse(Session& session, const std::string& reason);
  void refuse_stranger(std::string_view name, uint64_t tag, uint64_t epoch,
                       const std::string& reason);
  void remove(Session& session);
  Session* find_peer(int64_t peer);
  Session& add_session(uint64_t tag, uint64_t remote_epoch);
  Hello own_hello(std::vector<std::string> data_names) const;

  Fabric* const fabric_;
  const uint64_t epoch_;
  const ControlOptions options_;
  DataPlane* const data_;
  EventQueue* const events_;
  Stats* const stats_;
  std::string address_, name_;

  Waiter waiter_;
  Inbox inbox_;
  std::unique_ptr<Domain> domain_;
  std::unique_ptr<Endpoint> endpoint_;
  std::vector<Buffer> buffers_;  // in place for good: the provider holds pointers
  std::unique_ptr<Registration> registration_;
  std::unique_ptr<char[]> storage_;
  std::vector<Buffer*> free_send_;
  std::vector<Buffer*> unposted_receive_;

  // The thread's own.
  std::map<uint64_t, std::unique_ptr<Session>> sessions_;  // by tag
  std::vector<std::unique_ptr<Session>> dead_;             // removed during this turn
  std::optional<std::string> hello_;
  int64_t next_peer_ = 1;

  mutable std::mutex directory_mutex_;
  std::unordered_map<int64_t, Entry> directory_;
  std::deque<int64_t> lost_;  // in the directory, oldest first
  int64_t newest_peer_ = 0;   // ever connected

  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace ffi_transport
