// The native threads' names, as tools show them, and the CPUs that they run on.
#pragma once

#include <string>
#include <thread>
#include <vector>

#include "status.h"

namespace ffi_transport {

// At most 15 characters are kept.
void name_thread(std::thread& thread, const std::string& name);

// None: the thread stays where it is. kInvalid if the system does not let this process run on one.
Status pin_thread(std::thread& thread, const std::vector<int>& cpus);

}  // namespace ffi_transport
