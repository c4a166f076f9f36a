// libfabric's objects with owners: what a domain, an endpoint and a registration hold.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <memory>
#include <string>
#include <vector>

#include "fabric.h"
#include "ofi_loader.h"
#include "ofi_memory.h"

namespace ffi_transport {

template <class T>
struct FidCloser {
  void operator()(T* object) const { fi_close(&object->fid); }
};
template <class T>
using Fid = std::unique_ptr<T, FidCloser<T>>;

struct InfoFreer {
  const OfiApi* api;
  void operator()(fi_info* info) const { api->freeinfo(info); }
};
using InfoPtr = std::unique_ptr<fi_info, InfoFreer>;

// Shared by a domain, its endpoints and its registrations, so that it closes after the last.
struct OfiDomainState {
  const OfiApi* api = nullptr;
  InfoPtr info{nullptr, InfoFreer{nullptr}};
  Fid<fid_fabric> fabric;
  Fid<fid_domain> domain;  // after fabric: closed before it
  DomainLimits limits;
  uint64_t write_flags = 0;

  bool mr_mode(uint64_t bit) const { return (info->domain_attr->mr_mode & bit) != 0; }
};

Result<std::unique_ptr<Endpoint>> open_ofi_endpoint(std::shared_ptr<OfiDomainState> state,
                                                    uint16_t port);
Result<std::unique_ptr<Registration>> register_ofi_memory(std::shared_ptr<OfiDomainState> state,
                                                          OfiMrRequest& request);

}  // namespace ffi_transport
