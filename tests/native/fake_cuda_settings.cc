// What tests set in the fake CUDA driver and read from it.
#include "fake_cuda_state.h"

namespace fake_cuda {

// Never destroyed: streams may outlive the end of main.
State& state() {
  static State* const all = new State;
  return *all;
}

void add_line(const std::string& line) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  s.log += line + '\n';
}

}  // namespace fake_cuda

using namespace fake_cuda;

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
  s.gone = false;
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

EXPORT void fake_cuda_shut_down() {
  std::lock_guard lock(state().mutex);
  state().gone = true;
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
  if (word == "stream") return static_cast<int>(s.streams.size());
  if (word == "event") return static_cast<int>(s.events.size());
  if (word != "context") return -1;
  int count = 0;
  for (const auto& [device, times] : s.retained) count += times;
  return count;
}
