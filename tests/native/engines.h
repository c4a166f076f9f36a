// Two engines in one process over the loopback provider, for tests.
#pragma once

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "engine.h"

namespace check {

using ffi_transport::Engine;
using ffi_transport::EngineOptions;
using ffi_transport::Event;
using ffi_transport::EventKind;
using ffi_transport::PageLists;
using ffi_transport::PageUnit;
using ffi_transport::RemoteRegion;
using ffi_transport::TransferOutcome;

inline EngineOptions options(uint32_t max_delay = 0, uint64_t seed = 1) {
  EngineOptions out;
  out.provider = "loopback";
  out.heartbeat_ms = 20;
  // Sanitizers and a busy machine stretch everything; tests of the time-out set their own.
  out.peer_timeout_ms = 20000;
  out.loopback.max_delay_polls = max_delay;
  out.loopback.seed = seed;
  return out;
}

inline EngineOptions with_domains(EngineOptions how, size_t count) {
  how.domains.clear();
  for (size_t i = 0; i < count; ++i) how.domains.push_back("nic" + std::to_string(i));
  return how;
}

// What holds for one domain on each side holds for several, and for unequal numbers of them.
struct Shape {
  size_t here = 1;
  size_t there = 1;
};
inline constexpr Shape kShapes[] = {{1, 1}, {2, 3}};

struct Node {
  std::unique_ptr<Engine> engine;
  std::vector<char> memory;
  int64_t region = 0;
  RemoteRegion remote;
  std::vector<Event> seen;  // events not asked for yet

  explicit Node(const EngineOptions& how = options(), size_t bytes = 1 << 20,
                std::optional<std::string> hello = "hi")
      : memory(bytes) {
    auto made = Engine::create(how, std::move(hello));
    CHECK_OK(made.status());
    engine = made.take();
    auto registered =
        engine->register_memory(reinterpret_cast<uint64_t>(memory.data()), memory.size());
    CHECK_OK(registered.status());
    region = (*registered)->id;
    remote = *RemoteRegion::decode(*engine->descriptor(region));
  }

  // The next event of a kind; others stay for later calls.
  Event wait(EventKind kind, double seconds = 20) {
    Event found;
    const bool came = eventually(
        [&] {
          for (Event& event : engine->poll(0.01)) seen.push_back(std::move(event));
          for (size_t i = 0; i < seen.size(); ++i) {
            if (seen[i].kind != kind) continue;
            found = std::move(seen[i]);
            seen.erase(seen.begin() + static_cast<std::ptrdiff_t>(i));
            return true;
          }
          return false;
        },
        seconds);
    if (!came) fail(__FILE__, __LINE__, "no event of kind " + std::to_string(int(kind)));
    return found;
  }
  bool has(EventKind kind) {
    for (Event& event : engine->poll(0)) seen.push_back(std::move(event));
    for (const Event& event : seen) {
      if (event.kind == kind) return true;
    }
    return false;
  }
  uint64_t stat(const std::string& name) {
    for (const auto& [key, value] : engine->stats()) {
      if (key == name) return value;
    }
    fail(__FILE__, __LINE__, "no statistic " + name);
  }
};

inline int64_t connect(Node& from, Node& to) {
  auto peer = from.engine->connect(to.engine->control_address(), 20);
  CHECK_OK(peer.status());
  return *peer;
}

inline void randomize(std::vector<char>* memory, uint32_t seed) {
  std::mt19937 random(seed);
  for (char& byte : *memory) byte = static_cast<char>(random());
}

// Pages 0 to count - 1 to the `count` pages from `first` on. Several lists to one node need pages
// of their own: with several domains nobody orders two writes of the same bytes.
inline PageLists shuffled(size_t count, uint32_t seed, uint32_t first = 0) {
  PageLists lists;
  for (uint32_t i = 0; i < count; ++i) {
    lists.source.push_back(i);
    lists.destination.push_back(first + i);
  }
  std::mt19937 random(seed);
  std::shuffle(lists.source.begin(), lists.source.end(), random);
  std::shuffle(lists.destination.begin(), lists.destination.end(), random);
  return lists;
}

}  // namespace check
