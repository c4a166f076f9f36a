// The XLA FFI call (step, x, cache_l) -> x that a jitted step makes after each layer. On a CPU it
// runs when the layer is written: it hands (step, ordinal, layer) to the engine and returns. On
// CUDA it runs when the call is put on the stream, or is captured, and enqueues what says the same
// once the device has come so far. It never waits and never returns an error that the program could
// do without, because a failed handler would lose the donated cache.
#include "trigger_ffi.h"

#include <cstdint>
#include <cstring>
#include <string>

#include "cuda_trigger.h"
#include "trigger_hub.h"
#include "xla/ffi/api/ffi.h"

namespace ffi_transport {
namespace {

namespace ffi = xla::ffi;

ffi::Error trigger(int32_t ordinal, int32_t engine, int32_t layer, ffi::BufferR0<ffi::S32> step,
                   ffi::AnyBuffer x, ffi::AnyBuffer cache, ffi::Result<ffi::AnyBuffer> out) {
  // The alias is a wish, not a promise: where XLA did not follow it, x must be copied.
  if (out->untyped_data() != x.untyped_data()) {
    std::memcpy(out->untyped_data(), x.untyped_data(), x.size_bytes());
  }
  TriggerRegistry::fire(engine, *step.typed_data(), ordinal, layer, cache.untyped_data());
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kTrigger, trigger,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Attr<int32_t>("engine")
                           .Attr<int32_t>("layer")
                           .Arg<ffi::BufferR0<ffi::S32>>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>());

ffi::Error trigger_cuda(void* stream, int32_t ordinal, int32_t engine, int32_t layer,
                        ffi::BufferR0<ffi::S32> step, ffi::AnyBuffer x, ffi::AnyBuffer cache,
                        ffi::Result<ffi::AnyBuffer> out) {
  const auto address = [](const void* memory) { return reinterpret_cast<uint64_t>(memory); };
  CudaTrigger call;
  call.engine = engine;
  call.ordinal = ordinal;
  call.layer = layer;
  call.step = address(step.untyped_data());
  call.x = address(x.untyped_data());
  call.out = address(out->untyped_data());
  call.bytes = x.size_bytes();
  call.cache = cache.untyped_data();
  call.stream = static_cast<cuda::Stream>(stream);
  if (const cuda::Error error = CudaTriggers::enqueue(call); error != cuda::kSuccess) {
    return ffi::Error::Internal("the trigger could not copy x: CUDA error " +
                                std::to_string(error));
  }
  return ffi::Error::Success();
}

// Compatible with command buffers: with the same operands it puts the same copies on the stream, it
// allocates nothing, and it asks the stream nothing. Without the trait XLA would end its graph
// before every layer's call.
XLA_FFI_DEFINE_HANDLER(kTriggerCuda, trigger_cuda,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<void*>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Attr<int32_t>("engine")
                           .Attr<int32_t>("layer")
                           .Arg<ffi::BufferR0<ffi::S32>>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

void* trigger_handler() { return reinterpret_cast<void*>(+kTrigger); }
void* trigger_handler_cuda() { return reinterpret_cast<void*>(+kTriggerCuda); }

}  // namespace ffi_transport
