// Calls an XLA FFI handler of the trigger's kind as XLA does, for tests in Python: XLA itself calls
// the one for CUDA only on a GPU. Built with the FFI headers of the installed jaxlib.
#include <array>
#include <cstdint>
#include <cstring>
#include <string>

#include "xla/ffi/api/c_api.h"

namespace {

struct Context {
  void* stream;
  int32_t ordinal;
};

thread_local std::string t_error;

Context* as_context(XLA_FFI_InvokeContext* context) { return reinterpret_cast<Context*>(context); }

XLA_FFI_Api make_api() {
  XLA_FFI_Api api{};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
  api.api_version.major_version = XLA_FFI_API_MAJOR;
  api.api_version.minor_version = XLA_FFI_API_MINOR;
  api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
    t_error = args->message;
    return reinterpret_cast<XLA_FFI_Error*>(&t_error);
  };
  api.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) -> XLA_FFI_Error* {
    args->stream = as_context(args->ctx)->stream;
    return nullptr;
  };
  api.XLA_FFI_DeviceOrdinal_Get = [](XLA_FFI_DeviceOrdinal_Get_Args* args) -> XLA_FFI_Error* {
    args->device_ordinal = as_context(args->ctx)->ordinal;
    return nullptr;
  };
  return api;
}

XLA_FFI_CallFrame make_frame(const XLA_FFI_Api* api) {
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = api;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args.struct_size = XLA_FFI_Args_STRUCT_SIZE;
  frame.rets.struct_size = XLA_FFI_Rets_STRUCT_SIZE;
  frame.attrs.struct_size = XLA_FFI_Attrs_STRUCT_SIZE;
  return frame;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// The error of this thread's last call that failed.
EXPORT const char* ffi_caller_error() { return t_error.c_str(); }

// The traits that the handler declares, or -1.
EXPORT int ffi_caller_traits(void* handler) {
  const XLA_FFI_Api api = make_api();
  XLA_FFI_CallFrame frame = make_frame(&api);
  XLA_FFI_Metadata metadata{};
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  metadata.api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension extension{};
  extension.extension_base.struct_size = XLA_FFI_Metadata_Extension_STRUCT_SIZE;
  extension.extension_base.type = XLA_FFI_Extension_Metadata;
  extension.metadata = &metadata;
  frame.extension_start = &extension.extension_base;
  const auto error = reinterpret_cast<XLA_FFI_Handler*>(handler)(&frame);
  return error == nullptr ? static_cast<int>(metadata.traits) : -1;
}

// trigger(step, x, cache) -> out with vectors of `count` floats; 0, or -1 with an error.
EXPORT int ffi_caller_trigger(void* handler, void* stream, int32_t ordinal, int32_t engine,
                              int32_t layer, void* step, void* x, void* cache, void* out,
                              int64_t count) {
  const XLA_FFI_Api api = make_api();
  XLA_FFI_CallFrame frame = make_frame(&api);
  Context context{stream, ordinal};
  frame.ctx = reinterpret_cast<XLA_FFI_InvokeContext*>(&context);

  const auto buffer = [&](void* data, XLA_FFI_DataType type, int64_t rank) {
    XLA_FFI_Buffer made{};
    made.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    made.dtype = type;
    made.data = data;
    made.rank = rank;
    made.dims = &count;
    return made;
  };
  std::array<XLA_FFI_Buffer, 4> buffers = {
      buffer(step, XLA_FFI_DataType_S32, 0), buffer(x, XLA_FFI_DataType_F32, 1),
      buffer(cache, XLA_FFI_DataType_F32, 1), buffer(out, XLA_FFI_DataType_F32, 1)};
  std::array<XLA_FFI_ArgType, 3> kinds;
  kinds.fill(XLA_FFI_ArgType_BUFFER);
  std::array<void*, 3> arguments = {&buffers[0], &buffers[1], &buffers[2]};
  XLA_FFI_RetType result_kind = XLA_FFI_RetType_BUFFER;
  void* result = &buffers[3];
  frame.args.size = 3;
  frame.args.types = kinds.data();
  frame.args.args = arguments.data();
  frame.rets.size = 1;
  frame.rets.types = &result_kind;
  frame.rets.rets = &result;

  // Sorted by name, as XLA has them.
  std::array<XLA_FFI_ByteSpan, 2> names = {XLA_FFI_ByteSpan{"engine", 6},
                                           XLA_FFI_ByteSpan{"layer", 5}};
  std::array<XLA_FFI_Scalar, 2> scalars = {};
  std::array<int32_t, 2> values = {engine, layer};
  std::array<XLA_FFI_AttrType, 2> attribute_kinds;
  attribute_kinds.fill(XLA_FFI_AttrType_SCALAR);
  std::array<XLA_FFI_ByteSpan*, 2> name_pointers = {&names[0], &names[1]};
  std::array<void*, 2> attributes = {&scalars[0], &scalars[1]};
  for (size_t i = 0; i < scalars.size(); ++i) {
    scalars[i].dtype = XLA_FFI_DataType_S32;
    scalars[i].value = &values[i];
  }
  frame.attrs.size = 2;
  frame.attrs.types = attribute_kinds.data();
  frame.attrs.names = name_pointers.data();
  frame.attrs.attrs = attributes.data();
  return reinterpret_cast<XLA_FFI_Handler*>(handler)(&frame) == nullptr ? 0 : -1;
}
