#include "control_wire.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace ffi_transport {
namespace {

static_assert(std::endian::native == std::endian::little, "the wire is little-endian");

constexpr uint8_t kFirst = 1;
constexpr uint8_t kLast = 2;

template <class T>
void put(std::span<char> out, size_t at, T value) {
  std::memcpy(out.data() + at, &value, sizeof value);
}

template <class T>
T get(std::string_view bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

Status malformed(const std::string& what) {
  return Status(Code::kProtocol, "malformed control packet: " + what);
}

void append_string(std::string* out, std::string_view value) {
  const auto length = static_cast<uint32_t>(value.size());
  out->append(reinterpret_cast<const char*>(&length), sizeof length);
  out->append(value);
}

// Reads length-prefixed strings; ok() turns false for good at the first one that does not fit.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}
  uint32_t number() {
    if (bytes_.size() < 4) {
      ok_ = false;
      return 0;
    }
    const auto value = get<uint32_t>(bytes_, 0);
    bytes_.remove_prefix(4);
    return value;
  }
  std::string_view string() {
    const uint32_t length = number();
    if (!ok_ || length > bytes_.size()) {
      ok_ = false;
      return {};
    }
    const std::string_view value = bytes_.substr(0, length);
    bytes_.remove_prefix(length);
    return value;
  }
  bool ok() const { return ok_; }
  bool at_end() const { return bytes_.empty(); }

 private:
  std::string_view bytes_;
  bool ok_ = true;
};

}  // namespace

size_t write_packet(const PacketHeader& header, std::string_view payload, std::span<char> out) {
  put(out, 0, kPacketMagic);
  put(out, 4, header.version);
  put(out, 6, static_cast<uint8_t>(header.type));
  put(out, 7, static_cast<uint8_t>((header.first ? kFirst : 0) | (header.last ? kLast : 0)));
  put(out, 8, header.sender_epoch);
  put(out, 16, header.receiver_epoch);
  put(out, 24, header.session);
  put(out, 32, header.sequence);
  put(out, 40, header.acknowledged);
  put(out, 48, static_cast<uint32_t>(header.kind));
  put(out, 52, header.message_bytes);
  put(out, 56, static_cast<uint32_t>(payload.size()));
  put(out, 60, uint32_t{0});
  std::ranges::copy(payload, out.begin() + kHeaderBytes);
  return kHeaderBytes + payload.size();
}

Status parse_packet(std::string_view bytes, Packet* packet) {
  if (bytes.size() < kHeaderBytes || bytes.size() > kPacketBytes) {
    return malformed(std::to_string(bytes.size()) + " bytes");
  }
  if (get<uint32_t>(bytes, 0) != kPacketMagic) return malformed("wrong magic number");
  PacketHeader& header = packet->header;
  header.version = get<uint16_t>(bytes, 4);
  const auto type = get<uint8_t>(bytes, 6);
  const auto flags = get<uint8_t>(bytes, 7);
  header.first = flags & kFirst;
  header.last = flags & kLast;
  header.sender_epoch = get<uint64_t>(bytes, 8);
  header.receiver_epoch = get<uint64_t>(bytes, 16);
  header.session = get<uint64_t>(bytes, 24);
  header.sequence = get<uint64_t>(bytes, 32);
  header.acknowledged = get<uint64_t>(bytes, 40);
  const auto kind = get<uint32_t>(bytes, 48);
  header.message_bytes = get<uint32_t>(bytes, 52);
  const auto length = get<uint32_t>(bytes, 56);
  if (length != bytes.size() - kHeaderBytes) {
    return malformed("payload of " + std::to_string(bytes.size() - kHeaderBytes) +
                     " bytes, announced " + std::to_string(length));
  }
  packet->payload = bytes.substr(kHeaderBytes);
  header.type = static_cast<PacketType>(type);
  header.kind = static_cast<MessageKind>(kind);
  if (header.type == PacketType::kRefuse) return {};
  if (header.version != kProtocolVersion) {
    return Status(Code::kProtocol, "control protocol version " + std::to_string(header.version) +
                                       " is not spoken here; this node speaks version " +
                                       std::to_string(kProtocolVersion));
  }
  if (type != static_cast<uint8_t>(PacketType::kFragment) &&
      type != static_cast<uint8_t>(PacketType::kHeartbeat)) {
    return malformed("unknown type " + std::to_string(type));
  }
  if (header.type == PacketType::kFragment) {
    if (kind < static_cast<uint32_t>(MessageKind::kHello) ||
        kind > static_cast<uint32_t>(MessageKind::kBye)) {
      return malformed("unknown message kind " + std::to_string(kind));
    }
    const bool hello = header.kind == MessageKind::kHello || header.kind == MessageKind::kHelloAck;
    if (header.message_bytes > (hello ? kMaxHelloBytes : kMaxMessageBytes)) {
      return malformed("a message of " + std::to_string(header.message_bytes) + " bytes");
    }
  }
  return {};
}

std::string encode_hello(const Hello& hello) {
  std::string out;
  append_string(&out, hello.control_name);  // first in every version
  append_string(&out, hello.control_address);
  append_string(&out, hello.provider);
  out.append(reinterpret_cast<const char*>(&hello.slot_bits), sizeof hello.slot_bits);
  const auto count = static_cast<uint32_t>(hello.data_names.size());
  out.append(reinterpret_cast<const char*>(&count), sizeof count);
  for (const std::string& name : hello.data_names) append_string(&out, name);
  append_string(&out, hello.application);
  return out;
}

Result<Hello> decode_hello(std::string_view bytes) {
  Reader reader(bytes);
  Hello hello;
  hello.control_name = reader.string();
  hello.control_address = reader.string();
  hello.provider = reader.string();
  hello.slot_bits = reader.number();
  const uint32_t count = reader.number();
  if (count > 64) return Status(Code::kProtocol, "malformed HELLO: too many domains");
  for (uint32_t i = 0; i < count && reader.ok(); ++i) {
    hello.data_names.emplace_back(reader.string());
  }
  hello.application = reader.string();
  if (!reader.ok() || !reader.at_end()) {
    return Status(Code::kProtocol, "malformed HELLO of " + std::to_string(bytes.size()) + " bytes");
  }
  return hello;
}

std::string_view hello_reply_name(std::string_view payload) {
  Reader reader(payload);
  const std::string_view name = reader.string();
  return reader.ok() ? name : std::string_view();
}

}  // namespace ffi_transport
