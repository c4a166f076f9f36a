// A libfabric endpoint with a completion queue and an address vector of its own.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "ofi_objects.h"

namespace ffi_transport {
namespace {

// libfabric 1.17's `net` signals its queue's descriptor at the first completion and never resets it
// (its trywait does nothing), so that descriptor is readable for good. It is an epoll set of that
// signal and of the domain's own epoll set of sockets; as this thread alone makes progress, the
// sockets are all there is to wait for. -1 when the kernel does not tell: then we sleep in short
// naps.
int nested_epoll(int outer) {
  std::ifstream info("/proc/self/fdinfo/" + std::to_string(outer));
  for (std::string line; std::getline(info, line);) {
    int inner = -1;
    if (std::sscanf(line.c_str(), "tfd: %d", &inner) != 1) continue;
    char target[64] = {};
    const std::string link = "/proc/self/fd/" + std::to_string(inner);
    if (readlink(link.c_str(), target, sizeof target - 1) > 0 &&
        std::strstr(target, "eventpoll") != nullptr) {
      return inner;
    }
  }
  return -1;
}

class OfiEndpoint : public Endpoint {
 public:
  explicit OfiEndpoint(std::shared_ptr<OfiDomainState> state) : state_(std::move(state)) {}

  ~OfiEndpoint() override {
    // The endpoint first: that is the fence. Its queue is closed unpolled, because polling it now
    // crashes some providers.
    endpoint_.reset();
    queue_.reset();
    addresses_.reset();
  }

  Status open(uint16_t port) {
    InfoPtr info(state_->api->dupinfo(state_->info.get()), InfoFreer{state_->api});
    if (info->addr_format == FI_SOCKADDR_IN && info->src_addr) {
      static_cast<sockaddr_in*>(info->src_addr)->sin_port = htons(port);
    }
    fid_av* addresses = nullptr;
    fi_av_attr av_attr{};
    av_attr.type = info->domain_attr->av_type == FI_AV_MAP ? FI_AV_MAP : FI_AV_TABLE;
    av_attr.count = 16;
    if (int status = fi_av_open(state_->domain.get(), &av_attr, &addresses, nullptr)) {
      return failed("an address vector", status, port);
    }
    addresses_.reset(addresses);
    if (int status = open_queue()) return failed("a completion queue", status, port);
    fid_ep* endpoint = nullptr;
    if (int status = fi_endpoint(state_->domain.get(), info.get(), &endpoint, nullptr)) {
      return failed("an endpoint", status, port);
    }
    endpoint_.reset(endpoint);
    if (state_->limits.device_memory) {
      // The NIC alone shall move what a device holds. A provider that may call CUDA copies inside
      // its calls; and EFA's then sets an attribute of the memory that memory of cuMemCreate, such
      // as XLA's, does not have, so that its first write would fail. One that has no such option,
      // or needs CUDA, goes on as it is.
      const bool permitted = false;
      fi_setopt(&endpoint->fid, FI_OPT_ENDPOINT, kOfiCudaPermitted, &permitted, sizeof permitted);
    }
    int status = fi_ep_bind(endpoint, &addresses_->fid, 0);
    if (status == 0) status = fi_ep_bind(endpoint, &queue_->fid, FI_TRANSMIT | FI_RECV);
    if (status == 0) status = fi_enable(endpoint);
    if (status != 0) return failed("an endpoint", status, port);
    std::array<char, 256> name;
    size_t length = name.size();
    status = fi_getname(&endpoint->fid, name.data(), &length);
    if (status != 0 || length > name.size()) return failed("the endpoint's name", status, port);
    name_.assign(name.data(), length);
    if (info->mode & FI_RX_CQ_DATA) return open_immediate_receives();
    return {};
  }

  std::string name() const override { return name_; }

  Result<PeerAddress> insert(std::string_view name) override {
    if (name.size() != name_.size()) {
      return Status(Code::kProtocol, "an endpoint name of " + std::to_string(name.size()) +
                                         " bytes; this provider's have " +
                                         std::to_string(name_.size()));
    }
    fi_addr_t address = FI_ADDR_UNSPEC;
    const int inserted = fi_av_insert(addresses_.get(), name.data(), 1, &address, 0, nullptr);
    if (inserted != 1 || address == FI_ADDR_NOTAVAIL) {
      return Status(Code::kUnavailable, "the provider refuses a peer's address");
    }
    return PeerAddress{address};
  }

  Status write(PeerAddress peer, std::span<const LocalPiece> local,
               std::span<const RemotePiece> remote, uint32_t immediate,
               OpContext* context) override {
    std::array<iovec, kMaxPieces> from;
    std::array<void*, kMaxPieces> descriptors;
    std::array<fi_rma_iov, kMaxPieces> to;
    for (size_t i = 0; i < local.size(); ++i) {
      from[i] = {const_cast<void*>(local[i].address), local[i].length};
      descriptors[i] = local[i].descriptor;
    }
    for (size_t i = 0; i < remote.size(); ++i) {
      to[i] = {remote[i].address, remote[i].length, remote[i].key};
    }
    fi_msg_rma message{};
    message.msg_iov = from.data();
    message.desc = descriptors.data();
    message.iov_count = local.size();
    message.addr = peer;
    message.rma_iov = to.data();
    message.rma_iov_count = remote.size();
    message.context = context;
    message.data = immediate;
    return outcome("a write", fi_writemsg(endpoint_.get(), &message, state_->write_flags));
  }

  Status send(PeerAddress peer, const void* data, size_t length, void* descriptor,
              OpContext* context) override {
    return outcome("a send", fi_send(endpoint_.get(), data, length, descriptor, peer, context));
  }

  Status recv(void* data, size_t length, void* descriptor, OpContext* context) override {
    return outcome("a receive",
                   fi_recv(endpoint_.get(), data, length, descriptor, FI_ADDR_UNSPEC, context));
  }

  int poll(std::span<Completion> out) override {
    std::array<fi_cq_data_entry, 64> entries;
    const size_t room = std::min(entries.size(), out.size());
    const ssize_t count = fi_cq_read(queue_.get(), entries.data(), room);
    if (count == -FI_EAGAIN) return 0;
    if (count == -FI_EAVAIL) return poll_error(out);
    if (count < 0) return static_cast<int>(count);
    for (ssize_t i = 0; i < count; ++i) {
      Completion& completion = out[i];
      completion = {};
      // Only this flag: libfabric 1.17's TCP providers set none of the others here.
      if (entries[i].flags & FI_REMOTE_CQ_DATA) {
        completion.kind = Completion::Kind::kImmediate;
        completion.immediate = static_cast<uint32_t>(entries[i].data);
        if (!receives_.empty()) repost_immediate_receive(entries[i].op_context);
        continue;
      }
      completion.kind = entries[i].flags & FI_RECV   ? Completion::Kind::kRecv
                        : entries[i].flags & FI_SEND ? Completion::Kind::kSend
                                                     : Completion::Kind::kWrite;
      completion.length = entries[i].len;
      completion.context = static_cast<OpContext*>(entries[i].op_context);
    }
    return static_cast<int>(count);
  }

  int wait_fd() const override { return wait_fd_; }

  bool may_block() override {
    if (wait_fd_ < 0) return true;       // the caller sleeps for a moment only
    if (watches_progress_) return true;  // level-triggered on the sockets themselves
    fid* queue = &queue_->fid;
    return fi_trywait(state_->fabric.get(), &queue, 1) == FI_SUCCESS;
  }

 private:
  int open_queue() {
    fi_cq_attr attr{};
    attr.format = FI_CQ_FORMAT_DATA;
    attr.size = 8192;
    attr.wait_obj = FI_WAIT_FD;
    fid_cq* queue = nullptr;
    int status = fi_cq_open(state_->domain.get(), &attr, &queue, nullptr);
    if (status != 0) {  // EFA cannot wait on a descriptor
      attr.wait_obj = FI_WAIT_NONE;
      status = fi_cq_open(state_->domain.get(), &attr, &queue, nullptr);
      if (status != 0) return status;
    }
    queue_.reset(queue);
    if (attr.wait_obj == FI_WAIT_FD && fi_control(&queue->fid, FI_GETWAIT, &wait_fd_) != 0) {
      wait_fd_ = -1;
    }
    if (wait_fd_ >= 0 && std::strcmp(state_->info->fabric_attr->prov_name, "net") == 0) {
      wait_fd_ = nested_epoll(wait_fd_);
      watches_progress_ = wait_fd_ >= 0;
    }
    return 0;
  }

  int poll_error(std::span<Completion> out) {
    fi_cq_err_entry error{};
    const ssize_t read = fi_cq_readerr(queue_.get(), &error, 0);
    if (read == -FI_EAGAIN) return 0;
    if (read < 0) return static_cast<int>(read);
    out[0] = {};
    out[0].error = error.err != 0 ? error.err : EIO;
    out[0].context = static_cast<OpContext*>(error.op_context);
    if (owns_receive(error.op_context)) out[0].context = nullptr;
    return 1;
  }

  // Providers with FI_RX_CQ_DATA consume a posted receive for every immediate (R16).
  Status open_immediate_receives() {
    receives_.resize(std::min<size_t>(256, state_->limits.receive_depth));
    for (OpContext& context : receives_) {
      Status status = recv(nullptr, 0, nullptr, &context);
      if (!status.ok()) return status;
    }
    return {};
  }
  bool owns_receive(void* context) const {
    const auto* one = static_cast<const OpContext*>(context);
    return !receives_.empty() && one >= &receives_.front() && one <= &receives_.back();
  }
  void repost_immediate_receive(void* context) {
    if (!owns_receive(context)) return;
    // The queue has room: this receive was just taken out of it.
    [[maybe_unused]] Status status = recv(nullptr, 0, nullptr, static_cast<OpContext*>(context));
  }

  Status outcome(const char* what, ssize_t status) const {
    if (status == 0) return {};
    if (status == -FI_EAGAIN) return Status::Again();
    return Status(Code::kPeerLost, std::string(what) + " was refused by the provider: " +
                                       state_->api->error(status));
  }

  Status failed(const char* what, int status, uint16_t port) const {
    std::string text = "opening ";
    text += what;
    if (port != 0) text += " on port " + std::to_string(port);
    if (status == -FI_EADDRINUSE) {
      text += ": the port is in use by another process; choose another one";
    } else {
      text += ": " + state_->api->error(status);
    }
    return Status(Code::kUnavailable, text);
  }

  std::shared_ptr<OfiDomainState> state_;  // outlives the objects below
  Fid<fid_av> addresses_;
  Fid<fid_cq> queue_;
  Fid<fid_ep> endpoint_;
  std::string name_;
  int wait_fd_ = -1;
  bool watches_progress_ = false;
  std::vector<OpContext> receives_;
};

}  // namespace

Result<std::unique_ptr<Endpoint>> open_ofi_endpoint(std::shared_ptr<OfiDomainState> state,
                                                    uint16_t port) {
  auto endpoint = std::make_unique<OfiEndpoint>(std::move(state));
  if (Status status = endpoint->open(port); !status.ok()) return status;
  return std::unique_ptr<Endpoint>(std::move(endpoint));
}

}  // namespace ffi_transport
