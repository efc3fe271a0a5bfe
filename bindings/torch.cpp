#include "bindings/torch.h"

#include "bindings/dlpack.h"
#include "bindings/kept.h"
#include "bindings/tensor.h"

namespace flashmoe {
namespace {

Kept is_grad_enabled("torch", "is_grad_enabled");
Kept is_inference_mode_enabled("torch", "is_inference_mode_enabled");
Kept is_autocast_enabled("torch", "is_autocast_enabled");
Kept is_inference("torch", "Tensor.is_inference");
Kept is_neg("torch", "Tensor.is_neg");
Kept unpack_dual("torch.autograd.forward_ad", "unpack_dual");
Kept increment_version("torch", "autograd.graph.increment_version");
Kept new_empty_strided("torch", "Tensor.new_empty_strided");
Kept empty_like("torch", "empty_like");
Kept int32("torch", "int32");
Kept float32("torch", "float32");
Kept float64("torch", "float64");
Kept float16("torch", "float16");
Kept bfloat16("torch", "bfloat16");

bool is_true(const nb::object& answer) { return answer.ptr() == Py_True; }

nb::object tuple_of(const int64_t* values, int count) {
  nb::object tuple = nb::steal(PyTuple_New(count));
  if (!tuple.is_valid()) nb::raise_python_error();
  for (int i = 0; i < count; ++i) {
    PyTuple_SetItem(tuple.ptr(), i, PyLong_FromLongLong(values[i]));
  }
  return tuple;
}

nb::handle element_type(flashmoe_dtype dtype) {
  if (dtype.bits == 64) return float64.get();
  if (dtype.bits == 32) return (dtype.code == dlpack::kInt ? int32 : float32).get();
  return (dtype.code == FLASHMOE_DTYPE_BFLOAT ? bfloat16 : float16).get();
}

}  // namespace

bool torch_records_gradients() { return is_true(is_grad_enabled.get()()); }

bool torch_is_in_inference_mode() { return is_true(is_inference_mode_enabled.get()()); }

bool torch_casts(flashmoe_device device) {
  const bool on_cpu = device.device_type == FLASHMOE_DEVICE_CPU;
  return is_true(is_autocast_enabled.get()(on_cpu ? "cpu" : "cuda"));
}

Tangent tangent_of(nb::handle tensor) {
  try {
    const nb::object pair = unpack_dual.get()(tensor);  // (primal, tangent)
    // Outside forward-mode differentiation unpack_dual returns the tensor itself, inside it a view.
    if (PyTuple_GetItem(pair.ptr(), 0) == tensor.ptr()) return Tangent::kOff;
    return PyTuple_GetItem(pair.ptr(), 1) == Py_None ? Tangent::kNone : Tangent::kPresent;
  } catch (nb::python_error& error) {
    // Older versions cannot unpack inference tensors or, inside an operator, any tensor: there are
    // no tangents there.
    if (!error.matches(PyExc_RuntimeError)) throw;
    return Tangent::kNone;
  }
}

bool is_negated(nb::handle tensor, flashmoe_dtype dtype) {
  // The imaginary part of a conjugate has this bit, and bf16 and integers have no complex numbers.
  return dtype.code == FLASHMOE_DTYPE_FLOAT && is_true(is_neg.get()(tensor));
}

bool refuses_writes(nb::handle tensor) {
  return is_true(is_inference.get()(tensor)) && !torch_is_in_inference_mode();
}

void count_writes(const nb::handle* tensors, size_t count) {
  if (count == 1) {  // faster in torch than a list of one
    increment_version.get()(tensors[0]);
    return;
  }
  nb::list written;
  for (size_t i = 0; i < count; ++i) written.append(tensors[i]);
  increment_version.get()(written);
}

nb::object torch_empty(nb::handle like, const flashmoe_dtype* dtype, int rank,
                       const int64_t* shape) {
  int64_t strides[TensorView::kMaxRank];
  uint64_t packed = 1;  // unsigned: it may wrap around for a shape beyond all memory
  for (int axis = rank - 1; axis >= 0; --axis) {
    strides[axis] = static_cast<int64_t>(packed);
    packed *= static_cast<uint64_t>(shape[axis] > 1 ? shape[axis] : 1);
  }
  // With strides torch takes two thirds of the time.
  const nb::handle make = new_empty_strided.get();
  const nb::object extents = tuple_of(shape, rank);
  const nb::object steps = tuple_of(strides, rank);
  if (dtype == nullptr) return make(like, extents, steps);
  return make(like, extents, steps, nb::arg("dtype") = element_type(*dtype));
}

nb::object torch_empty_like(nb::handle like, const flashmoe_dtype* dtype) {
  if (dtype == nullptr) return empty_like.get()(like);
  return empty_like.get()(like, nb::arg("dtype") = element_type(*dtype));
}

}  // namespace flashmoe
