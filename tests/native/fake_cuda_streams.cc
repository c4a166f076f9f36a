// Streams and events of the fake CUDA driver: a stream is a thread that runs what it was given in
// order, an event is done when its stream has come to it.
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <string_view>
#include <thread>
#include <vector>

#include "fake_cuda_state.h"

using namespace fake_cuda;

namespace ffi_transport::cuda {

struct StreamObject {
  int id = 0, device = -1;
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
  int id = 0, device = -1;
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

struct Operation {
  std::string line;
  std::function<void()> work;
};
struct Capture {
  cuda::Stream stream = nullptr;
  bool broken = false;
  std::vector<Operation> operations;
};
thread_local Capture* t_capture = nullptr;

// Between the device and more than this of pageable memory the driver copies piece by piece through
// pinned memory of its own, and returns when that is done.
constexpr size_t kPageableBytes = 64 << 10;

cuda::Error break_capture() {
  t_capture->broken = true;
  return kCaptureUnsupported;
}

bool known(const std::set<const void*>& all, const void* handle) {
  std::lock_guard lock(state().mutex);
  return all.contains(handle);
}

// Null is the null stream: it runs in the caller, at once.
cuda::Error enqueue(cuda::Stream stream, const std::string& line, std::function<void()> work) {
  if (t_capture != nullptr && stream == nullptr) return break_capture();
  if (t_capture != nullptr && stream == t_capture->stream) {
    t_capture->operations.push_back({line, std::move(work)});
    return cuda::kSuccess;
  }
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

// `host`: the end of it that is not the device's.
cuda::Error copy_async(const char* name, void* to, const void* from, size_t bytes,
                       cuda::Stream stream, const void* host) {
  const std::string arguments = words(to, from, bytes) + " stream" + words(id_of(stream));
  return call_in_context(name, arguments, [&]() -> cuda::Error {
    const bool pageable = host != nullptr && !pinned(host, bytes);
    if (pageable && t_capture != nullptr) return break_capture();
    const auto error = enqueue(stream, name + arguments, [=] { copy(to, from, bytes); });
    if (error == cuda::kSuccess && pageable && bytes > kPageableBytes) fake_cuda_drain(stream);
    return error;
  });
}

}  // namespace

cuda::Error fake_cuda::refused_in_capture(const char* name) {
  if (t_capture == nullptr) return cuda::kSuccess;
  for (const std::string_view unsafe : {"cuMemHostAlloc", "cuMemFreeHost", "cuEventQuery"}) {
    if (name == unsafe) return break_capture();
  }
  return cuda::kSuccess;
}

EXPORT void fake_cuda_begin_capture(void* stream) {
  t_capture = new Capture{static_cast<cuda::Stream>(stream), false, {}};
}

EXPORT void* fake_cuda_end_capture() {
  Capture* const ended = t_capture;
  t_capture = nullptr;
  // Recorded ones are never destroyed: they are a test's, and streams may run them yet.
  static auto* const kept = new std::vector<Capture*>;
  if (!ended->broken) {
    kept->push_back(ended);
    return ended;
  }
  delete ended;
  return nullptr;
}

EXPORT void fake_cuda_launch(void* graph, void* stream) {
  for (const Operation& operation : static_cast<Capture*>(graph)->operations) {
    enqueue(static_cast<cuda::Stream>(stream), operation.line, operation.work);
  }
}

EXPORT void fake_cuda_drain(void* handle) {
  const auto stream = static_cast<cuda::Stream>(handle);
  if (known(state().streams, stream)) stream->drain();
}

EXPORT cuda::Error cuMemcpyDtoHAsync_v2(void* to, cuda::DevicePtr from, size_t bytes,
                                        cuda::Stream stream) {
  return copy_async("cuMemcpyDtoHAsync_v2", to, pointer(from), bytes, stream, to);
}

EXPORT cuda::Error cuMemcpyHtoDAsync_v2(cuda::DevicePtr to, const void* from, size_t bytes,
                                        cuda::Stream stream) {
  return copy_async("cuMemcpyHtoDAsync_v2", const_cast<void*>(pointer(to)), from, bytes, stream,
                    from);
}

EXPORT cuda::Error cuMemcpyDtoDAsync_v2(cuda::DevicePtr to, cuda::DevicePtr from, size_t bytes,
                                        cuda::Stream stream) {
  return copy_async("cuMemcpyDtoDAsync_v2", const_cast<void*>(pointer(to)), pointer(from), bytes,
                    stream, nullptr);
}

EXPORT cuda::Error cuStreamCreate(cuda::Stream* stream, unsigned flags) {
  return call_in_context("cuStreamCreate", words(flags), [&] {
    auto* made = new cuda::StreamObject;
    made->device = current_device();
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

EXPORT cuda::Error cuEventCreate(cuda::Event* event, unsigned flags) {
  return call_in_context("cuEventCreate", words(flags), [&] {
    auto* made = new cuda::EventObject;
    made->device = current_device();
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
  return call_in_context("cuEventRecord", arguments, [&]() -> cuda::Error {
    // Of one context, the stream's.
    const int device = known(state().streams, stream) ? stream->device : current_device();
    if (device != event->device) return cuda::kInvalidHandle;
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
  {
    std::lock_guard lock(state().mutex);
    if (state().gone) return kDeinitialized;
  }
  // Asked in a loop: only the answer that ends it is worth a line.
  std::unique_lock lock(event->mutex);
  if (event->done < event->recorded) return cuda::kNotReady;
  lock.unlock();
  return call("cuEventQuery", words(event->id), [] { return cuda::kSuccess; });
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
