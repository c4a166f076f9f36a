#include "loopback_endpoint.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <vector>

namespace ffi_transport {
namespace {

constexpr uint16_t kFirstPort = 40000;

struct Core;
using CorePtr = std::shared_ptr<Core>;

// An operation on its way: in the target's inbox until the target polls it.
struct Flight {
  CorePtr sender;
  bool is_write = false;
  std::vector<LocalPiece> local;
  std::vector<RemotePiece> remote;
  uint32_t immediate = 0;
  std::vector<char> message;
  OpContext* context = nullptr;
  uint32_t polls_left = 0;
};

// What of an endpoint others may touch, under its mutex. Two cores' mutexes are never held at once.
struct Core {
  std::mutex mutex;
  bool closed = false;
  uint16_t port = 0;
  size_t outstanding = 0;
  std::deque<Flight> inbox;
  std::deque<Completion> completions;
  std::shared_ptr<LoopbackMemory> memory;
  int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);

  ~Core() { ::close(fd); }
  void notify() {
    const uint64_t one = 1;
    [[maybe_unused]] ssize_t written = ::write(fd, &one, sizeof one);
  }
};

struct Network {
  std::mutex mutex;
  std::map<uint16_t, std::weak_ptr<Core>> ports;
  uint32_t next = kFirstPort;

  static Network& get() {
    static Network network;
    return network;
  }
  // Closed ports are not given out again before all others were (R11).
  uint16_t bind(const CorePtr& core, uint16_t port) {
    std::lock_guard lock(mutex);
    if (port == 0) {
      for (uint32_t tried = 0; tried < 65536 - kFirstPort; ++tried) {
        const auto candidate = static_cast<uint16_t>(next);
        next = next == 65535 ? kFirstPort : next + 1;
        if (!ports.contains(candidate)) {
          port = candidate;
          break;
        }
      }
    }
    if (port == 0 || ports.contains(port)) return 0;
    ports[port] = core;
    return port;
  }
  void unbind(uint16_t port) {
    std::lock_guard lock(mutex);
    ports.erase(port);
  }
  CorePtr find(uint16_t port) {
    std::lock_guard lock(mutex);
    const auto it = ports.find(port);
    return it == ports.end() ? nullptr : it->second.lock();
  }
};

class LoopbackEndpoint : public Endpoint {
 public:
  LoopbackEndpoint(CorePtr core, const LoopbackOptions& options)
      : core_(std::move(core)), options_(options), random_(options.seed ^ core_->port) {}

  ~LoopbackEndpoint() override {
    Network::get().unbind(core_->port);
    std::deque<Flight> undelivered;
    {
      // A target that copies from our memory holds this mutex, so after this block none does.
      std::lock_guard lock(core_->mutex);
      core_->closed = true;
      undelivered.swap(core_->inbox);
    }
    for (Flight& flight : undelivered) complete(flight, ECONNRESET);
    for (Flight& flight : waiting_) complete(flight, ECONNRESET);
  }

  std::string name() const override {
    return std::string(reinterpret_cast<const char*>(&core_->port), sizeof core_->port);
  }

  Result<PeerAddress> insert(std::string_view name) override {
    uint16_t port = 0;
    if (name.size() != sizeof port) return Status(Code::kInvalid, "not a loopback address");
    std::memcpy(&port, name.data(), sizeof port);
    return PeerAddress{port};
  }

  Status write(PeerAddress peer, std::span<const LocalPiece> local,
               std::span<const RemotePiece> remote, uint32_t immediate,
               OpContext* context) override {
    // As a NIC does: what it reads must be registered with it, not with another one.
    for (const LocalPiece& piece : local) {
      if (piece.descriptor != nullptr && !core_->memory->has(piece.descriptor)) {
        return Status(Code::kInvalid, "the memory is not registered with this domain");
      }
    }
    Flight flight;
    flight.is_write = true;
    flight.local.assign(local.begin(), local.end());
    flight.remote.assign(remote.begin(), remote.end());
    flight.immediate = immediate;
    flight.context = context;
    return launch(peer, std::move(flight));
  }

  Status send(PeerAddress peer, const void* data, size_t length, void*,
              OpContext* context) override {
    Flight flight;
    const char* bytes = static_cast<const char*>(data);
    flight.message.assign(bytes, bytes + length);
    flight.context = context;
    return launch(peer, std::move(flight));
  }

  Status recv(void* data, size_t length, void*, OpContext* context) override {
    receives_.push_back({data, length, context});
    if (!waiting_.empty()) core_->notify();
    return {};
  }

  int poll(std::span<Completion> out) override {
    size_t count = 0;
    deliver(out, &count);
    std::lock_guard lock(core_->mutex);
    while (count < out.size() && !core_->completions.empty()) {
      out[count] = core_->completions.front();
      core_->completions.pop_front();
      if (out[count].kind == Completion::Kind::kWrite ||
          out[count].kind == Completion::Kind::kSend) {
        --core_->outstanding;
      }
      ++count;
    }
    return static_cast<int>(count);
  }

  int wait_fd() const override { return core_->fd; }

  bool may_block() override {
    // Drained before the look, so that a notification after the look is not swallowed.
    uint64_t value;
    [[maybe_unused]] ssize_t got = ::read(core_->fd, &value, sizeof value);
    std::lock_guard lock(core_->mutex);
    return core_->inbox.empty() && core_->completions.empty() &&
           (waiting_.empty() || receives_.empty());
  }

 private:
  struct Receive {
    void* data;
    size_t length;
    OpContext* context;
  };

  Status launch(PeerAddress peer, Flight flight) {
    {
      std::lock_guard lock(core_->mutex);
      if (core_->outstanding >= options_.send_depth) return Status::Again();
      ++core_->outstanding;
    }
    flight.sender = core_;
    if (options_.max_delay_polls > 0) {
      flight.polls_left = static_cast<uint32_t>(random_() % (options_.max_delay_polls + 1));
    }
    const CorePtr target = Network::get().find(static_cast<uint16_t>(peer));
    if (target) {
      std::lock_guard lock(target->mutex);
      if (!target->closed) {
        target->inbox.push_back(std::move(flight));
        target->notify();
        return {};
      }
    }
    complete(flight, ECONNREFUSED);
    return {};
  }

  // Tells the sender how its operation ended.
  static void complete(const Flight& flight, int error) {
    Completion done;
    done.kind = flight.is_write ? Completion::Kind::kWrite : Completion::Kind::kSend;
    done.error = error;
    done.context = flight.context;
    std::lock_guard lock(flight.sender->mutex);
    if (flight.sender->closed) return;
    flight.sender->completions.push_back(done);
    flight.sender->notify();
  }

  // Lands what is due.
  void deliver(std::span<Completion> out, size_t* count) {
    std::deque<Flight> due;
    {
      std::lock_guard lock(core_->mutex);
      std::deque<Flight> later;
      for (Flight& flight : core_->inbox) {
        if (flight.polls_left > 0) {
          --flight.polls_left;
          later.push_back(std::move(flight));
        } else if (flight.is_write && due.size() + *count >= out.size()) {
          later.push_back(std::move(flight));
        } else {
          due.push_back(std::move(flight));
        }
      }
      core_->inbox.swap(later);
    }
    for (Flight& flight : due) {
      if (flight.is_write) {
        land(flight, out, count);
      } else {
        waiting_.push_back(std::move(flight));
      }
    }
    while (!waiting_.empty() && !receives_.empty() && *count < out.size()) {
      const Flight flight = std::move(waiting_.front());
      waiting_.pop_front();
      const Receive receive = receives_.front();
      receives_.pop_front();
      const bool fits = flight.message.size() <= receive.length;
      Completion got;
      got.kind = Completion::Kind::kRecv;
      got.context = receive.context;
      got.error = fits ? 0 : EMSGSIZE;
      got.length = fits ? flight.message.size() : receive.length;
      std::copy_n(flight.message.data(), got.length, static_cast<char*>(receive.data));
      out[(*count)++] = got;
      complete(flight, 0);
    }
  }

  void land(const Flight& flight, std::span<Completion> out, size_t* count) {
    int error = 0;
    std::vector<char> bytes;
    {
      // The sender's memory is readable only while its endpoint is open.
      std::lock_guard lock(flight.sender->mutex);
      if (flight.sender->closed) return;
      for (const LocalPiece& piece : flight.local) {
        const char* from = static_cast<const char*>(piece.address);
        bytes.insert(bytes.end(), from, from + piece.length);
      }
    }
    {
      std::lock_guard lock(core_->memory->mutex);
      size_t at = 0;
      for (const RemotePiece& piece : flight.remote) {
        const auto range = core_->memory->ranges.find(piece.key);
        if (range == core_->memory->ranges.end() || piece.address > range->second.length ||
            piece.length > range->second.length - piece.address ||
            piece.length > bytes.size() - at) {
          error = EACCES;
          break;
        }
        std::memcpy(reinterpret_cast<void*>(range->second.address + piece.address),
                    bytes.data() + at, piece.length);
        at += piece.length;
      }
    }
    if (error == 0) {
      Completion landed;
      landed.kind = Completion::Kind::kImmediate;
      landed.immediate = flight.immediate;
      out[(*count)++] = landed;
    }
    complete(flight, error);
  }

  CorePtr core_;
  const LoopbackOptions options_;
  std::mt19937_64 random_;
  std::deque<Receive> receives_;
  std::deque<Flight> waiting_;  // messages without a buffer yet
};

}  // namespace

Result<std::unique_ptr<Endpoint>> open_loopback_endpoint(std::shared_ptr<LoopbackMemory> memory,
                                                         const LoopbackOptions& options,
                                                         uint16_t port) {
  auto core = std::make_shared<Core>();
  core->memory = std::move(memory);
  core->port = Network::get().bind(core, port);
  if (core->port == 0) {
    return Status(Code::kUnavailable, "loopback port " + std::to_string(port) + " is in use");
  }
  return std::unique_ptr<Endpoint>(std::make_unique<LoopbackEndpoint>(core, options));
}

}  // namespace ffi_transport
