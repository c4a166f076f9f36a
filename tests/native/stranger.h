// Someone who speaks to an engine's control endpoint without being an engine, for tests.
#pragma once

#include <memory>
#include <string>

#include "check.h"
#include "control_wire.h"
#include "loopback.h"

namespace check {

using namespace ffi_transport;  // NOLINT: of tests alone

struct Stranger {
  std::unique_ptr<Fabric> fabric = make_loopback();
  std::unique_ptr<Domain> domain = fabric->open_domain("").take();
  std::unique_ptr<Endpoint> endpoint = domain->open_endpoint(0).take();
  PeerAddress target;
  OpContext contexts[2];
  char buffer[kPacketBytes];
  std::string answer;

  explicit Stranger(const std::string& address)
      : target(*endpoint->insert(*fabric->parse_address(address))) {
    CHECK_OK(endpoint->recv(buffer, sizeof buffer, nullptr, &contexts[1]));
  }
  void send(std::string_view bytes) {
    CHECK(eventually([&] {
      poll();
      return endpoint->send(target, bytes.data(), bytes.size(), nullptr, &contexts[0]).ok();
    }));
  }
  void poll() {
    Completion completions[16];
    const int count = endpoint->poll(completions);
    for (int i = 0; i < count; ++i) {
      if (completions[i].kind != Completion::Kind::kRecv) continue;
      answer.assign(buffer, completions[i].length);
      CHECK_OK(endpoint->recv(buffer, sizeof buffer, nullptr, &contexts[1]));
    }
  }
  Packet wait_answer() {
    CHECK(eventually([&] {
      poll();
      return !answer.empty();
    }));
    Packet packet;
    CHECK_OK(parse_packet(answer, &packet));
    return packet;
  }
  Hello hello(const std::string& provider = "loopback", size_t domains = 1) {
    Hello out;
    out.control_name = endpoint->name();
    out.control_address = "loopback:1";
    out.provider = provider;
    out.slot_bits = 20;
    out.data_names.assign(domains, std::string("\x01\x00", 2));
    return out;
  }
  std::string greeting(const Hello& hello, uint16_t version = kProtocolVersion,
                       uint64_t epoch = 1234, uint64_t session = 99) {
    PacketHeader header;
    header.version = version;
    header.type = PacketType::kFragment;
    header.first = header.last = true;
    header.kind = MessageKind::kHello;
    header.sender_epoch = epoch;
    header.session = session;
    const std::string payload = encode_hello(hello);
    header.message_bytes = static_cast<uint32_t>(payload.size());
    std::string bytes(kPacketBytes, '\0');
    bytes.resize(write_packet(header, payload, {bytes.data(), bytes.size()}));
    return bytes;
  }
};

}  // namespace check
