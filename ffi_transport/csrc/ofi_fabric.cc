#include "ofi_fabric.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <set>

#include "ofi_objects.h"

namespace ffi_transport {
namespace {

constexpr uint32_t kApiVersion = FI_VERSION(1, 17);

// Providers take dma-bufs from those who ask for that interface. It adds fields at the end of
// structures, which the library fills in for those who know the shorter ones.
uint32_t device_memory_version(const OfiApi* api) {
  return FI_VERSION_GE(api->version(), kOfiDmaBufVersion) ? kOfiDmaBufVersion : kApiVersion;
}

// In the order of choice: hardware, then the software providers by their speed.
struct Candidate {
  const char* name;      // as users say it
  const char* provider;  // as libfabric lists it
  bool ip;               // addresses are IP addresses
  bool software;
};
constexpr Candidate kCandidates[] = {
    {"efa", "efa", false, false},
    {"verbs", "verbs;ofi_rxm", true, false},
    {"tcp", "tcp", true, true},
    {"net", "net", true, true},
    {"tcp;ofi_rxm", "tcp;ofi_rxm", true, true},
};

// What a provider was asked for, and gave.
struct Abilities {
  bool device_memory = false;
  bool delivery_complete = false;
};

// All domains that the provider offers; none when it does not serve.
struct Offer {
  InfoPtr infos;
  Abilities abilities;
};

InfoPtr make_hints(const OfiApi* api, const Candidate& candidate, const Abilities& wish) {
  InfoPtr hints(api->dupinfo(nullptr), InfoFreer{api});
  hints->ep_attr->type = FI_EP_RDM;
  hints->caps = FI_MSG | FI_RMA;
  hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
  if (wish.device_memory) {
    hints->caps |= FI_HMEM;
    hints->domain_attr->mr_mode |= FI_MR_HMEM;
  }
  hints->domain_attr->threading = FI_THREAD_SAFE;
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  hints->domain_attr->cq_data_size = 4;
  hints->tx_attr->op_flags = wish.delivery_complete ? FI_DELIVERY_COMPLETE : 0;
  if (candidate.ip) hints->addr_format = FI_SOCKADDR_IN;
  hints->fabric_attr->prov_name = strdup(candidate.provider);
  return hints;
}

bool wants_device_memory(DeviceMemoryWish wish, const Candidate& candidate) {
  if (wish == DeviceMemoryWish::kHardware) return !candidate.software;
  return wish == DeviceMemoryWish::kAny;
}

// With IP addresses, the domains of the bind address (null: of any). Asks for the most first.
Offer probe(const OfiApi* api, const Candidate& candidate, const char* bind,
            DeviceMemoryWish device_memory) {
  for (const Abilities wish : {Abilities{true, true}, Abilities{true, false},
                               Abilities{false, true}, Abilities{false, false}}) {
    if (wish.device_memory && !wants_device_memory(device_memory, candidate)) continue;
    const InfoPtr hints = make_hints(api, candidate, wish);
    const uint32_t version = wish.device_memory ? device_memory_version(api) : kApiVersion;
    fi_info* found = nullptr;
    const int status = candidate.ip && bind != nullptr
                           ? api->getinfo(version, bind, nullptr, FI_SOURCE, hints.get(), &found)
                           : api->getinfo(version, nullptr, nullptr, 0, hints.get(), &found);
    InfoPtr list(found, InfoFreer{api});
    if (status != 0) continue;
    for (const fi_info* info = list.get(); info; info = info->next) {
      if (std::strcmp(info->fabric_attr->prov_name, candidate.provider) == 0 &&
          info->domain_attr->cq_data_size >= 4) {
        return {std::move(list), wish};
      }
    }
  }
  return {InfoPtr(nullptr, InfoFreer{api}), {}};
}

// Whether an endpoint could have this address.
bool is_own(const in_addr& address) {
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_addr = address;
  const int probe = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (probe < 0) return false;
  const int status = bind(probe, reinterpret_cast<const sockaddr*>(&name), sizeof name);
  close(probe);
  return status == 0 && address.s_addr != htonl(INADDR_ANY);
}

class OfiDomain : public Domain {
 public:
  OfiDomain(std::string name, std::shared_ptr<OfiDomainState> state)
      : name_(std::move(name)), state_(std::move(state)) {}
  const std::string& name() const override { return name_; }
  const DomainLimits& limits() const override { return state_->limits; }
  Result<std::unique_ptr<Endpoint>> open_endpoint(uint16_t port) override {
    return open_ofi_endpoint(state_, port);
  }
  Result<std::unique_ptr<Registration>> register_memory(void* address, size_t length) override {
    OfiMrRequest request(address, length);
    return register_ofi_memory(state_, request);
  }
  Result<std::unique_ptr<Registration>> register_device_memory(const DeviceRange& range) override {
    OfiMrRequest request(range);
    return register_ofi_memory(state_, request);
  }

 private:
  const std::string name_;
  std::shared_ptr<OfiDomainState> state_;
};

class OfiFabric : public Fabric {
 public:
  OfiFabric(const OfiApi* api, const Candidate& candidate, DeviceMemoryWish device_memory,
            Offer offer)
      : api_(api),
        name_(candidate.name),
        provider_(candidate.provider),
        candidate_(candidate),
        device_memory_(device_memory),
        offer_(std::move(offer)) {}

  const std::string& provider() const override { return name_; }

  Result<std::unique_ptr<Domain>> open_domain(const std::string& name) override {
    if (fi_info* info = find(offer_.infos.get(), name)) {
      return open(info, name.empty() ? info->domain_attr->name : name, offer_.abilities);
    }
    // The bind address's interface is not the only one.
    if (!candidate_.ip) {
      // All domains were listed.
    } else if (in_addr address; inet_pton(AF_INET, name.c_str(), &address) == 1) {
      // Asked first: the provider itself takes any address, and its endpoints then fail.
      if (is_own(address)) {
        const Offer offer = probe(api_, candidate_, name.c_str(), device_memory_);
        if (fi_info* info = find(offer.infos.get(), "")) return open(info, name, offer.abilities);
      }
    } else {
      const Offer offer = probe(api_, candidate_, nullptr, device_memory_);
      if (fi_info* info = find(offer.infos.get(), name)) return open(info, name, offer.abilities);
    }
    return Status(Code::kUnavailable,
                  "provider " + name_ + " has no domain '" + name + "'; it has: " + offered());
  }

  Result<std::string> parse_address(const std::string& text) const override {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    const size_t colon = text.rfind(':');
    uint16_t port = 0;
    const char* end = text.data() + text.size();
    if (colon == std::string::npos ||
        std::from_chars(text.data() + colon + 1, end, port).ptr != end || port == 0 ||
        inet_pton(AF_INET, text.substr(0, colon).c_str(), &address.sin_addr) != 1) {
      return Status(Code::kInvalid, "'" + text + "' is not an address like 127.0.0.1:4321");
    }
    address.sin_port = htons(port);
    return std::string(reinterpret_cast<const char*>(&address), sizeof address);
  }

  std::string format_address(std::string_view name) const override {
    sockaddr_in address{};
    if (name.size() < sizeof address) return "?";
    std::memcpy(&address, name.data(), sizeof address);
    char host[INET_ADDRSTRLEN] = "?";
    inet_ntop(AF_INET, &address.sin_addr, host, sizeof host);
    return std::string(host) + ":" + std::to_string(ntohs(address.sin_port));
  }

 private:
  // The NIC's own name, where the provider tells it: EFA's domains add a suffix to it.
  static std::string device(const fi_info* info) {
    const fi_device_attr* device = info->nic ? info->nic->device_attr : nullptr;
    return device && device->name ? device->name : "";
  }

  // The first of this provider's (at an IPv4 address, if it has addresses); null if there is none.
  fi_info* find(fi_info* list, const std::string& name) const {
    for (fi_info* info = list; info; info = info->next) {
      if (provider_ != info->fabric_attr->prov_name) continue;
      if (candidate_.ip && info->addr_format != FI_SOCKADDR_IN) continue;
      if (name.empty() || name == info->domain_attr->name || name == device(info)) return info;
    }
    return nullptr;
  }

  // Every domain's name and, where they are names too, address.
  std::string offered() const {
    InfoPtr all(nullptr, InfoFreer{api_});
    if (candidate_.ip) all = probe(api_, candidate_, nullptr, DeviceMemoryWish::kNone).infos;
    std::set<std::string> names;
    for (fi_info* list : {offer_.infos.get(), all.get()}) {
      for (fi_info* info = list; info; info = info->next) {
        if (provider_ != info->fabric_attr->prov_name) continue;
        std::string name = info->domain_attr->name;
        if (candidate_.ip && (info->addr_format != FI_SOCKADDR_IN || !info->src_addr)) continue;
        if (candidate_.ip) {
          char host[INET_ADDRSTRLEN] = "?";
          inet_ntop(AF_INET, &static_cast<sockaddr_in*>(info->src_addr)->sin_addr, host,
                    sizeof host);
          name += std::string(" (") + host + ")";
        }
        names.insert(std::move(name));
      }
    }
    std::string text;
    for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
    return text;
  }

  Status failed(const char* what, int status) const {
    return Status(Code::kUnavailable,
                  std::string(what) + " of provider " + name_ + ": " + api_->error(status));
  }

  Result<std::unique_ptr<Domain>> open(fi_info* info, const std::string& name,
                                       const Abilities& abilities) {
    auto state = std::make_shared<OfiDomainState>();
    state->api = api_;
    state->info = InfoPtr(api_->dupinfo(info), InfoFreer{api_});
    fid_fabric* fabric = nullptr;
    if (int status = api_->fabric(state->info->fabric_attr, &fabric, nullptr); status != 0) {
      return failed("opening the fabric", status);
    }
    state->fabric.reset(fabric);
    fid_domain* domain = nullptr;
    if (int status = fi_domain(fabric, state->info.get(), &domain, nullptr); status != 0) {
      return failed("opening the domain", status);
    }
    state->domain.reset(domain);
    const fi_tx_attr& tx = *state->info->tx_attr;
    DomainLimits& limits = state->limits;
    // EFA and verbs scatter nothing (R16): there it is one piece a write.
    limits.pieces = std::max<size_t>(1, std::min(tx.iov_limit, tx.rma_iov_limit));
    limits.max_write = state->info->ep_attr->max_msg_size;
    limits.send_depth = tx.size;
    limits.receive_depth = state->info->rx_attr->size;
    limits.local_descriptors = state->mr_mode(FI_MR_LOCAL);
    limits.delivery_complete = abilities.delivery_complete;
    limits.device_memory = abilities.device_memory && (info->caps & FI_HMEM) != 0;
    limits.dmabuf = limits.device_memory && device_memory_version(api_) >= kOfiDmaBufVersion;
    state->write_flags =
        FI_REMOTE_CQ_DATA | FI_COMPLETION |
        (abilities.delivery_complete ? FI_DELIVERY_COMPLETE : FI_TRANSMIT_COMPLETE);
    return std::unique_ptr<Domain>(std::make_unique<OfiDomain>(name, std::move(state)));
  }

  const OfiApi* const api_;
  const std::string name_, provider_;
  const Candidate& candidate_;
  const DeviceMemoryWish device_memory_;
  const Offer offer_;
};

}  // namespace

Result<std::unique_ptr<Fabric>> open_ofi(const OfiOptions& options) {
  auto loaded = OfiApi::load(options.library_path);
  if (!loaded.ok()) return loaded.status();
  const OfiApi* api = *loaded;
  for (const Candidate& candidate : kCandidates) {
    if (options.provider != "auto" && options.provider != candidate.name) continue;
    if (options.software_only && !candidate.software) continue;
    Offer offer = probe(api, candidate, options.bind.c_str(), options.device_memory);
    if (!offer.infos) continue;
    return std::unique_ptr<Fabric>(
        std::make_unique<OfiFabric>(api, candidate, options.device_memory, std::move(offer)));
  }
  std::string offered;
  for (const Candidate& candidate : kCandidates) {
    if (probe(api, candidate, options.bind.c_str(), DeviceMemoryWish::kNone).infos) {
      offered += offered.empty() ? candidate.name : std::string(", ") + candidate.name;
    }
  }
  Status::Detail detail;
  detail.text = "libfabric " + api->version_text() + " offers no provider '" + options.provider +
                "' for the address " + options.bind +
                "; it offers: " + (offered.empty() ? "none" : offered);
  detail.missing = options.provider;
  return Status(Code::kUnavailable, std::move(detail));
}

}  // namespace ffi_transport
