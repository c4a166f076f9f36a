#include "loopback.h"

#include <charconv>
#include <cstring>

#include "loopback_endpoint.h"

namespace ffi_transport {
namespace {

class LoopbackRegistration : public Registration {
 public:
  LoopbackRegistration(std::shared_ptr<LoopbackMemory> table, uint64_t key)
      : table_(std::move(table)), key_(key) {}
  ~LoopbackRegistration() override {
    std::lock_guard lock(table_->mutex);
    table_->ranges.erase(key_);
  }
  uint64_t key() const override { return key_; }
  uint64_t base() const override { return 0; }
  void* descriptor() const override { return reinterpret_cast<void*>(key_); }

 private:
  std::shared_ptr<LoopbackMemory> table_;
  uint64_t key_;
};

class LoopbackDomain : public Domain {
 public:
  LoopbackDomain(std::string name, const LoopbackOptions& options)
      : name_(std::move(name)), options_(options), memory_(std::make_shared<LoopbackMemory>()) {
    limits_.pieces = options.pieces;
    limits_.max_write = options.max_write;
    limits_.send_depth = options.send_depth;
    limits_.device_memory = options.device_memory;
    limits_.dmabuf = options.device_memory && options.dmabuf;
  }

  const std::string& name() const override { return name_; }
  const DomainLimits& limits() const override { return limits_; }

  Result<std::unique_ptr<Endpoint>> open_endpoint(uint16_t port) override {
    return open_loopback_endpoint(memory_, options_, port);
  }

  Result<std::unique_ptr<Registration>> register_memory(void* address, size_t length) override {
    std::lock_guard lock(memory_->mutex);
    uint64_t key = memory_->keys();
    while (memory_->ranges.contains(key)) key = memory_->keys();
    memory_->ranges[key] = {reinterpret_cast<uint64_t>(address), length};
    return std::unique_ptr<Registration>(std::make_unique<LoopbackRegistration>(memory_, key));
  }

  Result<std::unique_ptr<Registration>> register_device_memory(const DeviceRange& range) override {
    if (options_.take_device_memory) {
      if (Status status = options_.take_device_memory(range); !status.ok()) return status;
    }
    return register_memory(reinterpret_cast<void*>(range.address), range.length);
  }

 private:
  const std::string name_;
  const LoopbackOptions options_;
  DomainLimits limits_;
  std::shared_ptr<LoopbackMemory> memory_;
};

class LoopbackFabric : public Fabric {
 public:
  explicit LoopbackFabric(const LoopbackOptions& options) : options_(options) {}
  const std::string& provider() const override { return name_; }
  Result<std::unique_ptr<Domain>> open_domain(const std::string& name) override {
    return std::unique_ptr<Domain>(
        std::make_unique<LoopbackDomain>(name.empty() ? name_ : name, options_));
  }
  Result<std::string> parse_address(const std::string& text) const override {
    const size_t colon = text.rfind(':');
    uint16_t port = 0;
    const char* end = text.data() + text.size();
    if (colon == std::string::npos ||
        std::from_chars(text.data() + colon + 1, end, port).ptr != end || port == 0) {
      return Status(Code::kInvalid, "'" + text + "' is not an address like loopback:40000");
    }
    return std::string(reinterpret_cast<const char*>(&port), sizeof port);
  }
  std::string format_address(std::string_view name) const override {
    uint16_t port = 0;
    if (name.size() == sizeof port) std::memcpy(&port, name.data(), sizeof port);
    return "loopback:" + std::to_string(port);
  }

 private:
  const LoopbackOptions options_;
  const std::string name_ = "loopback";
};

}  // namespace

std::unique_ptr<Fabric> make_loopback(const LoopbackOptions& options) {
  return std::make_unique<LoopbackFabric>(options);
}

}  // namespace ffi_transport
