#include "control_stream.h"

#include <algorithm>

namespace ffi_transport {

Status OutStream::queue(MessageKind kind, std::string payload) {
  const bool hello = kind == MessageKind::kHello || kind == MessageKind::kHelloAck;
  const size_t limit = hello ? kMaxHelloBytes : kMaxMessageBytes;
  if (payload.size() > limit) {
    return Status(Code::kInvalid, "a control message of " + std::to_string(payload.size()) +
                                      " bytes; at most " + std::to_string(limit) + " are allowed");
  }
  if (queued_bytes_ + payload.size() > kMaxQueuedBytes) return Status::Again();
  queued_bytes_ += payload.size();
  queue_.push_back({kind, std::move(payload), 0});
  return {};
}

std::string_view OutStream::peek(PacketHeader* header) const {
  const Pending& front = queue_.front();
  const size_t length = std::min(kFragmentBytes, front.payload.size() - front.offset);
  header->type = PacketType::kFragment;
  header->kind = front.kind;
  header->sequence = next_;
  header->first = front.offset == 0;
  header->last = front.offset + length == front.payload.size();
  header->message_bytes = static_cast<uint32_t>(front.payload.size());
  return std::string_view(front.payload).substr(front.offset, length);
}

void OutStream::advance() {
  Pending& front = queue_.front();
  const size_t length = std::min(kFragmentBytes, front.payload.size() - front.offset);
  front.offset += length;
  ++next_;
  queued_bytes_ -= length;
  if (front.offset < front.payload.size()) return;
  if (acknowledged_ == 0) sent_.push_back(std::move(front));
  queue_.pop_front();
}

Status OutStream::acknowledge(uint64_t acknowledged) {
  if (acknowledged > next_) {
    return Status(Code::kProtocol, "the peer acknowledged fragment " +
                                       std::to_string(acknowledged) + " of " +
                                       std::to_string(next_));
  }
  acknowledged_ = std::max(acknowledged_, acknowledged);  // packets may overtake each other
  if (acknowledged_ > 0) sent_.clear();
  return {};
}

void OutStream::restart() {
  if (acknowledged_ != 0) return;
  while (!sent_.empty()) {
    queue_.push_front(std::move(sent_.back()));
    sent_.pop_back();
  }
  queued_bytes_ = 0;
  for (Pending& pending : queue_) {
    pending.offset = 0;
    queued_bytes_ += pending.payload.size();
  }
  next_ = 0;
}

Status InStream::accept(const Packet& packet, std::vector<Message>* messages, bool* duplicate) {
  const uint64_t sequence = packet.header.sequence;
  *duplicate = sequence < expected_ || early_.contains(sequence);
  if (*duplicate) return {};
  if (sequence - expected_ >= kWindow) {
    return Status(Code::kProtocol, "control fragment " + std::to_string(sequence) +
                                       " is beyond the credits: " + std::to_string(expected_) +
                                       " is due");
  }
  if (sequence != expected_) {
    early_.emplace(sequence, Fragment{packet.header, std::string(packet.payload)});
    return {};
  }
  Status status = join(packet.header, packet.payload, messages);
  while (status.ok()) {
    const auto next = early_.find(expected_);
    if (next == early_.end()) break;
    const Fragment fragment = std::move(next->second);
    early_.erase(next);
    status = join(fragment.header, fragment.payload, messages);
  }
  return status;
}

Status InStream::join(const PacketHeader& header, std::string_view payload,
                      std::vector<Message>* messages) {
  ++expected_;
  if (header.first != !open_) {
    return Status(Code::kProtocol, open_ ? "a control message begins within another"
                                         : "a control message lacks its beginning");
  }
  if (header.first) {
    open_ = true;
    current_ = header;
    joined_.clear();
    // No reservation by announced length: a peer would get memory for a number.
  } else if (header.kind != current_.kind || header.message_bytes != current_.message_bytes) {
    return Status(Code::kProtocol, "a control message changes its kind or length on the way");
  }
  joined_.append(payload);
  if (joined_.size() > current_.message_bytes ||
      header.last != (joined_.size() == current_.message_bytes)) {
    return Status(Code::kProtocol, "a control message of " +
                                       std::to_string(current_.message_bytes) + " bytes has " +
                                       std::to_string(joined_.size()));
  }
  if (header.last) {
    open_ = false;
    messages->push_back({current_.kind, std::move(joined_)});
    joined_ = {};
  }
  return {};
}

}  // namespace ffi_transport
