// Control packets as bytes (R12). Everything is little-endian. A packet is at most 4 KiB: a header
// of 64 bytes and a fragment of a message. What a peer sends is never trusted: parsing checks every
// length and refuses another protocol version by number.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "status.h"

namespace ffi_transport {

constexpr uint16_t kProtocolVersion = 2;
constexpr uint32_t kPacketMagic = 0x4744584a;  // "JXDG"
constexpr size_t kPacketBytes = 4096;
constexpr size_t kHeaderBytes = 64;
constexpr size_t kFragmentBytes = kPacketBytes - kHeaderBytes;
constexpr size_t kMaxMessageBytes = 64 << 20;
constexpr size_t kMaxHelloBytes = 384 << 10;  // within the first window, which needs no credit

enum class PacketType : uint8_t {
  kFragment = 1,   // ordered, takes a credit
  kHeartbeat = 2,  // unordered: carries the acknowledgement and shows life
  kRefuse = 3,     // unordered: the session is over; the payload says why. Of any version.
};

enum class MessageKind : uint32_t { kHello = 1, kHelloAck = 2, kUser = 3, kBye = 4 };

struct PacketHeader {
  uint16_t version = kProtocolVersion;
  PacketType type = PacketType::kHeartbeat;
  bool first = false;
  bool last = false;
  uint64_t sender_epoch = 0;
  uint64_t receiver_epoch = 0;  // 0 while the sender does not know it: in a HELLO
  uint64_t session = 0;
  uint64_t sequence = 0;      // of a fragment
  uint64_t acknowledged = 0;  // fragments taken in order so far: what the sender may count as read
  MessageKind kind = MessageKind::kUser;
  uint32_t message_bytes = 0;
};

struct Packet {
  PacketHeader header;
  std::string_view payload;  // points into the receive buffer
};

// Writes header and payload into `out` (kPacketBytes); returns the packet's size.
size_t write_packet(const PacketHeader& header, std::string_view payload, std::span<char> out);

// kProtocol for anything that is not a well-formed packet. On another version the header's
// `version` and, for a first HELLO fragment, the payload are still filled in, so that it can be
// refused by name.
Status parse_packet(std::string_view bytes, Packet* packet);

// A HELLO starts with the sender's control address in every version, so that any version can be
// answered.
struct Hello {
  std::string control_name;     // raw endpoint name
  std::string control_address;  // as people write it
  std::string provider;
  uint32_t slot_bits = 0;
  std::vector<std::string> data_names;  // one per domain
  std::string application;
};

std::string encode_hello(const Hello& hello);
Result<Hello> decode_hello(std::string_view bytes);
// The control name alone, from the first fragment of a HELLO of any version; empty if there is
// none.
std::string_view hello_reply_name(std::string_view payload);

}  // namespace ffi_transport
