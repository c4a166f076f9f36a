// What the parts of the fake CUDA driver share: its state, its log, and how a call is made.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <type_traits>
#include <utility>

#include "cuda_driver.h"
#include "fake_cuda.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace fake_cuda {

namespace cuda = ffi_transport::cuda;

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
  bool started = false, held = false, gone = false;
  int devices = 8;
  uint64_t delay_seed = 0;
  int delay_most_us = 0;
  int streams_made = 0, events_made = 0;
  std::map<std::string, Failure> failures;
  std::map<std::pair<int, int>, int> attributes;
  std::map<uint64_t, Range> pointers;
  std::map<int, int> retained;
  std::map<void*, size_t> host;
  std::set<const void*> streams, events;
};

State& state();

void add_line(const std::string& line);

// The device whose context the calling thread has made current, or -1.
int current_device();

// Why a thread that captures a stream may not make this call, which then breaks the capture.
cuda::Error refused_in_capture(const char* name);
// Whether the driver pinned this memory.
bool pinned(const void* memory, size_t bytes);

inline constexpr cuda::Error kDeinitialized = 4;         // CUDA_ERROR_DEINITIALIZED
inline constexpr cuda::Error kCaptureUnsupported = 900;  // CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED

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

inline const void* pointer(uint64_t address) { return reinterpret_cast<const void*>(address); }

// Does `work` unless the test wants this call to fail, and logs it.
template <class Work>
cuda::Error call(const char* name, const std::string& arguments, Work work) {
  State& s = state();
  cuda::Error error = refused_in_capture(name);
  {
    std::lock_guard lock(s.mutex);
    if (s.gone) error = kDeinitialized;
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
    if (current_device() < 0) return cuda::kInvalidContext;
    return work();
  });
}

}  // namespace fake_cuda
