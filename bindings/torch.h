// Queries to torch through its public Python functions.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

#include "flashmoe/flashmoe.h"

namespace flashmoe {

namespace nb = nanobind;

// Whether grad mode is on, and whether inference mode is on, which has no tangents either.
bool torch_records_gradients();
bool torch_is_in_inference_mode();

// Whether torch.autocast is on for a device.
bool torch_casts(flashmoe_device device);

// A tensor's state in forward-mode differentiation. kOff: the mode is off.
enum class Tangent { kOff, kNone, kPresent };
Tangent tangent_of(nb::handle tensor);

// Whether the negative bit of a tensor of this dtype is set: its memory then holds the opposite
// sign.
bool is_negated(nb::handle tensor, flashmoe_dtype dtype);

// Whether torch forbids writes to `tensor` now: it was made in inference mode, which is off.
bool refuses_writes(nb::handle tensor);

// Tells torch's autograd that `tensors` have been written to, as its own in-place operations do. A
// backward pass that saved one of them then fails instead of using the new values.
void count_writes(const nb::handle* tensors, size_t count);

// New tensors: a contiguous one on the device of `like`, and one with the shape and memory order of
// `like`. The dtype is fp16, bf16, fp32 or int32; nullptr uses the dtype of `like` and is faster.
// Torch's own functions make them, because Tensor.record_stream silently does nothing for the
// foreign storage of its exchange allocator.
nb::object torch_empty(nb::handle like, const flashmoe_dtype* dtype, int rank,
                       const int64_t* shape);
nb::object torch_empty_like(nb::handle like, const flashmoe_dtype* dtype = nullptr);

}  // namespace flashmoe
