// A libfabric of provider efa without a NIC, for tests of what is asked of one: it takes hints and
// registrations, and writes down what came in the layout that version 1.20 gave them.
#include "fake_libfabric.h"

#include <fcntl.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

// As of version 1.20 (fi_mr_dmabuf, fi_mr_attr and the flag), written down here on its own.
struct DmaBuf20 {
  int fd;
  uint64_t offset;
  size_t length;
  void* base;
};
struct Attributes20 {
  const void* iov_or_dmabuf;
  size_t count;
  uint64_t access, offset, requested_key;
  void* context;
  size_t auth_key_size;
  uint8_t* auth_key;
  int iface;
  uint64_t device;
  void* hmem_data;
  size_t page_size;
};
constexpr uint64_t kDmaBuf20 = 1ull << 40;
constexpr int kCudaPermitted18 = FI_OPT_XPU_TRIGGER + 1;  // the next one in version 1.18

struct State {
  uint32_t version = FI_VERSION(1, 20);
  int device_memory = 1, to_dmabuf = 0, to_address = 0, to_options = 0;
  uint64_t key = 77;
  std::string log;
};
State g;

void add(const char* format, auto... values) {
  char line[256];
  std::snprintf(line, sizeof line, format, values...);
  g.log += line;
}

int close_object(fid* object) {
  std::free(object);
  return 0;
}
int bind_object(fid*, fid*, uint64_t) { return 0; }
int control_object(fid*, int command, void*) {
  if (command == FI_ENABLE) add("enable\n");
  return 0;
}
fi_ops g_ops{};  // of every object

template <class T>
T* make() {
  auto* object = static_cast<T*>(std::calloc(1, sizeof(T)));
  g_ops.size = sizeof g_ops;
  g_ops.close = close_object;
  g_ops.bind = bind_object;
  g_ops.control = control_object;
  object->fid.ops = &g_ops;
  return object;
}

int register_memory(fid*, const fi_mr_attr* given, uint64_t flags, fid_mr** mr) {
  const auto* attributes = reinterpret_cast<const Attributes20*>(given);
  if (flags & kDmaBuf20) {
    const auto* dmabuf = static_cast<const DmaBuf20*>(attributes->iov_or_dmabuf);
    add("register dmabuf %s base %p offset %zu length %zu",
        fcntl(dmabuf->fd, F_GETFD) >= 0 ? "open" : "closed", dmabuf->base,
        static_cast<size_t>(dmabuf->offset), dmabuf->length);
  } else {
    const auto* iov = static_cast<const iovec*>(attributes->iov_or_dmabuf);
    add("register address %p length %zu", iov->iov_base, iov->iov_len);
  }
  add(" iface %d device %d count %zu unused %d\n", attributes->iface,
      static_cast<int>(attributes->device), attributes->count,
      attributes->offset == 0 && attributes->hmem_data == nullptr && attributes->page_size == 0);
  if (const int answer = flags & kDmaBuf20 ? g.to_dmabuf : g.to_address; answer != 0) return answer;
  *mr = make<fid_mr>();
  (*mr)->key = g.key;
  return 0;
}

int set_option(fid*, int level, int name, const void* value, size_t bytes) {
  add("option %s %s bytes %zu\n",
      level == FI_OPT_ENDPOINT && name == kCudaPermitted18 ? "cuda_permitted" : "?",
      *static_cast<const bool*>(value) ? "true" : "false", bytes);
  return g.to_options;
}

int tell_name(fid*, void* name, size_t* bytes) {
  std::memcpy(name, "here", 4);
  *bytes = 4;
  return 0;
}

int open_endpoint(fid_domain*, fi_info*, fid_ep** endpoint, void*) {
  static fi_ops_ep options{};
  options.size = sizeof options;
  options.setopt = set_option;
  static fi_ops_cm names{};
  names.size = sizeof names;
  names.getname = tell_name;
  *endpoint = make<fid_ep>();
  (*endpoint)->ops = &options;
  (*endpoint)->cm = &names;
  return 0;
}

int open_queue(fid_domain*, fi_cq_attr* attributes, fid_cq** queue, void*) {
  if (attributes->wait_obj != FI_WAIT_NONE) return -FI_ENOSYS;  // as EFA
  *queue = make<fid_cq>();
  return 0;
}

int open_addresses(fid_domain*, fi_av_attr*, fid_av** addresses, void*) {
  *addresses = make<fid_av>();
  return 0;
}

int open_domain(fid_fabric*, fi_info*, fid_domain** domain, void*) {
  static fi_ops_mr memory{};
  memory.size = sizeof memory;
  memory.regattr = register_memory;
  static fi_ops_domain objects{};
  objects.size = sizeof objects;
  objects.av_open = open_addresses;
  objects.cq_open = open_queue;
  objects.endpoint = open_endpoint;
  *domain = make<fid_domain>();
  (*domain)->mr = &memory;
  (*domain)->ops = &objects;
  return 0;
}

template <class T>
T* duplicate(const T* from) {
  auto* out = static_cast<T*>(std::calloc(1, sizeof(T)));
  if (from != nullptr) std::memcpy(out, from, sizeof(T));
  return out;
}

}  // namespace

extern "C" {

void fake_libfabric_reset() { g = {}; }
void fake_libfabric_set_version(uint32_t version) { g.version = version; }
void fake_libfabric_set_answers(int device_memory, int to_dmabuf, int to_address) {
  g.device_memory = device_memory;
  g.to_dmabuf = to_dmabuf;
  g.to_address = to_address;
}
void fake_libfabric_set_option_answer(int answer) { g.to_options = answer; }
void fake_libfabric_set_key(uint64_t key) { g.key = key; }
const char* fake_libfabric_log() { return g.log.c_str(); }

uint32_t fi_version() { return g.version; }
const char* fi_strerror(int error) { return std::strerror(error); }

fi_info* fi_dupinfo(const fi_info* from) {
  fi_info* out = duplicate(from);
  out->next = nullptr;
  out->tx_attr = duplicate(from ? from->tx_attr : nullptr);
  out->rx_attr = duplicate(from ? from->rx_attr : nullptr);
  out->ep_attr = duplicate(from ? from->ep_attr : nullptr);
  out->domain_attr = duplicate(from ? from->domain_attr : nullptr);
  out->fabric_attr = duplicate(from ? from->fabric_attr : nullptr);
  if (out->domain_attr->name) out->domain_attr->name = strdup(out->domain_attr->name);
  if (out->fabric_attr->prov_name) {
    out->fabric_attr->prov_name = strdup(out->fabric_attr->prov_name);
  }
  return out;
}

void fi_freeinfo(fi_info* info) {
  if (info == nullptr) return;
  std::free(info->domain_attr->name);
  std::free(info->fabric_attr->prov_name);
  for (void* part : {static_cast<void*>(info->tx_attr), static_cast<void*>(info->rx_attr),
                     static_cast<void*>(info->ep_attr), static_cast<void*>(info->domain_attr),
                     static_cast<void*>(info->fabric_attr), static_cast<void*>(info)}) {
    std::free(part);
  }
}

int fi_getinfo(uint32_t version, const char*, const char*, uint64_t, const fi_info* hints,
               fi_info** info) {
  const bool device_memory = (hints->caps & FI_HMEM) != 0;
  const bool must_register = (hints->domain_attr->mr_mode & FI_MR_HMEM) != 0;
  add("getinfo %u.%u%s%s\n", FI_MAJOR(version), FI_MINOR(version), device_memory ? " hmem" : "",
      must_register ? " mr_hmem" : "");
  if (std::strcmp(hints->fabric_attr->prov_name, "efa") != 0) return -FI_ENODATA;
  if (device_memory && !g.device_memory) return -FI_ENODATA;
  fi_info* out = fi_dupinfo(hints);
  out->domain_attr->name = strdup("rdmap0-rdm");
  out->domain_attr->cq_data_size = 8;
  out->domain_attr->mr_key_size = 8;
  out->mode = 0;
  out->ep_attr->max_msg_size = 1 << 30;
  out->tx_attr->size = out->rx_attr->size = 64;
  out->tx_attr->iov_limit = out->tx_attr->rma_iov_limit = 1;
  *info = out;
  return 0;
}

int fi_fabric(fi_fabric_attr*, fid_fabric** fabric, void*) {
  static fi_ops_fabric ops{};
  ops.size = sizeof ops;
  ops.domain = open_domain;
  *fabric = make<fid_fabric>();
  (*fabric)->ops = &ops;
  return 0;
}

}  // extern "C"
