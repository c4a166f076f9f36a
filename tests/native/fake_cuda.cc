// A CUDA driver without a GPU, for tests: device memory is host memory, a stream is a thread that
// runs what it was given in order, an event is done when its stream has come to it. What a real
// driver refuses is refused: calls without a current context, handles that are gone.
#include "fake_cuda.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cuda_driver.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace cuda = ffi_transport::cuda;

namespace {

struct Failure {
  int error = 0, skip = 0, times = 0;
};
struct Range {
  size_t bytes = 0;
  int device = 0;
};

struct State {
  std::mutex mutex;
  std::condition_variable released;  // `held` went away
  std::string log;
  bool started = false, held = false;
  int devices = 8;
  uint64_t delay_seed = 0;
  int delay_most_us = 0;
  int streams_made = 0, events_made = 0;
  std::map<std::string, Failure> failures;
  std::map<std::pair<int, int>, int> attributes;
  std::map<uint64_t, Range> pointers;
  std::map<int, int> retained;
  std::map<void*, size_t> host, registered;
  std::set<const void*> streams, events;
};

// Never destroyed: streams may outlive the end of main.
State& state() {
  static State* const all = new State;
  return *all;
}

thread_local std::vector<cuda::Context> t_contexts;

int device_of(cuda::Context context) {
  return static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
}

void add_line(const std::string& line) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  s.log += line + '\n';
}

template <class... Values>
std::string words(const Values&... values) {
  std::string out;
  const auto add = [&out](const auto& value) {
    char text[32];
    if constexpr (std::is_pointer_v<std::decay_t<decltype(value)>>) {
      std::snprintf(text, sizeof text, " %p", static_cast<const void*>(value));
    } else {
      std::snprintf(text, sizeof text, " %lld", static_cast<long long>(value));
    }
    out += text;
  };
  (add(values), ...);
  return out;
}

const void* pointer(uint64_t address) { return reinterpret_cast<const void*>(address); }

// Does `work` unless the test wants this call to fail, and logs it.
template <class Work>
cuda::Error call(const char* name, const std::string& arguments, Work work) {
  State& s = state();
  cuda::Error error = cuda::kSuccess;
  {
    std::lock_guard lock(s.mutex);
    if (const auto it = s.failures.find(name); it != s.failures.end()) {
      Failure& failure = it->second;
      if (failure.skip > 0) {
        --failure.skip;
      } else if (failure.times > 0) {
        --failure.times;
        error = failure.error;
      }
    }
    // Logged before it is done, or a stream's "ran" could come first.
    s.log += name + arguments + '\n';
  }
  if (error == cuda::kSuccess) error = work();
  if (error != cuda::kSuccess) add_line("failed " + std::string(name) + words(error));
  return error;
}

template <class Work>
cuda::Error call_in_context(const char* name, const std::string& arguments, Work work) {
  return call(name, arguments, [&]() -> cuda::Error {
    if (t_contexts.empty()) return cuda::kInvalidContext;
    return work();
  });
}

}  // namespace

namespace ffi_transport::cuda {

struct StreamObject {
  int id = 0;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  bool running = false, stopping = false;
  std::thread thread;

  void loop() {
    State& s = state();
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return stopping || !queue.empty(); });
      if (queue.empty()) return;
      auto work = std::move(queue.front());
      queue.pop_front();
      running = true;
      lock.unlock();
      int sleep_us = 0;
      {
        std::unique_lock all(s.mutex);
        s.released.wait(all, [&s] { return !s.held; });
        if (s.delay_most_us > 0) {
          std::minstd_rand random(static_cast<unsigned>(s.delay_seed++ * 2654435761u + 1));
          random.discard(2);
          sleep_us = static_cast<int>(random() % (s.delay_most_us + 1));
        }
      }
      if (sleep_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(sleep_us));
      work();
      lock.lock();
      running = false;
      changed.notify_all();
    }
  }
  void add(std::function<void()> work) {
    std::lock_guard lock(mutex);
    queue.push_back(std::move(work));
    changed.notify_all();
  }
  void drain() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return queue.empty() && !running; });
  }
};

struct EventObject {
  int id = 0;
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, done = 0;

  void finish(uint64_t turn) {
    std::lock_guard lock(mutex);
    if (turn > done) done = turn;
    changed.notify_all();
  }
  void wait(uint64_t turn) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return done >= turn; });
  }
};

}  // namespace ffi_transport::cuda

namespace {

bool known(const std::set<const void*>& all, const void* handle) {
  std::lock_guard lock(state().mutex);
  return all.contains(handle);
}

// Null is the null stream: it runs in the caller, at once.
cuda::Error enqueue(cuda::Stream stream, const std::string& line, std::function<void()> work) {
  if (stream == nullptr) {
    work();
    add_line("ran " + line);
    return cuda::kSuccess;
  }
  if (!known(state().streams, stream)) return cuda::kInvalidHandle;
  stream->add([line, work = std::move(work)] {
    work();
    add_line("ran " + line);
  });
  return cuda::kSuccess;
}

int id_of(cuda::Stream stream) {
  return stream != nullptr && known(state().streams, stream) ? stream->id : 0;
}

// What a device stores with one write is never seen by halves, and what it wrote before is there
// when it is seen.
void copy(void* to, const void* from, size_t bytes) {
  if (bytes == 4 && reinterpret_cast<uintptr_t>(to) % 4 == 0) {
    uint32_t value;
    std::memcpy(&value, from, 4);
    __atomic_store_n(static_cast<uint32_t*>(to), value, __ATOMIC_RELEASE);
  } else {
    std::memcpy(to, from, bytes);
  }
}

cuda::Error copy_async(const char* name, void* to, const void* from, size_t bytes,
                       cuda::Stream stream) {
  const std::string arguments = words(to, from, bytes) + " stream" + words(id_of(stream));
  return call_in_context(name, arguments, [&] {
    return enqueue(stream, name + arguments, [=] { copy(to, from, bytes); });
  });
}

}  // namespace

// ---- what tests say --------------------------------------------------------------------------

EXPORT void fake_cuda_reset() {
  State& s = state();
  std::lock_guard lock(s.mutex);
  s.log.clear();
  s.failures.clear();
  s.attributes.clear();
  s.pointers.clear();
  s.devices = 8;
  s.delay_seed = 0;
  s.delay_most_us = 0;
  s.held = false;
  s.released.notify_all();
}

EXPORT void fake_cuda_set_devices(int count) {
  std::lock_guard lock(state().mutex);
  state().devices = count;
}

EXPORT void fake_cuda_set_attribute(int device, int attribute, int value) {
  std::lock_guard lock(state().mutex);
  state().attributes[{device, attribute}] = value;
}

EXPORT void fake_cuda_set_pointer(uint64_t address, size_t bytes, int device) {
  std::lock_guard lock(state().mutex);
  state().pointers[address] = {bytes, device};
}

EXPORT void fake_cuda_fail(const char* function, int error, int skip, int times) {
  std::lock_guard lock(state().mutex);
  state().failures[function] = {error, skip, times};
}

EXPORT void fake_cuda_set_delay(uint64_t seed, int most_us) {
  std::lock_guard lock(state().mutex);
  state().delay_seed = seed;
  state().delay_most_us = most_us;
}

EXPORT void fake_cuda_hold(int held) {
  std::lock_guard lock(state().mutex);
  state().held = held != 0;
  state().released.notify_all();
}

EXPORT const char* fake_cuda_log() {
  thread_local std::string copy;
  std::lock_guard lock(state().mutex);
  copy = state().log;
  return copy.c_str();
}

EXPORT void fake_cuda_note(const char* line) { add_line(line); }

EXPORT int fake_cuda_live(const char* what) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  const std::string word = what;
  if (word == "host") return static_cast<int>(s.host.size());
  if (word == "registered") return static_cast<int>(s.registered.size());
  if (word == "stream") return static_cast<int>(s.streams.size());
  if (word == "event") return static_cast<int>(s.events.size());
  if (word != "context") return -1;
  int count = 0;
  for (const auto& [device, times] : s.retained) count += times;
  return count;
}

// ---- the driver ------------------------------------------------------------------------------

EXPORT cuda::Error cuInit(unsigned flags) {
  return call("cuInit", words(flags), [] {
    std::lock_guard lock(state().mutex);
    state().started = true;
    return cuda::kSuccess;
  });
}

EXPORT cuda::Error cuDriverGetVersion(int* version) {
  return call("cuDriverGetVersion", "", [&] {
    *version = 13000;
    return cuda::kSuccess;
  });
}

EXPORT cuda::Error cuDeviceGetCount(int* count) {
  return call("cuDeviceGetCount", "", [&] {
    std::lock_guard lock(state().mutex);
    *count = state().devices;
    return state().started ? cuda::kSuccess : 3;  // CUDA_ERROR_NOT_INITIALIZED
  });
}

EXPORT cuda::Error cuDeviceGet(cuda::Device* device, int ordinal) {
  return call("cuDeviceGet", words(ordinal), [&] {
    std::lock_guard lock(state().mutex);
    if (ordinal < 0 || ordinal >= state().devices) return cuda::kInvalidDevice;
    *device = ordinal;
    return cuda::kSuccess;
  });
}

EXPORT cuda::Error cuDeviceGetName(char* name, int size, cuda::Device device) {
  return call("cuDeviceGetName", words(device), [&] {
    std::snprintf(name, static_cast<size_t>(size), "Fake device %d", device);
    return cuda::kSuccess;
  });
}

EXPORT cuda::Error cuDeviceGetPCIBusId(char* id, int size, cuda::Device device) {
  return call("cuDeviceGetPCIBusId", words(device), [&] {
    std::snprintf(id, static_cast<size_t>(size), "0000:%02x:00.0", device + 16);
    return cuda::kSuccess;
  });
}

EXPORT cuda::Error cuDeviceGetAttribute(int* value, int attribute, cuda::Device device) {
  return call("cuDeviceGetAttribute", words(attribute, device), [&] {
    std::lock_guard lock(state().mutex);
    const auto it = state().attributes.find({device, attribute});
    *value = it != state().attributes.end()                   ? it->second
             : attribute == cuda::kAttributeUnifiedAddressing ? 1
                                                              : 0;
    return cuda::kSuccess;
  });
}

EXPORT cuda::Error cuDevicePrimaryCtxRetain(cuda::Context* context, cuda::Device device) {
  return call("cuDevicePrimaryCtxRetain", words(device), [&] {
    std::lock_guard lock(state().mutex);
    ++state().retained[device];
    *context = reinterpret_cast<cuda::Context>(static_cast<intptr_t>(device) + 1);
    return cuda::kSuccess;
  });
}

EXPORT cuda::Error cuDevicePrimaryCtxRelease_v2(cuda::Device device) {
  return call("cuDevicePrimaryCtxRelease_v2", words(device), [&] {
    std::lock_guard lock(state().mutex);
    if (state().retained[device] == 0) return cuda::kInvalidContext;
    --state().retained[device];
    return cuda::kSuccess;
  });
}

EXPORT cuda::Error cuCtxPushCurrent_v2(cuda::Context context) {
  return call("cuCtxPushCurrent_v2", words(device_of(context)), [&] {
    {
      std::lock_guard lock(state().mutex);
      if (state().retained[device_of(context)] == 0) return cuda::kInvalidContext;
    }
    t_contexts.push_back(context);
    return cuda::kSuccess;
  });
}

EXPORT cuda::Error cuCtxPopCurrent_v2(cuda::Context* context) {
  return call("cuCtxPopCurrent_v2", "", [&] {
    if (t_contexts.empty()) return cuda::kInvalidContext;
    *context = t_contexts.back();
    t_contexts.pop_back();
    return cuda::kSuccess;
  });
}

EXPORT cuda::Error cuMemHostAlloc(void** memory, size_t bytes, unsigned flags) {
  return call_in_context("cuMemHostAlloc", words(bytes, flags), [&] {
    const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    void* got = std::aligned_alloc(page, (bytes + page - 1) / page * page);
    if (bytes == 0 || got == nullptr) return cuda::kOutOfMemory;
    std::memset(got, 0xAB, bytes);  // pinned memory is not zeroed
    std::lock_guard lock(state().mutex);
    state().host[got] = bytes;
    *memory = got;
    return cuda::kSuccess;
  });
}

EXPORT cuda::Error cuMemFreeHost(void* memory) {
  return call_in_context("cuMemFreeHost", words(memory), [&] {
    {
      std::lock_guard lock(state().mutex);
      if (state().host.erase(memory) == 0) return cuda::kInvalidValue;
    }
    std::free(memory);
    return cuda::kSuccess;
  });
}

EXPORT cuda::Error cuMemHostRegister_v2(void* memory, size_t bytes, unsigned flags) {
  return call_in_context("cuMemHostRegister_v2", words(memory, bytes, flags), [&] {
    std::lock_guard lock(state().mutex);
    const bool added = bytes > 0 && state().registered.emplace(memory, bytes).second;
    return added ? cuda::kSuccess : cuda::kInvalidValue;
  });
}

EXPORT cuda::Error cuMemHostUnregister(void* memory) {
  return call_in_context("cuMemHostUnregister", words(memory), [&] {
    std::lock_guard lock(state().mutex);
    return state().registered.erase(memory) > 0 ? cuda::kSuccess : cuda::kInvalidValue;
  });
}

EXPORT cuda::Error cuMemcpyDtoHAsync_v2(void* to, cuda::DevicePtr from, size_t bytes,
                                        cuda::Stream stream) {
  return copy_async("cuMemcpyDtoHAsync_v2", to, pointer(from), bytes, stream);
}

EXPORT cuda::Error cuMemcpyHtoDAsync_v2(cuda::DevicePtr to, const void* from, size_t bytes,
                                        cuda::Stream stream) {
  return copy_async("cuMemcpyHtoDAsync_v2", const_cast<void*>(pointer(to)), from, bytes, stream);
}

EXPORT cuda::Error cuMemcpyDtoDAsync_v2(cuda::DevicePtr to, cuda::DevicePtr from, size_t bytes,
                                        cuda::Stream stream) {
  return copy_async("cuMemcpyDtoDAsync_v2", const_cast<void*>(pointer(to)), pointer(from), bytes,
                    stream);
}

EXPORT cuda::Error cuStreamCreate(cuda::Stream* stream, unsigned flags) {
  return call_in_context("cuStreamCreate", words(flags), [&] {
    auto* made = new cuda::StreamObject;
    {
      std::lock_guard lock(state().mutex);
      made->id = ++state().streams_made;
      state().streams.insert(made);
    }
    made->thread = std::thread([made] { made->loop(); });
    *stream = made;
    return cuda::kSuccess;
  });
}

EXPORT cuda::Error cuStreamDestroy_v2(cuda::Stream stream) {
  return call_in_context("cuStreamDestroy_v2", words(id_of(stream)), [&] {
    {
      std::lock_guard lock(state().mutex);
      if (state().streams.erase(stream) == 0) return cuda::kInvalidHandle;
    }
    {
      std::lock_guard lock(stream->mutex);
      stream->stopping = true;  // what was given to it is still done
      stream->changed.notify_all();
    }
    stream->thread.join();
    delete stream;
    return cuda::kSuccess;
  });
}

EXPORT cuda::Error cuStreamSynchronize(cuda::Stream stream) {
  return call_in_context("cuStreamSynchronize", words(id_of(stream)), [&] {
    if (stream == nullptr) return cuda::kSuccess;
    if (!known(state().streams, stream)) return cuda::kInvalidHandle;
    stream->drain();
    return cuda::kSuccess;
  });
}

EXPORT cuda::Error cuStreamWaitEvent(cuda::Stream stream, cuda::Event event, unsigned) {
  if (!known(state().events, event)) return cuda::kInvalidHandle;
  const std::string arguments = words(event->id) + " stream" + words(id_of(stream));
  return call_in_context("cuStreamWaitEvent", arguments, [&] {
    uint64_t turn;
    {
      std::lock_guard lock(event->mutex);
      turn = event->recorded;
    }
    return enqueue(stream, "cuStreamWaitEvent" + arguments, [event, turn] { event->wait(turn); });
  });
}

EXPORT cuda::Error cuEventCreate(cuda::Event* event, unsigned flags) {
  return call_in_context("cuEventCreate", words(flags), [&] {
    auto* made = new cuda::EventObject;
    std::lock_guard lock(state().mutex);
    made->id = ++state().events_made;
    state().events.insert(made);
    *event = made;
    return cuda::kSuccess;
  });
}

EXPORT cuda::Error cuEventRecord(cuda::Event event, cuda::Stream stream) {
  if (!known(state().events, event)) return cuda::kInvalidHandle;
  const std::string arguments = words(event->id) + " stream" + words(id_of(stream));
  return call_in_context("cuEventRecord", arguments, [&] {
    uint64_t turn;
    {
      std::lock_guard lock(event->mutex);
      turn = ++event->recorded;
    }
    return enqueue(stream, "cuEventRecord" + arguments, [event, turn] { event->finish(turn); });
  });
}

EXPORT cuda::Error cuEventQuery(cuda::Event event) {
  if (!known(state().events, event)) return cuda::kInvalidHandle;
  // Asked in a loop: only the answer that ends it is worth a line.
  std::unique_lock lock(event->mutex);
  if (event->done < event->recorded) return cuda::kNotReady;
  lock.unlock();
  return call("cuEventQuery", words(event->id), [] { return cuda::kSuccess; });
}

EXPORT cuda::Error cuEventSynchronize(cuda::Event event) {
  if (!known(state().events, event)) return cuda::kInvalidHandle;
  return call("cuEventSynchronize", words(event->id), [&] {
    uint64_t turn;
    {
      std::lock_guard lock(event->mutex);
      turn = event->recorded;
    }
    event->wait(turn);
    add_line("ran cuEventSynchronize" + words(event->id));
    return cuda::kSuccess;
  });
}

EXPORT cuda::Error cuEventDestroy_v2(cuda::Event event) {
  return call("cuEventDestroy_v2", "", [&] {
    {
      std::lock_guard lock(state().mutex);
      if (state().events.erase(event) == 0) return cuda::kInvalidHandle;
    }
    // A real one lives until its record is done.
    uint64_t turn;
    {
      std::lock_guard lock(event->mutex);
      turn = event->recorded;
    }
    event->wait(turn);
    delete event;
    return cuda::kSuccess;
  });
}

EXPORT cuda::Error cuPointerGetAttribute(void* value, int attribute, cuda::DevicePtr address) {
  return call("cuPointerGetAttribute", words(attribute, pointer(address)), [&] {
    std::lock_guard lock(state().mutex);
    auto it = state().pointers.upper_bound(address);
    if (it == state().pointers.begin()) return cuda::kInvalidValue;
    --it;
    if (address - it->first >= it->second.bytes) return cuda::kInvalidValue;
    if (attribute == cuda::kPointerMemoryType) {
      *static_cast<unsigned*>(value) = cuda::kMemoryTypeDevice;
    } else if (attribute == cuda::kPointerDeviceOrdinal) {
      *static_cast<int*>(value) = it->second.device;
    } else {
      return cuda::kInvalidValue;
    }
    return cuda::kSuccess;
  });
}

EXPORT cuda::Error cuFlushGPUDirectRDMAWrites(int target, int scope) {
  return call_in_context("cuFlushGPUDirectRDMAWrites", words(target, scope),
                         [] { return cuda::kSuccess; });
}

EXPORT cuda::Error cuMemGetHandleForAddressRange(void* handle, cuda::DevicePtr address,
                                                 size_t bytes, int type, unsigned long long flags) {
  return call_in_context(
      "cuMemGetHandleForAddressRange", words(pointer(address), bytes, type, flags), [&] {
        const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
        if (type != cuda::kRangeHandleDmaBuf || bytes == 0 || address % page || bytes % page) {
          return cuda::kInvalidValue;
        }
        const int fd = ::memfd_create("fake dmabuf", MFD_CLOEXEC);
        if (fd < 0) return cuda::kNotSupported;
        *static_cast<int*>(handle) = fd;
        return cuda::kSuccess;
      });
}

EXPORT cuda::Error cuGetErrorName(cuda::Error error, const char** name) {
  static const std::map<cuda::Error, const char*> names = {
      {cuda::kSuccess, "CUDA_SUCCESS"},
      {cuda::kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
      {cuda::kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
      {cuda::kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
      {cuda::kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
      {cuda::kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},
      {cuda::kNotReady, "CUDA_ERROR_NOT_READY"},
      {cuda::kNotSupported, "CUDA_ERROR_NOT_SUPPORTED"}};
  const auto it = names.find(error);
  if (it == names.end()) return cuda::kInvalidValue;
  *name = it->second;
  return cuda::kSuccess;
}
