#include <algorithm>
#include <random>

#include "check.h"
#include "control_stream.h"

using namespace ffi_transport;

namespace {

struct Fragment {
  PacketHeader header;
  std::string payload;
};

std::vector<Fragment> drain(OutStream* out) {
  std::vector<Fragment> fragments;
  while (out->ready()) {
    Fragment fragment;
    fragment.payload = out->peek(&fragment.header);
    out->advance();
    fragments.push_back(std::move(fragment));
  }
  return fragments;
}

Status feed(InStream* in, const Fragment& fragment, std::vector<Message>* messages,
            bool* duplicate = nullptr) {
  Packet packet;
  packet.header = fragment.header;
  packet.payload = fragment.payload;
  bool ignored;
  return in->accept(packet, messages, duplicate ? duplicate : &ignored);
}

Fragment fragment(uint64_t sequence, bool first, bool last, uint32_t total, std::string payload,
                  MessageKind kind = MessageKind::kUser) {
  Fragment out;
  out.header.type = PacketType::kFragment;
  out.header.sequence = sequence;
  out.header.first = first;
  out.header.last = last;
  out.header.kind = kind;
  out.header.message_bytes = total;
  out.payload = std::move(payload);
  return out;
}

std::string pattern(size_t length, uint32_t seed) {
  std::mt19937 random(seed);
  std::string out(length, '\0');
  for (char& byte : out) byte = static_cast<char>(random());
  return out;
}

}  // namespace

TEST(stream_delivers_any_order_in_order) {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    OutStream out;
    InStream in;
    std::vector<std::string> sent;
    for (size_t i = 0, count = 1 + random() % 8; i < count; ++i) {
      const size_t sizes[] = {0, 1, kFragmentBytes - 1, kFragmentBytes, kFragmentBytes + 1, 30000};
      sent.push_back(pattern(sizes[random() % 6], random()));
      CHECK_OK(out.queue(MessageKind::kUser, sent.back()));
    }
    auto fragments = drain(&out);
    for (const Fragment& one : fragments) CHECK(one.payload.size() <= kFragmentBytes);
    std::shuffle(fragments.begin(), fragments.end(), random);
    std::vector<Message> got;
    for (const Fragment& one : fragments) {
      CHECK_OK(feed(&in, one, &got));
      if (random() % 4 == 0) {
        bool duplicate = false;
        const size_t before = got.size();
        CHECK_OK(feed(&in, one, &got, &duplicate));
        CHECK(duplicate);
        CHECK_EQ(got.size(), before);
      }
    }
    CHECK_EQ(got.size(), sent.size());
    for (size_t i = 0; i < sent.size(); ++i) CHECK(got[i].payload == sent[i]);
    CHECK_EQ(in.acknowledged(), fragments.size());
  }
}

TEST(stream_waits_for_credits) {
  OutStream out;
  InStream in;
  const std::string large = pattern(2 << 20, 1);  // 521 fragments
  CHECK_OK(out.queue(MessageKind::kUser, large));
  std::vector<Message> got;
  int rounds = 0;
  while (got.empty()) {
    const auto fragments = drain(&out);
    CHECK(!fragments.empty());
    CHECK(fragments.size() <= kWindow);
    CHECK(!out.ready());
    for (const Fragment& one : fragments) CHECK_OK(feed(&in, one, &got));
    CHECK_OK(out.acknowledge(in.acknowledged()));
    ++rounds;
  }
  CHECK(rounds > 3);
  CHECK(got[0].payload == large);
  CHECK(out.all_acknowledged());
}

TEST(stream_ignores_old_acknowledgements_and_refuses_impossible_ones) {
  OutStream out;
  CHECK_OK(out.queue(MessageKind::kUser, "a"));
  CHECK_OK(out.queue(MessageKind::kUser, "b"));
  drain(&out);
  CHECK_OK(out.acknowledge(2));
  CHECK_OK(out.acknowledge(1));
  CHECK(out.all_acknowledged());
  CHECK_FAILS(out.acknowledge(3), Code::kProtocol, "acknowledged fragment 3");
}

TEST(stream_limits_what_is_queued) {
  OutStream out;
  CHECK_FAILS(out.queue(MessageKind::kHello, std::string(kMaxHelloBytes + 1, 'x')), Code::kInvalid,
              "at most");
  for (size_t queued = 0; queued < kMaxQueuedBytes; queued += kMaxMessageBytes) {
    CHECK_OK(out.queue(MessageKind::kUser, std::string(kMaxMessageBytes, 'x')));
  }
  CHECK(out.queue(MessageKind::kUser, "x").code() == Code::kAgain);
}

TEST(stream_restarts_a_hello) {
  OutStream out;
  InStream in;
  const std::string hello = pattern(10000, 2);
  CHECK_OK(out.queue(MessageKind::kHello, hello));
  auto first = drain(&out);
  std::vector<Message> got;
  CHECK_OK(feed(&in, first[0], &got));  // the peer got a part
  out.restart();
  for (const Fragment& one : drain(&out)) CHECK_OK(feed(&in, one, &got));
  CHECK_EQ(got.size(), 1u);
  CHECK(got[0].payload == hello);
  CHECK_OK(out.acknowledge(in.acknowledged()));
  out.restart();  // answered: nothing is sent again
  CHECK(!out.ready());
}

TEST(stream_refuses_malformed_sequences) {
  std::vector<Message> got;
  {
    InStream in;
    CHECK_FAILS(feed(&in, fragment(kWindow, true, true, 1, "x"), &got), Code::kProtocol,
                "beyond the credits");
    CHECK_FAILS(feed(&in, fragment(~0ull, true, true, 1, "x"), &got), Code::kProtocol, "credits");
  }
  {
    InStream in;
    CHECK_FAILS(feed(&in, fragment(0, false, true, 1, "x"), &got), Code::kProtocol, "beginning");
  }
  {
    InStream in;
    CHECK_OK(feed(&in, fragment(0, true, false, 9, "xy"), &got));
    CHECK_FAILS(feed(&in, fragment(1, true, false, 9, "xy"), &got), Code::kProtocol, "within");
  }
  {
    InStream in;
    CHECK_OK(feed(&in, fragment(0, true, false, 9, "xy"), &got));
    CHECK_FAILS(feed(&in, fragment(1, false, true, 8, "xy"), &got), Code::kProtocol, "changes");
  }
  {
    InStream in;
    CHECK_OK(feed(&in, fragment(0, true, false, 9, "xy"), &got));
    CHECK_FAILS(feed(&in, fragment(1, false, true, 9, "xy", MessageKind::kBye), &got),
                Code::kProtocol, "changes");
  }
  {
    InStream in;  // longer than announced
    CHECK_FAILS(feed(&in, fragment(0, true, true, 1, "xyz"), &got), Code::kProtocol, "has 3");
  }
  {
    InStream in;  // ends too early
    CHECK_FAILS(feed(&in, fragment(0, true, true, 5, "xyz"), &got), Code::kProtocol, "has 3");
  }
  {
    InStream in;  // complete but not marked as the last
    CHECK_FAILS(feed(&in, fragment(0, true, false, 3, "xyz"), &got), Code::kProtocol, "has 3");
  }
  CHECK(got.empty());
}
