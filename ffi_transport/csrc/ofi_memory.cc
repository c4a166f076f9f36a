#include "ofi_memory.h"

#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <random>

#include "ofi_objects.h"

namespace ffi_transport {
namespace {

constexpr uint64_t kAccess = FI_SEND | FI_RECV | FI_WRITE | FI_REMOTE_WRITE;

class OfiRegistration : public Registration {
 public:
  OfiRegistration(std::shared_ptr<OfiDomainState> state, Fid<fid_mr> mr, uint64_t base)
      : state_(std::move(state)), mr_(std::move(mr)), base_(base) {}
  uint64_t key() const override { return fi_mr_key(mr_.get()); }
  uint64_t base() const override { return base_; }
  void* descriptor() const override { return fi_mr_desc(mr_.get()); }

 private:
  std::shared_ptr<OfiDomainState> state_;  // outlives mr_
  Fid<fid_mr> mr_;
  uint64_t base_;
};

}  // namespace

OfiMrRequest::OfiMrRequest(void* address, size_t length)
    : address_(reinterpret_cast<uint64_t>(address)), length_(length), range_{address, length} {
  attributes_.known.mr_iov = &range_;
  attributes_.known.iov_count = 1;
  attributes_.known.access = kAccess;
  attributes_.known.iface = FI_HMEM_SYSTEM;
}

OfiMrRequest::OfiMrRequest(const DeviceRange& range)
    : OfiMrRequest(reinterpret_cast<void*>(range.address), range.length) {
  attributes_.known.iface = FI_HMEM_CUDA;
  attributes_.known.device.cuda = range.device;
  if (range.dmabuf < 0) return;
  dmabuf_ = {range.dmabuf, range.address - range.dmabuf_base, range.length,
             reinterpret_cast<void*>(range.dmabuf_base)};
  // The two are a union there.
  attributes_.known.mr_iov = reinterpret_cast<const iovec*>(&dmabuf_);
  flags_ = kOfiDmaBufFlag;
}

Result<std::unique_ptr<Registration>> register_ofi_memory(std::shared_ptr<OfiDomainState> state,
                                                          OfiMrRequest& request) {
  const size_t key_bytes = state->info->domain_attr->mr_key_size;
  int status = 0;
  for (int attempt = 0; attempt < 8; ++attempt) {
    // Random, so that what a former process handed out opens nothing here (R11).
    std::random_device random;
    uint64_t key = (uint64_t{random()} << 32) | random();
    if (key_bytes < 8) key &= (1ull << (8 * key_bytes)) - 1;
    if (state->mr_mode(FI_MR_PROV_KEY)) key = 0;
    request.attributes().requested_key = key;
    fid_mr* mr = nullptr;
    status = fi_mr_regattr(state->domain.get(), &request.attributes(), request.flags(), &mr);
    if (status == 0) {
      Fid<fid_mr> owned(mr);
      // EFA's without dma-bufs in its rdma-core fails so: it reports whatever errno was.
      if (fi_mr_key(mr) == FI_KEY_NOTAVAIL) {
        return Status(Code::kRegistration, "registering " + std::to_string(request.length()) +
                                               " bytes: the provider gave no key");
      }
      const uint64_t base = state->mr_mode(FI_MR_VIRT_ADDR) ? request.address() : 0;
      return std::unique_ptr<Registration>(
          std::make_unique<OfiRegistration>(std::move(state), std::move(owned), base));
    }
    if (status != -FI_ENOKEY) break;  // the key is taken: draw another
  }
  return Status(Code::kRegistration, "registering " + std::to_string(request.length()) +
                                         " bytes: " + state->api->error(status));
}

}  // namespace ffi_transport
