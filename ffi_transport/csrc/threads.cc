#include "threads.h"

#include <pthread.h>
#include <sched.h>

namespace ffi_transport {

void name_thread(std::thread& thread, const std::string& name) {
  constexpr size_t kLongest = 15;
  pthread_setname_np(thread.native_handle(), name.substr(0, kLongest).c_str());
}

Status pin_thread(std::thread& thread, const std::vector<int>& cpus) {
  if (cpus.empty()) return {};
  cpu_set_t wanted, got;
  CPU_ZERO(&wanted);
  CPU_ZERO(&got);
  for (const int cpu : cpus) {
    if (cpu < 0 || cpu >= CPU_SETSIZE) {
      return Status(Code::kInvalid, "domain_cpus: " + std::to_string(cpu) + " is not in 0.." +
                                        std::to_string(CPU_SETSIZE - 1));
    }
    CPU_SET(cpu, &wanted);
  }
  const pthread_t handle = thread.native_handle();
  // The system takes a set of which a part is allowed, and uses that part: so it is read back.
  const int status = pthread_setaffinity_np(handle, sizeof wanted, &wanted);
  if (status == 0) pthread_getaffinity_np(handle, sizeof got, &got);
  for (const int cpu : cpus) {
    if (!CPU_ISSET(cpu, &got)) {
      return Status(Code::kInvalid,
                    "domain_cpus: this process may not run on CPU " + std::to_string(cpu));
    }
  }
  return {};
}

}  // namespace ffi_transport
