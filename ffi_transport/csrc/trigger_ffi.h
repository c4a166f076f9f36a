#pragma once

namespace ffi_transport {

// The XLA_FFI_Handler to register for platform "cpu".
void* trigger_handler();

}  // namespace ffi_transport
