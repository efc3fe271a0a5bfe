// What is asked of torch, through its public Python functions.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

#include "flashmoe/flashmoe.h"

namespace flashmoe {

namespace nb = nanobind;

// Whether grad mode is on, and inference mode, in which there are no tangents either.
bool torch_records_gradients();
bool torch_is_in_inference_mode();

// Whether torch.autocast is on for a device.
bool torch_casts(flashmoe_device device);

// What forward-mode differentiation says of a tensor. kOff: it is not at work at all.
enum class Tangent { kOff, kNone, kPresent };
Tangent tangent_of(nb::handle tensor);

// Whether the negative bit of a tensor of this dtype is set: what is in memory then has the other
// sign.
bool is_negated(nb::handle tensor, flashmoe_dtype dtype);

// Whether torch allows no write to `tensor` now: it was made in inference mode, which is off.
bool refuses_writes(nb::handle tensor);

// Tells torch's autograd that `tensors` have been written to, as its own in-place operations do: a
// backward pass that has saved one of them then fails, where it would use the new values.
void count_writes(const nb::handle* tensors, size_t count);

// New tensors: a contiguous one on the device of `like`, and one with the shape and order in memory
// of `like`. The dtype is fp16, bf16, fp32 or int32; nullptr takes the dtype of `like` and less
// time. Torch's own functions make them: a tensor of its exchange allocator holds foreign storage,
// for which Tensor.record_stream silently does nothing.
nb::object torch_empty(nb::handle like, const flashmoe_dtype* dtype, int rank,
                       const int64_t* shape);
nb::object torch_empty_like(nb::handle like, const flashmoe_dtype* dtype = nullptr);

}  // namespace flashmoe
