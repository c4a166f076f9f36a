#pragma once

namespace ffi_transport {

// The XLA_FFI_Handlers to register for the platforms "cpu" and "CUDA".
void* trigger_handler();
void* trigger_handler_cuda();

}  // namespace ffi_transport
