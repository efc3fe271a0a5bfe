#include "bindings/torch.h"

#include "bindings/dlpack.h"
#include "bindings/tensor.h"

namespace flashmoe {
namespace {

// A module that the caller's tensors have imported. Kept, since finding it costs more than most of
// what is asked of it; not as a static object, which at exit would outlive the interpreter.
nb::handle torch() {
  static PyObject* module = nullptr;
  if (module == nullptr) module = nb::module_::import_("torch").release().ptr();
  return module;
}

nb::handle forward_ad() {
  static PyObject* module = nullptr;
  if (module == nullptr) {
    module = nb::module_::import_("torch.autograd.forward_ad").release().ptr();
  }
  return module;
}

bool is_true(const nb::object& answer) { return answer.ptr() == Py_True; }

nb::object tuple_of(const int64_t* values, int count) {
  nb::object tuple = nb::steal(PyTuple_New(count));
  if (!tuple.is_valid()) nb::raise_python_error();
  for (int i = 0; i < count; ++i) {
    PyTuple_SetItem(tuple.ptr(), i, PyLong_FromLongLong(values[i]));
  }
  return tuple;
}

nb::object element_type(flashmoe_dtype dtype) {
  if (dtype.bits == 32) return torch().attr(dtype.code == dlpack::kInt ? "int32" : "float32");
  return torch().attr(dtype.code == FLASHMOE_DTYPE_BFLOAT ? "bfloat16" : "float16");
}

}  // namespace

bool torch_records_gradients() { return is_true(torch().attr("is_grad_enabled")()); }

Tangent tangent_of(nb::handle tensor) {
  try {
    const nb::object pair = forward_ad().attr("unpack_dual")(tensor);  // (primal, tangent)
    // Outside of forward-mode differentiation the tensor itself, inside a view of it.
    if (PyTuple_GetItem(pair.ptr(), 0) == tensor.ptr()) return Tangent::kOff;
    return PyTuple_GetItem(pair.ptr(), 1) == Py_None ? Tangent::kNone : Tangent::kPresent;
  } catch (nb::python_error& error) {
    // Older versions unpack neither inference tensors nor, inside an operator, any: there are no
    // tangents there.
    if (!error.matches(PyExc_RuntimeError)) throw;
    return Tangent::kNone;
  }
}

bool is_negated(nb::handle tensor) { return is_true(tensor.attr("is_neg")()); }

bool refuses_writes(nb::handle tensor) {
  return is_true(tensor.attr("is_inference")()) &&
         !is_true(torch().attr("is_inference_mode_enabled")());
}

void count_writes(const nb::handle* tensors, size_t count) {
  nb::list written;
  for (size_t i = 0; i < count; ++i) written.append(tensors[i]);
  torch().attr("autograd").attr("graph").attr("increment_version")(written);
}

nb::object torch_empty(nb::handle like, flashmoe_dtype dtype, int rank, const int64_t* shape) {
  int64_t strides[TensorView::kMaxRank];
  uint64_t packed = 1;  // unsigned: it may wrap round where the shape is beyond all memory
  for (int axis = rank - 1; axis >= 0; --axis) {
    strides[axis] = static_cast<int64_t>(packed);
    packed *= static_cast<uint64_t>(shape[axis] > 1 ? shape[axis] : 1);
  }
  // With strides it takes torch two thirds of the time.
  return like.attr("new_empty_strided")(tuple_of(shape, rank), tuple_of(strides, rank),
                                        nb::arg("dtype") = element_type(dtype));
}

nb::object torch_empty_like(nb::handle like) { return torch().attr("empty_like")(like); }

}  // namespace flashmoe
