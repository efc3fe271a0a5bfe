#include "bindings/xla_ffi_call.h"

#include <algorithm>
#include <cstring>

#include "bindings/dlpack.h"

namespace flashmoe::xla {
namespace {

ErrorCode error_code(flashmoe_status status) {
  switch (status) {
    case FLASHMOE_ERROR_INVALID_ARGUMENT: return kInvalidArgument;
    case FLASHMOE_ERROR_UNSUPPORTED: return kUnimplemented;
    case FLASHMOE_ERROR_ARCH_NOT_BUILT:
    case FLASHMOE_ERROR_NO_DEVICE: return kFailedPrecondition;
    case FLASHMOE_ERROR_WORKSPACE_TOO_SMALL:
    case FLASHMOE_ERROR_OUT_OF_MEMORY: return kResourceExhausted;
    default: return kInternal;
  }
}

flashmoe_dtype dtype_of(int32_t type) {
  switch (type) {
    case kFloat32: return {FLASHMOE_DTYPE_FLOAT, 32, 1};
    case kFloat64: return {FLASHMOE_DTYPE_FLOAT, 64, 1};
    case kFloat16: return {FLASHMOE_DTYPE_FLOAT, 16, 1};
    case kFloat8E4M3Fn: return {FLASHMOE_DTYPE_FLOAT8_E4M3FN, 8, 1};
    case kBFloat16: return {FLASHMOE_DTYPE_BFLOAT, 16, 1};
    case kInt32: return {dlpack::kInt, 32, 1};
    case kInt64: return {dlpack::kInt, 64, 1};
    case kPred: return {FLASHMOE_DTYPE_BOOL, 8, 1};
    case kUInt8: return {dlpack::kUInt, 8, 1};
    default: return {255, 0, 1};  // refused by the library
  }
}

// The attribute of that name and kind, or nullptr.
const void* find(const Attributes& attributes, const char* name, AttributeType type) {
  for (int64_t i = 0; i < attributes.size; ++i) {
    const Text& key = *attributes.names[i];
    if (attributes.types[i] == type && key.size == std::strlen(name) &&
        std::memcmp(key.data, name, key.size) == 0) {
      return attributes.values[i];
    }
  }
  return nullptr;
}

}  // namespace

Error* fail(const CallFrame& frame, ErrorCode code, const char* message) {
  CreateErrorArguments arguments = {sizeof arguments, nullptr, message, code};
  return frame.api->create_error(&arguments);
}

Error* fail(const CallFrame& frame, flashmoe_status status) {
  return fail(frame, error_code(status), flashmoe_last_error());
}

Error* fail_foreign(const CallFrame& frame) {
  return fail(
      frame, kInvalidArgument,
      "flashmoe: call this target through flashmoe_science, whose functions take JAX arrays");
}

flashmoe_tensor view(const void* buffer, flashmoe_device device) {
  const auto& given = *static_cast<const Buffer*>(buffer);
  return {given.data, device, static_cast<int32_t>(given.rank), dtype_of(given.dtype), given.dims,
          nullptr,    0};
}

bool has_buffers_alone(const CallFrame& frame) {
  const Values& given = frame.arguments;
  return std::all_of(given.types, given.types + given.size,
                     [](int32_t type) { return type == kBufferArgument; });
}

bool read(const Attributes& attributes, const char* name, std::string* value) {
  const auto* text = static_cast<const Text*>(find(attributes, name, kStringAttribute));
  if (text == nullptr) return false;
  value->assign(text->data, text->size);
  return true;
}

void* aligned(void* memory) {
  const uintptr_t end = reinterpret_cast<uintptr_t>(memory) + kWorkspaceAlignment - 1;
  return reinterpret_cast<void*>(end / kWorkspaceAlignment * kWorkspaceAlignment);
}

Workspace take_workspace(std::string* outputs, Values* results) {
  constexpr char kName[] = "workspace ";
  constexpr size_t kLength = sizeof kName - 1;
  if (results->size == 0 || outputs->size() < kLength) return {nullptr, 0};
  const size_t begin = outputs->size() - kLength;
  if (outputs->compare(begin, kLength, kName) != 0) return {nullptr, 0};
  const auto& buffer = *static_cast<const Buffer*>(results->values[results->size - 1]);
  if (buffer.dtype != kUInt8 || buffer.rank != 1) return {nullptr, 0};
  outputs->resize(begin);
  --results->size;
  char* const data = static_cast<char*>(aligned(buffer.data));
  const auto skipped = data - static_cast<char*>(buffer.data);
  if (buffer.dims[0] <= skipped) return {nullptr, 0};
  return {data, static_cast<size_t>(buffer.dims[0] - skipped)};
}

bool answer_metadata(const CallFrame& frame, uint32_t traits) {
  if (frame.extensions == nullptr || frame.extensions->type != kMetadataExtension) return false;
  Metadata& metadata = *reinterpret_cast<MetadataExtension*>(frame.extensions)->metadata;
  metadata.api_version = {sizeof(ApiVersion), nullptr, kApiMajor, kApiMinor};
  metadata.traits = traits;
  return true;
}

Error* device_of(const CallFrame& frame, flashmoe_device* device) {
  constexpr size_t kNeeded = offsetof(Api, get_device_ordinal) + sizeof(void*);
  if (frame.api->struct_size < kNeeded) {
    return fail(frame, kUnimplemented,
                "flashmoe: this jaxlib does not tell handlers their device; use a newer one");
  }
  GetDeviceOrdinalArguments arguments = {sizeof arguments, nullptr, frame.context, 0};
  if (Error* error = frame.api->get_device_ordinal(&arguments)) return error;
  *device = {FLASHMOE_DEVICE_CUDA, arguments.device_ordinal};
  return nullptr;
}

}  // namespace flashmoe::xla
