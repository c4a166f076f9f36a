// What the engine asks of a network: endpoints that write with an immediate and send messages.
// Two implementations: libfabric (ofi_*.cc) and one inside the process (loopback*.cc).
//
// Threads: an endpoint belongs to one thread. A domain opens endpoints and registers memory from
// any thread. Nothing here blocks. Destroying an Endpoint closes it: when its destructor has
// returned, no write of a peer lands through it any more and its own pending writes read no more
// memory. Its completion queue is never polled again (the hard fence, R13).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "status.h"

namespace ffi_transport {

// The provider's scratch space of one operation (fi_context2 needs eight pointers). It must stay
// in place until the operation's completion was polled or the endpoint closed.
struct alignas(16) OpContext {
  void* provider_area[8] = {};
};

struct LocalPiece {
  const void* address = nullptr;
  uint64_t length = 0;
  void* descriptor = nullptr;  // Registration::descriptor() where the provider wants it
};

struct RemotePiece {
  uint64_t address = 0;  // remote base + offset
  uint64_t length = 0;
  uint64_t key = 0;
};

struct Completion {
  enum class Kind : uint8_t { kWrite, kSend, kRecv, kImmediate };
  Kind kind = Kind::kWrite;
  int error = 0;  // errno value; 0 is success
  uint32_t immediate = 0;
  uint64_t length = 0;
  OpContext* context = nullptr;  // null for an immediate
};

// Scatter entries that any implementation is asked for at most.
constexpr size_t kMaxPieces = 8;

using PeerAddress = uint64_t;  // an address inserted into an endpoint's address vector

class Endpoint {
 public:
  virtual ~Endpoint() = default;
  // This endpoint's own address, to be handed to peers: opaque bytes.
  virtual std::string name() const = 0;
  virtual Result<PeerAddress> insert(std::string_view name) = 0;
  // WRITE with immediate. The pieces of both sides have equal total length. kAgain when full.
  virtual Status write(PeerAddress peer, std::span<const LocalPiece> local,
                       std::span<const RemotePiece> remote, uint32_t immediate,
                       OpContext* context) = 0;
  virtual Status send(PeerAddress peer, const void* data, size_t length, void* descriptor,
                      OpContext* context) = 0;
  virtual Status recv(void* data, size_t length, void* descriptor, OpContext* context) = 0;
  // Makes progress and returns completions, at most out.size(); negative errno when the queue
  // broke.
  virtual int poll(std::span<Completion> out) = 0;
  // A descriptor that becomes readable when poll has something to do; -1 when there is none.
  virtual int wait_fd() const = 0;
  // Asked right before blocking on wait_fd: false when poll must be called first.
  virtual bool may_block() = 0;
};

class Registration {
 public:
  virtual ~Registration() = default;
  virtual uint64_t key() const = 0;
  virtual uint64_t base() const = 0;  // what a remote offset is added to
  virtual void* descriptor() const = 0;
};

// Device memory to register: by the dma-buf of its pages where there is one, else by its address.
struct DeviceRange {
  uint64_t address = 0;
  uint64_t length = 0;
  int device = 0;            // CUDA ordinal
  int dmabuf = -1;           // descriptor
  uint64_t dmabuf_base = 0;  // device address at which the dma-buf begins
};

struct DomainLimits {
  size_t pieces = 1;               // scatter entries of one write
  size_t max_write = 0;            // bytes of one write
  size_t send_depth = 64;          // operations the transmit queue takes
  size_t receive_depth = 64;       // buffers the receive queue takes
  bool local_descriptors = false;  // send buffers must be registered too
  bool delivery_complete = true;   // a write completes when its bytes are in the peer's memory
  bool device_memory = false;      // register_device_memory works
  bool dmabuf = false;             // with dma-bufs, too
};

class Domain {
 public:
  virtual ~Domain() = default;
  virtual const std::string& name() const = 0;  // as it was asked for, or the provider's
  virtual const DomainLimits& limits() const = 0;
  // port 0 is an ephemeral one.
  virtual Result<std::unique_ptr<Endpoint>> open_endpoint(uint16_t port) = 0;
  virtual Result<std::unique_ptr<Registration>> register_memory(void* address, size_t length) = 0;
  virtual Result<std::unique_ptr<Registration>> register_device_memory(
      const DeviceRange& range) = 0;
};

class Fabric {
 public:
  virtual ~Fabric() = default;
  virtual const std::string& provider() const = 0;
  // An empty name is the domain that the provider lists first. A NIC's name will do where the
  // domain has another. Where endpoints have IP addresses, one of this machine's is a name too: the
  // domain's endpoints have that address. kUnavailable names what there is.
  virtual Result<std::unique_ptr<Domain>> open_domain(const std::string& name) = 0;
  // Between "host:port" as people write it and an endpoint's name.
  virtual Result<std::string> parse_address(const std::string& text) const = 0;
  virtual std::string format_address(std::string_view name) const = 0;
};

}  // namespace ffi_transport
