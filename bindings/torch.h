// New torch tensors, by torch's own functions rather than its exchange allocator: a tensor of the
// latter holds foreign storage, for which Tensor.record_stream silently does nothing.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "flashmoe/flashmoe.h"

namespace flashmoe {

namespace nb = nanobind;

// A function of torch that every call makes use of: where it is native code, without what Python does
// before it enters such.
class TorchFunction {
 public:
  TorchFunction() = default;
  // `takes` is METH_NOARGS, METH_O or METH_VARARGS.
  TorchFunction(nb::object function, int takes);

  bool exists() const { return !object_.is_none(); }
  // `argument` is nullptr, the argument, or the tuple of arguments, as the function takes it.
  nb::object operator()(nb::handle argument) const;

 private:
  nb::object object_ = nb::none();
  int takes_ = 0;
  PyCFunction native_ = nullptr;
  PyObject* self_ = nullptr;
};

// A method without arguments of torch's tensors that answers yes or no, in the same way.
class TorchMethod {
 public:
  // `method` is what torch.Tensor has under its name.
  explicit TorchMethod(nb::object method) : method_(std::move(method)) {}

  bool operator()(nb::handle tensor) const;

 private:
  nb::object method_;
  mutable bool known_ = false;  // whether it is native
  mutable PyCFunction native_ = nullptr;
};

// What is used of torch, looked up once.
struct TorchFunctions {
  nb::object empty_strided;
  TorchFunction is_grad_enabled;
  nb::object float16;
  nb::object bfloat16;
  nb::object float32;
  nb::object int32;
  nb::object uint8;
  // The allocations that torch.compile's generated code calls, of CUDA on the current device: they go
  // round torch's dispatcher. These and those below do not exist where a torch does not have them.
  TorchFunction empty_strided_cpu;
  TorchFunction empty_strided_cuda;
  nb::object current_cuda_device;
  nb::object cuda_device_count;
  // Of torch.autograd.forward_ad: its names, and what splits a dual number into value and tangent.
  nb::object forward_ad;
  nb::object unpack_dual;
  nb::object is_forward_ad_enabled;
  // The depth of torch.func's transforms, None outside of any.
  TorchFunction transform_level;
  // The caching allocator itself, what torch.cuda.caching_allocator_alloc calls: memory without a
  // tensor costs half of one.
  TorchFunction cuda_allocate;
  TorchFunction cuda_free;
  TorchMethod is_neg;
  TorchMethod is_inference;
  TorchFunction is_inference_mode_enabled;
  TorchFunction increment_version;  // of a tuple of tensors
};

const TorchFunctions& torch_functions(const nb::object& torch);

// Whether `tensor` is one of torch with memory that the exchange API shows, in a plain call: torch is
// not tracing it, and no mode looks at what is called.
bool is_plain_torch_tensor(nb::handle tensor);

// Whether `tensor`, of such a call, may be one of the operators all the same: it is on the meta device,
// or a transform of torch.func is at work. Asked where the call has failed, which with tensors that
// have no memory it does.
bool may_be_for_torch_operators(nb::handle tensor);

// Whether grad mode is on.
bool torch_records_gradients(const TorchFunctions& torch);

// Whether there may be tensors with tangents: forward-mode differentiation is at work.
bool torch_has_tangents(const TorchFunctions& torch);
bool has_tangent(const TorchFunctions& torch, nb::handle tensor);

// Whether torch allows no write to `tensor` now: it was made in inference mode, which is off.
bool refuses_writes(const TorchFunctions& torch, nb::handle tensor);

// Tells torch's autograd that `tensors` have been written to, as its own in-place operations do: a
// backward pass that has saved one of them then fails, where it would use the new values.
void count_writes(const TorchFunctions& torch, const nb::handle* tensors, size_t count);

// Whether a transform of torch.func is at work.
bool torch_transforms(const TorchFunctions& torch);

// New memory of torch of fp16, bf16, fp32, int32 or uint8, on `device`, which is that of the tensor
// `like`. `strides` in elements.
nb::object torch_empty(const TorchFunctions& torch, nb::handle like, flashmoe_device device,
                       flashmoe_dtype dtype, int rank, const int64_t* shape,
                       const int64_t* strides);

// Whether a CUDA device is the current one of this thread.
bool torch_is_on_cuda_device(const TorchFunctions& torch, int32_t device_id);

// Memory of torch's caching allocator on the current CUDA device, for work on `stream`, of which what
// is given back serves later work at once. nullptr where this torch has no such functions.
void* torch_allocate_on_current_cuda_device(const TorchFunctions& torch, size_t bytes,
                                            void* stream);
void torch_free_cuda(const TorchFunctions& torch, void* data) noexcept;

}  // namespace flashmoe
