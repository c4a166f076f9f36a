#include <cstring>
#include <random>

#include "check.h"
#include "control_wire.h"
#include "region.h"

using namespace ffi_transport;

namespace {

std::string packet_of(const PacketHeader& header, std::string_view payload) {
  std::string bytes(kPacketBytes, '\0');
  bytes.resize(write_packet(header, payload, {bytes.data(), bytes.size()}));
  return bytes;
}

PacketHeader sample() {
  PacketHeader header;
  header.type = PacketType::kFragment;
  header.first = true;
  header.sender_epoch = 0x1122334455667788;
  header.receiver_epoch = 42;
  header.session = 7;
  header.sequence = 1ull << 40;
  header.acknowledged = 3;
  header.kind = MessageKind::kUser;
  header.message_bytes = 100;
  return header;
}

}  // namespace

TEST(wire_round_trip) {
  const std::string bytes = packet_of(sample(), "hello");
  Packet packet;
  CHECK_OK(parse_packet(bytes, &packet));
  CHECK(packet.payload == "hello");
  CHECK_EQ(packet.header.sender_epoch, 0x1122334455667788ull);
  CHECK_EQ(packet.header.receiver_epoch, 42u);
  CHECK_EQ(packet.header.session, 7u);
  CHECK_EQ(packet.header.sequence, 1ull << 40);
  CHECK_EQ(packet.header.acknowledged, 3u);
  CHECK_EQ(packet.header.message_bytes, 100u);
  CHECK(packet.header.first && !packet.header.last);
}

TEST(wire_refuses_malformed_packets) {
  const std::string good = packet_of(sample(), "hello");
  Packet packet;
  for (size_t length = 0; length < good.size(); ++length) {
    CHECK(!parse_packet(std::string_view(good).substr(0, length), &packet).ok());
  }
  CHECK(!parse_packet(good + "x", &packet).ok());
  CHECK(!parse_packet(std::string(kPacketBytes + 1, '\0'), &packet).ok());
  const auto changed = [&](size_t at, char value) {
    std::string bytes = good;
    bytes[at] = value;
    return parse_packet(bytes, &packet);
  };
  CHECK_FAILS(changed(0, 'x'), Code::kProtocol, "magic");
  CHECK_FAILS(changed(6, 99), Code::kProtocol, "unknown type 99");
  CHECK_FAILS(changed(48, 99), Code::kProtocol, "unknown message kind 99");
  CHECK_FAILS(changed(55, 127), Code::kProtocol, "a message of");
  CHECK_FAILS(changed(56, 6), Code::kProtocol, "announced 6");
  CHECK_FAILS(changed(4, 9), Code::kProtocol, "version 9 is not spoken here");
}

TEST(wire_survives_random_bytes) {
  std::mt19937 random(11);
  for (int round = 0; round < 200000; ++round) {
    std::string bytes(random() % 200, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    if (round % 2 && bytes.size() >= 8) {
      const std::string good = packet_of(sample(), bytes);
      bytes = good;
      for (int i = 0; i < 3; ++i) bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    Packet packet;
    if (parse_packet(bytes, &packet).ok()) CHECK(packet.payload.size() <= kFragmentBytes);
    (void)decode_hello(bytes);
    (void)hello_reply_name(bytes);
    (void)RemoteRegion::decode(bytes);
  }
}

TEST(hello_round_trip_and_truncation) {
  Hello hello;
  hello.control_name = std::string("\x02\x00\x10\xe1", 4);
  hello.control_address = "127.0.0.1:4321";
  hello.provider = "net";
  hello.slot_bits = 20;
  hello.data_names = {"one", "two"};
  hello.application = std::string(100000, 'a');
  const std::string bytes = encode_hello(hello);
  auto decoded = decode_hello(bytes);
  CHECK_OK(decoded.status());
  CHECK(decoded->control_name == hello.control_name);
  CHECK(decoded->data_names == hello.data_names);
  CHECK(decoded->application == hello.application);
  CHECK_EQ(decoded->slot_bits, 20u);
  CHECK(hello_reply_name(std::string_view(bytes).substr(0, 60)) == hello.control_name);
  for (size_t length = 0; length < 60; ++length) {
    CHECK(!decode_hello(std::string_view(bytes).substr(0, length)).ok());
  }
  CHECK(!decode_hello(bytes + "x").ok());
}

TEST(region_descriptor_round_trip_and_refusal) {
  RemoteRegion region;
  region.length = 1ull << 33;
  region.domains = {{0, 1, 2}, {5, 3, 4}};
  const std::string bytes = region.encode();
  auto decoded = RemoteRegion::decode(bytes);
  CHECK_OK(decoded.status());
  CHECK_EQ(decoded->length, region.length);
  CHECK_EQ(decoded->domains[1].key, 3u);
  for (size_t length = 0; length < bytes.size(); ++length) {
    CHECK_FAILS(RemoteRegion::decode(bytes.substr(0, length)).status(), Code::kProtocol,
                "descriptor");
  }
  CHECK_EQ(decoded->domains[1].domain, 5u);
  CHECK_EQ(decoded->domains[1].base, 4u);
  CHECK_FAILS(RemoteRegion::decode(bytes + "x").status(), Code::kProtocol, "descriptor");
  const auto refused = [](std::vector<RemoteRegion::Access> domains) {
    RemoteRegion bad;
    bad.length = 1;
    bad.domains = std::move(domains);
    return RemoteRegion::decode(bad.encode()).status();
  };
  CHECK_FAILS(refused({}), Code::kProtocol, "descriptor");
  CHECK_FAILS(refused({{64, 0, 0}}), Code::kProtocol, "domain 64 in place 0");
  CHECK_FAILS(refused({{0, 0, 0}, {0, 1, 0}}), Code::kProtocol, "domain 0 in place 1");
  CHECK_FAILS(refused({{1, 0, 0}, {0, 1, 0}}), Code::kProtocol, "domain 0 in place 1");
  CHECK_FAILS(refused(std::vector<RemoteRegion::Access>(65)), Code::kProtocol, "descriptor");
}
