// libfabric loaded at run time: importing the package must work without it, and using it must say
// what to install. Only these functions are symbols of the library; the rest of its API are inline
// calls through the objects that these return.
#pragma once

#include <dlfcn.h>
#include <rdma/fabric.h>
#include <stdlib.h>

#include <map>
#include <mutex>
#include <string>

#include "status.h"

namespace ffi_transport {

struct OfiApi {
  decltype(&::fi_getinfo) getinfo = nullptr;
  decltype(&::fi_freeinfo) freeinfo = nullptr;
  decltype(&::fi_dupinfo) dupinfo = nullptr;
  decltype(&::fi_fabric) fabric = nullptr;
  decltype(&::fi_strerror) strerror = nullptr;
  decltype(&::fi_version) version = nullptr;

  std::string error(int64_t code) const {
    return strerror(static_cast<int>(code < 0 ? -code : code));
  }
  std::string version_text() const {
    return std::to_string(FI_MAJOR(version())) + "." + std::to_string(FI_MINOR(version()));
  }

  // An empty path is the system's libfabric.so.1. A library stays loaded for good.
  static Result<const OfiApi*> load(const std::string& path) {
    static std::mutex mutex;
    // Never destroyed: threads of an engine that nobody closed use it until the process is gone.
    static auto* const loaded = new std::map<std::string, OfiApi>;
    std::lock_guard lock(mutex);
    const std::string file = path.empty() ? "libfabric.so.1" : path;
    if (auto it = loaded->find(file); it != loaded->end()) return &it->second;
    // Only providers that this engine can use, unless the user chose: the others of Debian's build
    // look for hardware and install a signal handler that writes .btr files on a crash.
    setenv("FI_PROVIDER", "tcp,net,ofi_rxm,efa,verbs", 0);
    setenv("IPATH_NO_BACKTRACE", "1", 0);
    setenv("HFI_NO_BACKTRACE", "1", 0);
    // Received bytes go straight into place. With the prefetch buffer the first 9 KB of every write
    // are copied twice: 1.2 to 1.5 times slower at pages of 4 and 16 KiB.
    setenv("FI_NET_PREFETCH_RBUF_SIZE", "0", 0);
    setenv("FI_TCP_PREFETCH_RBUF_SIZE", "0", 0);
    void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      const char* reason = dlerror();
      Status::Detail detail;
      detail.text = "libfabric cannot be loaded: " + std::string(reason ? reason : file) +
                    ". Install it (Debian and Ubuntu: apt-get install libfabric1; Fedora: dnf "
                    "install libfabric) or give libfabric_path";
      detail.missing = "libfabric";
      return Status(Code::kUnavailable, std::move(detail));
    }
    OfiApi api;
    // By version, because these structures changed before it; later libraries keep it.
    const bool found = find(handle, "fi_getinfo", "FABRIC_1.3", &api.getinfo) &&
                       find(handle, "fi_freeinfo", "FABRIC_1.3", &api.freeinfo) &&
                       find(handle, "fi_dupinfo", "FABRIC_1.3", &api.dupinfo) &&
                       find(handle, "fi_fabric", "FABRIC_1.1", &api.fabric) &&
                       find(handle, "fi_strerror", "FABRIC_1.0", &api.strerror) &&
                       find(handle, "fi_version", "FABRIC_1.0", &api.version);
    if (!found) {
      Status::Detail detail;
      detail.text = file + " is not a libfabric of version 1.17 or later";
      detail.missing = "libfabric >= 1.17";
      return Status(Code::kUnavailable, std::move(detail));
    }
    return &loaded->emplace(file, api).first->second;
  }

 private:
  template <class Function>
  static bool find(void* handle, const char* name, const char* version, Function* out) {
    void* symbol = dlvsym(handle, name, version);
    *out = reinterpret_cast<Function>(symbol);
    return symbol != nullptr;
  }
};

}  // namespace ffi_transport
