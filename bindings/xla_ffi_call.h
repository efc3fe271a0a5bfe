// One call by XLA: what a handler reads from its frame, and how it answers. XLA owns every buffer
// and, on CUDA, the stream and the workspace. Handlers run without the GIL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "bindings/workspace.h"
#include "bindings/xla_ffi_abi.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe::xla {

inline constexpr size_t kWorkspaceAlignment = 256;
inline constexpr size_t kAnyAlignment = 1;  // XLA refuses requests for the alignment that kernels
                                            // need

Error* fail(const CallFrame& frame, ErrorCode code, const char* message);

// Fails with the library's sentence about the call that just failed on this thread.
Error* fail(const CallFrame& frame, flashmoe_status status);

// Fails for a frame that Python did not make.
Error* fail_foreign(const CallFrame& frame);

// A buffer as the library takes it. For other element types it is one that the library refuses.
flashmoe_tensor view(const void* buffer, flashmoe_device device);

// Whether all arguments are buffers, like all results.
bool has_buffers_alone(const CallFrame& frame);

// Reads an attribute, which the Python side always passes with exactly this type; false if absent.
bool read(const Attributes& attributes, const char* name, std::string* value);

// Rounds an address up to where a workspace may begin.
void* aligned(void* memory);

// A result of the program that serves as workspace.
struct Workspace {
  void* data;
  size_t bytes;
};

// Removes the workspace, the last result, from the results and their names. Does nothing without
// one.
Workspace take_workspace(std::string* outputs, Values* results);

// Runs an operation of the C ABI on XLA's stream. The workspace is `given`, else XLA's allocation
// for this call; on the CPU it is host memory.
template <class Params>
Error* run(const CallFrame& frame, flashmoe_device device, const Workspace& given,
           flashmoe_status (*workspace_size)(const Params*, size_t*),
           flashmoe_status (*operation)(const Params*, void*, size_t, void*),
           const Params& params) {
  if (device.device_type != FLASHMOE_DEVICE_CUDA) {
    const flashmoe_status status = run_on_host(workspace_size, operation, params);
    return status == FLASHMOE_OK ? nullptr : fail(frame, status);
  }
  GetStreamArguments stream = {sizeof stream, nullptr, frame.context, nullptr};
  if (Error* error = frame.api->get_stream(&stream)) return error;
  if (given.data != nullptr) {
    const flashmoe_status status = operation(&params, given.data, given.bytes, stream.stream);
    if (status == FLASHMOE_OK) return nullptr;
    // A program compiled for another GPU may have too little workspace.
    if (status != FLASHMOE_ERROR_WORKSPACE_TOO_SMALL) return fail(frame, status);
  }
  size_t bytes = 0;
  flashmoe_status status = workspace_size(&params, &bytes);
  if (status != FLASHMOE_OK) return fail(frame, status);
  const size_t most = bytes > 0 ? bytes + kWorkspaceAlignment - kAnyAlignment : 0;
  AllocateArguments memory = {sizeof memory, nullptr, frame.context, most, kAnyAlignment, nullptr};
  if (most > 0) {
    if (Error* error = frame.api->allocate(&memory)) return error;
  }
  void* const workspace = most > 0 ? aligned(memory.data) : nullptr;
  status = operation(&params, workspace, bytes, stream.stream);
  Error* const failure = status == FLASHMOE_OK ? nullptr : fail(frame, status);
  if (most > 0) {  // freed in stream order: after the launch that uses it
    FreeArguments release = {sizeof release, nullptr, frame.context, most, memory.data};
    if (Error* error = frame.api->free(&release)) {
      if (failure == nullptr) return error;
      DestroyErrorArguments destroy = {sizeof destroy, nullptr, error};
      frame.api->destroy_error(&destroy);
    }
  }
  return failure;
}

// Fills the metadata if XLA asked for them, and returns whether it did.
bool answer_metadata(const CallFrame& frame, uint32_t traits);

// The CUDA device of a call.
Error* device_of(const CallFrame& frame, flashmoe_device* device);

// The handlers of an operation, a function of a frame and a device.
template <Error* (*kOperation)(const CallFrame&, flashmoe_device)>
Error* handle_on_cpu(CallFrame* frame) {
  if (answer_metadata(*frame, 0)) return nullptr;
  return kOperation(*frame, {FLASHMOE_DEVICE_CPU, 0});
}

template <Error* (*kOperation)(const CallFrame&, flashmoe_device)>
Error* handle_on_cuda(CallFrame* frame) {
  if (answer_metadata(*frame, kCommandBufferCompatible)) return nullptr;
  flashmoe_device device;
  if (Error* error = device_of(*frame, &device)) return error;
  return kOperation(*frame, device);
}

}  // namespace flashmoe::xla
