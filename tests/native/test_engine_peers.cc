#include <cstring>

#include "engines.h"
#include "stranger.h"

using namespace check;
using namespace ffi_transport;

TEST(peers_greet_and_talk_in_order) {
  for (uint32_t delay : {0u, 25u}) {
    Node a(options(delay, 3), 64, "from a"), b(options(delay, 4), 64, "from b");
    const int64_t peer = connect(a, b);
    CHECK(*a.engine->control().hello_of(peer) == "from b");
    const Event connected = b.wait(EventKind::kPeerConnected);
    CHECK(connected.payload == "from a");
    CHECK(connected.text == a.engine->control_address());
    std::mt19937 random(1);
    std::vector<std::string> sent;
    for (int i = 0; i < 60; ++i) {
      sent.push_back(std::to_string(i) + std::string(random() % 20000, 'x'));
      CHECK_OK(a.engine->control().send(peer, sent.back()));
    }
    sent.push_back(std::string(600 << 10, 'y'));
    CHECK_OK(a.engine->control().send(peer, sent.back()));
    CHECK_OK(b.engine->control().send(connected.peer, "back"));
    for (const std::string& expected : sent) {
      CHECK(b.wait(EventKind::kMessage).payload == expected);
    }
    CHECK(a.wait(EventKind::kMessage).payload == "back");
  }
}

TEST(peers_wait_for_set_hello) {
  Node a(options(), 64, std::nullopt), b(options(), 64, std::nullopt);
  CHECK_FAILS(a.engine->connect(b.engine->control_address(), 1).status(), Code::kInvalid,
              "set_hello");
  a.engine->control().set_hello("a");
  CHECK_FAILS(a.engine->connect(b.engine->control_address(), 0.1).status(), Code::kTimeout,
              "no answer to HELLO");
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    b.engine->control().set_hello("warm at last");
  });
  auto peer = a.engine->connect(b.engine->control_address(), 20);
  CHECK_OK(peer.status());
  CHECK(*a.engine->control().hello_of(*peer) == "warm at last");
  later.join();
}

TEST(connect_to_nobody_times_out) {
  Node a;
  const auto status = a.engine->connect("loopback:39999", 0.2).status();
  CHECK_FAILS(status, Code::kTimeout, "no answer to HELLO from loopback:39999");
  CHECK(status.detail().missing == "HELLO_ACK");
  CHECK(status.detail().elapsed_s >= 0.2);
  CHECK_FAILS(a.engine->connect("what", 1).status(), Code::kInvalid, "'what' is not an address");
}

TEST(connect_waits_for_a_node_that_starts_later) {
  Node a;
  EngineOptions how = options();
  how.control_port = 39001;
  std::unique_ptr<Node> b;
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    b = std::make_unique<Node>(how);
  });
  CHECK_OK(a.engine->connect("loopback:39001", 20).status());
  later.join();
}

TEST(different_settings_are_refused_by_name) {
  Node a;
  EngineOptions ten = options();
  ten.slot_bits = 10;
  Node b(ten);
  CHECK_FAILS(a.engine->connect(b.engine->control_address(), 20).status(), Code::kProtocol,
              "slot_bits: this node uses 10, the peer 20");
  CHECK(!b.has(EventKind::kPeerConnected));
}

TEST(fence_ends_transfers_then_the_peer_on_both_sides) {
  for (const Shape& shape : kShapes) {
    EngineOptions how = options(60);
    how.bytes_in_flight = 16 << 10;
    Node a(with_domains(how, shape.here)), b(with_domains(how, shape.there), 16 << 20);
    const int64_t peer = connect(a, b);
    const int64_t there = b.wait(EventKind::kPeerConnected).peer;
    const int64_t transfer = *a.engine->open_transfer(peer, 1);
    for (int i = 0; i < 16; ++i) {
      CHECK_OK(a.engine->write_paged(transfer, a.region, b.remote, shuffled(256, i, 256 * i),
                                     {4096, 0, 4096, 0, 4096}));
    }
    CHECK(eventually([&] { return b.stat("units_received") > 0; }));
    CHECK_OK(b.engine->control().fence(there));  // the receiver's fence
    std::fill(b.memory.begin(), b.memory.end(), 9);
    const uint64_t counted = b.stat("immediates_received");
    const Event ended = a.wait(EventKind::kTransferEnded);
    CHECK_EQ(ended.outcome, static_cast<int>(TransferOutcome::kFailed));
    CHECK_EQ(a.wait(EventKind::kPeerLost).peer, peer);
    CHECK(b.wait(EventKind::kPeerLost).text == "fenced by this node");
    CHECK_EQ(b.stat("immediates_received"), counted);
    for (char byte : b.memory) CHECK_EQ(byte, 9);
    CHECK_FAILS(a.engine->open_transfer(peer, 1).status(), Code::kPeerLost, "is lost");
    CHECK_FAILS(a.engine->control().send(peer, "x"), Code::kPeerLost, "is lost");
    CHECK_OK(b.engine->control().fence(there));       // again: nothing
    CHECK_OK(b.engine->control().disconnect(there));  // nor this
    CHECK_FAILS(b.engine->control().fence(55), Code::kInvalid, "no peer 55");
    connect(a, b);  // and a new session works
  }
}

TEST(sender_fence_fails_its_transfers_before_it_returns) {
  for (const Shape& shape : kShapes) {
    EngineOptions how = options(60);
    how.bytes_in_flight = 16 << 10;
    Node a(with_domains(how, shape.here)), b(with_domains(how, shape.there), 5 << 20);
    const int64_t peer = connect(a, b);
    std::vector<int64_t> transfers;
    for (int i = 0; i < 5; ++i) {
      transfers.push_back(*a.engine->open_transfer(peer, i));
      CHECK_OK(a.engine->write_paged(transfers.back(), a.region, b.remote,
                                     shuffled(256, i, 256 * i), {4096, 0, 4096, 0, 4096}));
    }
    CHECK_OK(a.engine->control().fence(peer));
    int ended = 0;
    bool lost = false;
    for (const Event& event : a.engine->poll(0)) {
      if (event.kind == EventKind::kTransferEnded) {
        CHECK(!lost);  // PeerLost comes after the ends
        CHECK_EQ(event.outcome, static_cast<int>(TransferOutcome::kFailed));
        ++ended;
      }
      lost |= event.kind == EventKind::kPeerLost;
    }
    CHECK_EQ(ended, 5);
    CHECK(lost);
    CHECK_OK(a.engine->deregister(a.region));  // nothing reads it any more
  }
}

TEST(disconnect_delivers_what_was_queued) {
  Node a, b;
  const int64_t peer = connect(a, b);
  for (int i = 0; i < 20; ++i)
    CHECK_OK(a.engine->control().send(peer, std::string(50000, 'a' + i)));
  CHECK_OK(a.engine->control().disconnect(peer));
  for (int i = 0; i < 20; ++i) CHECK_EQ(b.wait(EventKind::kMessage).payload[0], 'a' + i);
  CHECK(b.wait(EventKind::kPeerLost).text == "the peer disconnected");
  CHECK_FAILS(a.engine->control().send(peer, "x"), Code::kPeerLost, "this node disconnected");
  CHECK(!a.has(EventKind::kPeerLost));
}

TEST(silent_peer_is_lost_after_the_timeout) {
  EngineOptions how = options();
  how.heartbeat_ms = 10;
  how.peer_timeout_ms = 1000;  // by then the transfer is open
  Node a(how);
  Stranger stranger(a.engine->control_address());
  stranger.send(stranger.greeting(stranger.hello()));
  a.wait(EventKind::kPeerConnected);
  const int64_t transfer = *a.engine->open_transfer(1, 1);
  const Event ended = a.wait(EventKind::kTransferEnded);
  CHECK_EQ(ended.id, transfer);
  const Event lost = a.wait(EventKind::kPeerLost);
  CHECK(lost.text == "no sign of life");
  CHECK(lost.elapsed_s >= 1.0);
}

TEST(restarted_peer_ends_its_former_life_first) {
  Node a;
  {
    Stranger first(a.engine->control_address());
    const std::string name = first.endpoint->name();
    first.send(first.greeting(first.hello()));
    a.wait(EventKind::kPeerConnected);
    // The same address with another epoch and session.
    first.send(first.greeting(first.hello(), kProtocolVersion, 77, 55));
    const Event lost = a.wait(EventKind::kPeerLost);
    CHECK(lost.text == "the peer restarted");
    CHECK(a.wait(EventKind::kPeerConnected).peer != lost.peer);
  }
}

TEST(held_peers_are_accepted_in_their_order) {
  Node a(options(), 64, std::nullopt);
  std::vector<std::unique_ptr<Stranger>> strangers;
  for (uint64_t i = 0; i < 8; ++i) {
    strangers.push_back(std::make_unique<Stranger>(a.engine->control_address()));
    Hello hello = strangers.back()->hello();
    hello.application = std::to_string(i);
    // Session tags in another order than the arrivals.
    strangers.back()->send(strangers.back()->greeting(hello, kProtocolVersion, 5, 100 - i));
    CHECK(eventually([&] { return a.stat("control_packets_received") == i + 1; }));
  }
  // The last one restarts while it is held: of that address the newest life alone is greeted.
  Hello again = strangers.back()->hello();
  again.application = "newest";
  strangers.back()->send(strangers.back()->greeting(again, kProtocolVersion, 6, 1));
  CHECK(eventually([&] { return a.stat("control_packets_received") == 9; }));
  CHECK(!a.has(EventKind::kPeerConnected));
  a.engine->control().set_hello("ready");
  for (int i = 0; i < 7; ++i) {
    CHECK(a.wait(EventKind::kPeerConnected).payload == std::to_string(i));
  }
  CHECK(a.wait(EventKind::kPeerConnected).payload == "newest");
  CHECK_EQ(a.stat("peers_connected"), 8u);
}

TEST(held_peer_that_died_is_forgotten) {
  EngineOptions how = options();
  how.heartbeat_ms = 10;
  how.peer_timeout_ms = 150;
  Node a(how, 64, std::nullopt);
  Stranger dead(a.engine->control_address());
  dead.send(dead.greeting(dead.hello()));
  Node alive(how, 64, "alive");
  std::thread asks([&] {
    // Held for several time-outs; its heartbeats keep it.
    CHECK_OK(alive.engine->connect(a.engine->control_address(), 20).status());
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  a.engine->control().set_hello("ready");
  asks.join();
  CHECK(a.wait(EventKind::kPeerConnected).payload == "alive");
  CHECK_EQ(a.stat("peers_connected"), 1u);
}

TEST(lost_peers_do_not_add_up) {
  Node a, b;
  const int64_t first = connect(a, b);
  CHECK_OK(a.engine->control().fence(first));
  CHECK_FAILS(a.engine->control().check_peer(first), Code::kPeerLost, "fenced by this node");
  for (int i = 0; i < 1024; ++i) CHECK_OK(a.engine->control().fence(connect(a, b)));
  CHECK_FAILS(a.engine->control().check_peer(first), Code::kPeerLost, "was lost long ago");
  CHECK_OK(a.engine->control().fence(first));
  CHECK_FAILS(a.engine->control().check_peer(5000), Code::kInvalid, "no peer 5000");
}

TEST(refused_post_of_a_cancelled_transfer_lets_the_worker_sleep) {
  EngineOptions how = options();
  how.heartbeat_ms = 10000;
  how.loopback.send_depth = 1;
  Node a(how);
  Stranger stranger(a.engine->control_address());
  auto never_polls = stranger.domain->open_endpoint(0).take();
  Hello hello = stranger.hello();
  hello.data_names = {never_polls->name()};
  stranger.send(stranger.greeting(hello));
  const int64_t peer = a.wait(EventKind::kPeerConnected).peer;
  const int64_t transfer = *a.engine->open_transfer(peer, 1);
  for (int i = 0; i < 2; ++i) {
    CHECK_OK(a.engine->write(transfer, a.region, 0, a.remote, 0, 1000, 1));
  }
  CHECK(eventually([&] { return a.stat("posts_deferred") > 0; }));
  CHECK_OK(a.engine->cancel(transfer));
  // While a refused post waits, the worker looks every millisecond; now there is none.
  CHECK(eventually([&] {
    const uint64_t before = a.stat("thread_blocks");
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    return a.stat("thread_blocks") - before < 10;
  }));
}

TEST(unknown_version_is_refused_by_name) {
  Node a;
  Stranger stranger(a.engine->control_address());
  stranger.send(stranger.greeting(stranger.hello(), 9));
  const Packet packet = stranger.wait_answer();
  CHECK(packet.header.type == PacketType::kRefuse);
  CHECK(packet.payload.find("version 9 is not spoken here; this node speaks version 2") !=
        std::string_view::npos);
  CHECK_EQ(a.stat("peers_connected"), 0u);
}

TEST(other_provider_is_refused_by_name) {
  Node a;
  Stranger stranger(a.engine->control_address());
  stranger.send(stranger.greeting(stranger.hello("efa")));
  CHECK(stranger.wait_answer().payload.find("provider: this node uses loopback, the peer efa") !=
        std::string_view::npos);
}

TEST(hostile_bytes_do_no_harm) {
  Node a, b;
  const int64_t peer = connect(a, b);
  b.wait(EventKind::kPeerConnected);
  Stranger stranger(b.engine->control_address());
  std::mt19937 random(9);
  const std::string good = stranger.greeting(stranger.hello());
  for (int round = 0; round < 3000; ++round) {
    std::string bytes;
    switch (round % 4) {
      case 0:
        bytes.resize(random() % kPacketBytes);
        for (char& byte : bytes) byte = static_cast<char>(random());
        break;
      case 1:
        bytes = good.substr(0, random() % good.size());
        break;
      case 2:  // a HELLO that never ends, each time of another session
        bytes = good;
        std::memcpy(bytes.data() + 24, &round, sizeof round);
        bytes[7] = 1;
        bytes[53] = 100;
        break;
      default:
        bytes = good;
        for (int i = 0; i < 4; ++i) bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    if (bytes.empty()) bytes = "x";
    stranger.send(bytes);
  }
  stranger.send(std::string(kPacketBytes, 'z'));
  CHECK(eventually([&] { return b.stat("control_packets_malformed") > 1000; }));
  CHECK_OK(a.engine->control().send(peer, "still here?"));
  CHECK(b.wait(EventKind::kMessage).payload == "still here?");
}

TEST(engine_with_a_taken_port_says_so) {
  EngineOptions how = options();
  how.control_port = 39002;
  Node a(how);
  auto second = Engine::create(how, "");
  CHECK_FAILS(second.status(), Code::kUnavailable, "port 39002 is in use");
}
