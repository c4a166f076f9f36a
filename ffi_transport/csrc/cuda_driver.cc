#include "cuda_driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <mutex>

namespace ffi_transport {
namespace {

constexpr const char* kVariable = "JAXDISAGG_LIBCUDA";

Status missing(std::string text, std::string what) {
  Status::Detail detail;
  detail.text = std::move(text);
  detail.missing = std::move(what);
  return Status(Code::kUnavailable, std::move(detail));
}

template <class Function>
void find(void* handle, const char* symbol, Function* out) {
  *out = reinterpret_cast<Function>(dlsym(handle, symbol));
}

Status load(const std::string& file, CudaDriver* driver) {
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    return missing("CUDA's driver cannot be loaded: " + std::string(reason ? reason : file) +
                       ". It comes with NVIDIA's kernel driver; " + kVariable +
                       " names a library in another place",
                   "libcuda.so.1");
  }
  const char* absent = nullptr;
#define FFI_TRANSPORT_FIND(name, symbol, ...) \
  find(handle, #symbol, &driver->name);       \
  if (driver->name == nullptr) absent = #symbol;
  FFI_TRANSPORT_CUDA_FUNCTIONS(FFI_TRANSPORT_FIND)
#undef FFI_TRANSPORT_FIND
  if (absent != nullptr) {
    return missing(file + " is no CUDA driver that this engine can use: it lacks " + absent,
                   absent);
  }
#define FFI_TRANSPORT_FIND(name, symbol, ...) find(handle, #symbol, &driver->name);
  FFI_TRANSPORT_CUDA_OPTIONAL_FUNCTIONS(FFI_TRANSPORT_FIND)
#undef FFI_TRANSPORT_FIND
  // Without a device this fails, too (CUDA_ERROR_NO_DEVICE).
  return driver->check(driver->init(0), "CUDA's driver does not start: cuInit");
}

}  // namespace

Result<const CudaDriver*> CudaDriver::open() {
  static std::mutex mutex;
  // By file: the variable is read every time. Never destroyed: slots, XLA's threads and those of an
  // engine that nobody closed use a driver until the process is gone.
  static auto* const loaded = new std::map<std::string, CudaDriver>;
  std::lock_guard lock(mutex);
  const char* named = std::getenv(kVariable);
  const std::string file = named != nullptr && *named != '\0' ? named : "libcuda.so.1";
  if (const auto it = loaded->find(file); it != loaded->end()) return &it->second;
  CudaDriver driver;
  if (Status status = load(file, &driver); !status.ok()) return status;
  return &loaded->emplace(file, driver).first->second;
}

std::string CudaDriver::error_name(cuda::Error error) const {
  const char* name = nullptr;
  if (get_error_name(error, &name) == cuda::kSuccess && name != nullptr) return name;
  return "CUDA error " + std::to_string(error);
}

Status CudaDriver::check(cuda::Error error, const std::string& attempt, Code code) const {
  if (error == cuda::kSuccess) return {};
  return Status(code, attempt + ": " + error_name(error));
}

Result<std::shared_ptr<CudaDevice>> CudaDevice::open(int ordinal) {
  auto driver = CudaDriver::open();
  if (!driver.ok()) return driver.status();
  const CudaDriver& cuda = **driver;
  const std::string name = "CUDA device " + std::to_string(ordinal);
  int count = 0;
  if (Status status = cuda.check(cuda.device_get_count(&count), "cuDeviceGetCount"); !status.ok()) {
    return status;
  }
  if (ordinal < 0 || ordinal >= count) {
    return Status(Code::kInvalid, name + ": this process sees " + std::to_string(count));
  }
  std::shared_ptr<CudaDevice> device(new CudaDevice(cuda, ordinal));
  if (Status status = cuda.check(cuda.device_get(&device->device_, ordinal), name); !status.ok()) {
    return status;
  }
  Status status = cuda.check(cuda.primary_context_retain(&device->context_, device->device_),
                             name + ": its primary context");
  if (!status.ok()) return status;
  return device;
}

CudaDevice::~CudaDevice() {
  if (context_ != nullptr) driver_.primary_context_release(device_);
}

Result<int> CudaDevice::attribute(int attribute) const {
  int value = 0;
  Status status = driver_.check(
      driver_.device_get_attribute(&value, attribute, device_),
      "CUDA device " + std::to_string(ordinal_) + ", attribute " + std::to_string(attribute));
  if (!status.ok()) return status;
  return value;
}

CudaCurrent::CudaCurrent(const CudaDevice& device) : driver_(device.driver()) {
  const cuda::Error error = driver_.context_push(device.context_);
  if (error == cuda::kSuccess) return;  // the usual case writes no text: triggers come this way
  status_ = driver_.check(error, "CUDA device " + std::to_string(device.ordinal()) +
                                     ": its context cannot be made current");
}

CudaCurrent::~CudaCurrent() {
  cuda::Context was = nullptr;
  if (status_.ok()) driver_.context_pop(&was);
}

}  // namespace ffi_transport
