// The attention call as an XLA custom call:
//
//   (q, k, v) -> out  or  (q, k, v) -> (out, lse)
//   attributes: causal, layout (int32, the C ABI's enums), scale, softcap (float32, 0 = default),
//               window (int32, the C ABI's bits), window_left, window_right (int64), kernel
//
// XLA owns every buffer and, on CUDA, the stream and the workspace.
#include "bindings/xla_ffi.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "bindings/fields.h"
#include "bindings/workspace.h"
#include "bindings/xla_ffi_abi.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {
namespace {

namespace nb = nanobind;

constexpr size_t kWorkspaceAlignment = 256;

xla::Error* fail(const xla::CallFrame& frame, xla::ErrorCode code, const char* message) {
  xla::CreateErrorArguments arguments = {sizeof arguments, nullptr, message, code};
  return frame.api->create_error(&arguments);
}

xla::ErrorCode error_code(flashmoe_status status) {
  switch (status) {
    case FLASHMOE_ERROR_INVALID_ARGUMENT: return xla::kInvalidArgument;
    case FLASHMOE_ERROR_UNSUPPORTED: return xla::kUnimplemented;
    case FLASHMOE_ERROR_ARCH_NOT_BUILT:
    case FLASHMOE_ERROR_NO_DEVICE: return xla::kFailedPrecondition;
    case FLASHMOE_ERROR_WORKSPACE_TOO_SMALL:
    case FLASHMOE_ERROR_OUT_OF_MEMORY: return xla::kResourceExhausted;
    default: return xla::kInternal;
  }
}

xla::Error* fail(const xla::CallFrame& frame, flashmoe_status status) {
  return fail(frame, error_code(status), flashmoe_last_error());
}

// Whether XLA asked for metadata; if so they are filled.
bool answer_metadata(const xla::CallFrame& frame, uint32_t traits) {
  if (frame.extensions == nullptr || frame.extensions->type != xla::kMetadataExtension)
    return false;
  xla::Metadata& metadata = *reinterpret_cast<xla::MetadataExtension*>(frame.extensions)->metadata;
  metadata.api_version = {sizeof(xla::ApiVersion), nullptr, xla::kApiMajor, xla::kApiMinor};
  metadata.traits = traits;
  return true;
}

flashmoe_dtype dtype_of(int32_t type) {
  switch (type) {
    case xla::kFloat32: return {FLASHMOE_DTYPE_FLOAT, 32, 1};
    case xla::kFloat16: return {FLASHMOE_DTYPE_FLOAT, 16, 1};
    case xla::kBFloat16: return {FLASHMOE_DTYPE_BFLOAT, 16, 1};
    default: return {255, 0, 1};  // refused by the library
  }
}

flashmoe_tensor view(const void* value, flashmoe_device device) {
  const auto& buffer = *static_cast<const xla::Buffer*>(value);
  return {
      buffer.data, device, static_cast<int32_t>(buffer.rank), dtype_of(buffer.dtype), buffer.dims,
      nullptr,     0};
}

// Value of one scalar attribute, which the Python side always passes with this very type.
template <typename T>
bool read_scalar(const xla::Attributes& attributes, const char* name, xla::DataType dtype,
                 T* value) {
  for (int64_t i = 0; i < attributes.size; ++i) {
    const xla::Text& key = *attributes.names[i];
    if (attributes.types[i] != xla::kScalarAttribute || key.size != std::strlen(name) ||
        std::memcmp(key.data, name, key.size) != 0) {
      continue;
    }
    const auto& scalar = *static_cast<const xla::Scalar*>(attributes.values[i]);
    if (scalar.dtype != dtype) return false;
    std::memcpy(value, scalar.value, sizeof *value);
    return true;
  }
  return false;
}

bool read_kernel(const xla::Attributes& attributes, std::string* kernel) {
  for (int64_t i = 0; i < attributes.size; ++i) {
    const xla::Text& key = *attributes.names[i];
    if (attributes.types[i] == xla::kStringAttribute && key.size == std::strlen("kernel") &&
        std::memcmp(key.data, "kernel", key.size) == 0) {
      const auto& text = *static_cast<const xla::Text*>(attributes.values[i]);
      kernel->assign(text.data, text.size);
      return true;
    }
  }
  return false;
}

// Runs the call on XLA's stream, with XLA's memory as the workspace.
xla::Error* forward_on_stream(const xla::CallFrame& frame,
                              const flashmoe_attention_forward_params& params) {
  xla::GetStreamArguments stream = {sizeof stream, nullptr, frame.context, nullptr};
  if (xla::Error* error = frame.api->get_stream(&stream)) return error;
  size_t bytes = 0;
  flashmoe_status status = flashmoe_attention_forward_workspace_size(&params, &bytes);
  if (status != FLASHMOE_OK) return fail(frame, status);
  xla::AllocateArguments memory = {sizeof memory,       nullptr, frame.context, bytes,
                                   kWorkspaceAlignment, nullptr};
  if (bytes > 0) {
    if (xla::Error* error = frame.api->allocate(&memory)) return error;
  }
  status = flashmoe_attention_forward(&params, memory.data, bytes, stream.stream);
  if (bytes > 0) {  // in the order of the stream: after the launch that uses it
    xla::FreeArguments release = {sizeof release, nullptr, frame.context, bytes, memory.data};
    if (xla::Error* error = frame.api->free(&release)) return error;
  }
  return status == FLASHMOE_OK ? nullptr : fail(frame, status);
}

xla::Error* device_of(const xla::CallFrame& frame, flashmoe_device* device) {
  constexpr size_t kNeeded = offsetof(xla::Api, get_device_ordinal) + sizeof(void*);
  if (frame.api->struct_size < kNeeded) {
    return fail(frame, xla::kUnimplemented,
                "flashmoe: this jaxlib does not tell handlers their device; use a newer one");
  }
  xla::GetDeviceOrdinalArguments arguments = {sizeof arguments, nullptr, frame.context, 0};
  if (xla::Error* error = frame.api->get_device_ordinal(&arguments)) return error;
  *device = {FLASHMOE_DEVICE_CUDA, arguments.device_ordinal};
  return nullptr;
}

xla::Error* attention_forward(const xla::CallFrame& frame, flashmoe_device device) {
  const xla::Values& inputs = frame.arguments;
  const xla::Values& outputs = frame.results;
  flashmoe_attention_forward_params params = flashmoe_attention_forward_params_init();
  std::string kernel;
  const bool buffers = inputs.size == 3 && (outputs.size == 1 || outputs.size == 2) &&
                       std::all_of(inputs.types, inputs.types + inputs.size,
                                   [](int32_t type) { return type == xla::kBufferArgument; });
  if (!buffers || !read_scalar(frame.attributes, "causal", xla::kInt32, &params.causal) ||
      !read_scalar(frame.attributes, "layout", xla::kInt32, &params.layout) ||
      !read_scalar(frame.attributes, "scale", xla::kFloat32, &params.scale) ||
      !read_scalar(frame.attributes, "softcap", xla::kFloat32, &params.softcap) ||
      !read_scalar(frame.attributes, "window", xla::kInt32, &params.window) ||
      !read_scalar(frame.attributes, "window_left", xla::kInt64, &params.window_left) ||
      !read_scalar(frame.attributes, "window_right", xla::kInt64, &params.window_right) ||
      !read_kernel(frame.attributes, &kernel)) {
    return fail(frame, xla::kInvalidArgument,
                "flashmoe: call this target through flashmoe_science.flash_attention");
  }
  const flashmoe_tensor q = view(inputs.values[0], device);
  const flashmoe_tensor k = view(inputs.values[1], device);
  const flashmoe_tensor v = view(inputs.values[2], device);
  const flashmoe_tensor out = view(outputs.values[0], device);
  flashmoe_tensor lse = {};
  params.q = &q;
  params.k = &k;
  params.v = &v;
  params.out = &out;
  if (outputs.size == 2) {
    lse = view(outputs.values[1], device);
    params.lse = &lse;
  }
  params.kernel = kernel.empty() ? nullptr : kernel.c_str();
  if (device.device_type == FLASHMOE_DEVICE_CUDA) return forward_on_stream(frame, params);
  const flashmoe_status status = forward_on_host(params);
  return status == FLASHMOE_OK ? nullptr : fail(frame, status);
}

extern "C" xla::Error* flashmoe_xla_attention_forward_cpu(xla::CallFrame* frame) {
  if (answer_metadata(*frame, 0)) return nullptr;
  return attention_forward(*frame, {FLASHMOE_DEVICE_CPU, 0});
}

extern "C" xla::Error* flashmoe_xla_attention_forward_cuda(xla::CallFrame* frame) {
  if (answer_metadata(*frame, xla::kCommandBufferCompatible)) return nullptr;
  flashmoe_device device;
  if (xla::Error* error = device_of(*frame, &device)) return error;
  return attention_forward(*frame, device);
}

Fields xla_ffi_handlers() {
  const auto capsule = [](auto* handler) {
    return nb::capsule(reinterpret_cast<const void*>(handler));
  };
  Fields handlers;
  handlers["cpu"] = capsule(&flashmoe_xla_attention_forward_cpu);
  handlers["CUDA"] = capsule(&flashmoe_xla_attention_forward_cuda);
  return handlers;
}

}  // namespace

void define_xla_ffi(nb::module_& module) {
  module.def("xla_ffi_handlers", &xla_ffi_handlers,
             "XLA FFI handlers of attention by platform, for jax.ffi.register_ffi_target.");
}

}  // namespace flashmoe
