// One session's two ordered streams of messages, free of any network: cutting messages into
// fragments under credits on one side, ordering and joining them on the other (R12).
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "control_wire.h"
#include "status.h"

namespace ffi_transport {

// Fragments that may be on their way without having been acknowledged.
constexpr uint64_t kWindow = 128;
// Above what ControlChannel::send lets through, so that nothing it accepted is refused here.
constexpr size_t kMaxQueuedBytes = 192 << 20;

struct Message {
  MessageKind kind = MessageKind::kUser;
  std::string payload;
};

class OutStream {
 public:
  // kInvalid for a message that is too long, kAgain when too much is queued already.
  Status queue(MessageKind kind, std::string payload);
  // Is there a fragment, and a credit for it?
  bool ready() const { return !queue_.empty() && next_ - acknowledged_ < kWindow; }
  // Fills sequence, flags, kind and length of the next fragment and returns its payload, which
  // stays valid until advance().
  std::string_view peek(PacketHeader* header) const;
  void advance();
  // From a received packet. kProtocol when the peer acknowledges what was never sent.
  Status acknowledge(uint64_t acknowledged);
  bool all_acknowledged() const { return queue_.empty() && acknowledged_ == next_; }
  // Sends everything again from the start: only while nothing was acknowledged (a HELLO whose
  // connection failed).
  void restart();

 private:
  struct Pending {
    MessageKind kind;
    std::string payload;
    size_t offset = 0;
  };
  std::deque<Pending> queue_;
  std::deque<Pending> sent_;  // kept for restart() until something is acknowledged
  size_t queued_bytes_ = 0;
  uint64_t next_ = 0;
  uint64_t acknowledged_ = 0;
};

class InStream {
 public:
  // Takes a fragment, in any order within the window, and appends the messages that it completes.
  // kProtocol when the stream cannot be valid; `duplicate` tells that it was seen before.
  Status accept(const Packet& packet, std::vector<Message>* messages, bool* duplicate);
  // Fragments taken in order so far.
  uint64_t acknowledged() const { return expected_; }

 private:
  struct Fragment {
    PacketHeader header;
    std::string payload;
  };
  Status join(const PacketHeader& header, std::string_view payload, std::vector<Message>* messages);

  uint64_t expected_ = 0;
  std::map<uint64_t, Fragment> early_;
  bool open_ = false;  // a message has begun
  PacketHeader current_;
  std::string joined_;
};

}  // namespace ffi_transport
