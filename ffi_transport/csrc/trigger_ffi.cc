// The XLA FFI call (step, x, cache_l) -> x that a jitted step makes after each layer. It hands
// (step, ordinal, layer) to the engine and returns: it never waits and never returns an error,
// because a failed handler would lose the donated cache.
#include "trigger_ffi.h"

#include <cstdint>
#include <cstring>

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

}  // namespace

void* trigger_handler() { return reinterpret_cast<void*>(+kTrigger); }

}  // namespace ffi_transport
