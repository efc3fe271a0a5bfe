#include "bindings/torch.h"

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <utility>

#include "bindings/dlpack.h"
#include "bindings/tensor.h"

namespace flashmoe {
namespace {

nb::object attribute_or_none(nb::object object, std::initializer_list<const char*> path) {
  for (const char* name : path) object = nb::getattr(object, name, nb::none());
  return object;
}

nb::object tuple_of(const int64_t* values, int count) {
  nb::object tuple = nb::steal(PyTuple_New(count));
  for (int i = 0; i < count; ++i) {
    PyTuple_SetItem(tuple.ptr(), i, PyLong_FromLongLong(values[i]));
  }
  return tuple;
}

// The arguments of allocations as Python tuples, kept from one call to the next: most calls ask for
// what the call before them did. An entry is found by a sum over what is asked for.
class Arguments {
 public:
  nb::object get(nb::handle dtype, int rank, const int64_t* shape, const int64_t* strides) {
    size_t sum = reinterpret_cast<uintptr_t>(dtype.ptr()) / alignof(std::max_align_t);
    for (int axis = 0; axis < rank; ++axis) sum = sum * 31 + static_cast<size_t>(shape[axis]);
    Entry& entry = entries_[sum % kEntries];
    if (!entry.tuple.is_valid() || dtype.ptr() != entry.dtype || rank != entry.rank ||
        !std::equal(shape, shape + rank, entry.shape) ||
        !std::equal(strides, strides + rank, entry.strides)) {
      entry.tuple = nb::make_tuple(tuple_of(shape, rank), tuple_of(strides, rank), dtype);
      entry.dtype = dtype.ptr();
      entry.rank = rank;
      std::copy(shape, shape + rank, entry.shape);
      std::copy(strides, strides + rank, entry.strides);
    }
    return entry.tuple;
  }

 private:
  static constexpr size_t kEntries = 61;  // a prime

  struct Entry {
    nb::object tuple;
    PyObject* dtype = nullptr;
    int rank = 0;
    int64_t shape[TensorView::kMaxRank];
    int64_t strides[TensorView::kMaxRank];
  };

  Entry entries_[kEntries];
};

const nb::object& element_type(const TorchFunctions& torch, flashmoe_dtype dtype) {
  const bool integer = dtype.code == dlpack::kInt || dtype.code == dlpack::kUInt;
  if (dtype.bits == 8) return torch.uint8;
  if (dtype.bits == 32) return integer ? torch.int32 : torch.float32;
  return dtype.code == FLASHMOE_DTYPE_BFLOAT ? torch.bfloat16 : torch.float16;
}

}  // namespace

TorchFunction::TorchFunction(nb::object function, int takes)
    : object_(std::move(function)), takes_(takes) {
  if (PyCFunction_CheckExact(object_.ptr()) && PyCFunction_GetFlags(object_.ptr()) == takes) {
    native_ = PyCFunction_GetFunction(object_.ptr());
    self_ = PyCFunction_GetSelf(object_.ptr());
  }
}

nb::object TorchFunction::operator()(nb::handle argument) const {
  PyObject* made = nullptr;
  if (native_ != nullptr) {
    made = native_(self_, argument.ptr());
  } else if (takes_ == METH_VARARGS) {
    made = PyObject_Call(object_.ptr(), argument.ptr(), nullptr);
  } else {
    // Without an argument, the nullptr ends the list.
    made = PyObject_CallFunctionObjArgs(object_.ptr(), argument.ptr(),
                                        static_cast<PyObject*>(nullptr));
  }
  if (made == nullptr) nb::raise_python_error();
  return nb::steal(made);
}

bool TorchMethod::operator()(nb::handle tensor) const {
  if (!known_) {
    const nb::object bound = method_.attr("__get__")(tensor);
    if (PyCFunction_CheckExact(bound.ptr()) && PyCFunction_GetFlags(bound.ptr()) == METH_NOARGS) {
      native_ = PyCFunction_GetFunction(bound.ptr());
    }
    known_ = true;
  }
  const nb::object answer =
      nb::steal(native_ != nullptr ? native_(tensor.ptr(), nullptr)
                                   : PyObject_CallFunctionObjArgs(method_.ptr(), tensor.ptr(),
                                                                  static_cast<PyObject*>(nullptr)));
  if (!answer.is_valid()) nb::raise_python_error();
  return answer.ptr() == Py_True;
}

const TorchFunctions& torch_functions(const nb::object& torch) {
  // Leaked on purpose: at exit the interpreter is gone before static destructors run.
  static const TorchFunctions* functions = nullptr;
  if (functions == nullptr) {
    nb::object internals = torch.attr("_C");
    functions = new TorchFunctions{
        torch.attr("empty_strided"),
        {torch.attr("is_grad_enabled"), METH_NOARGS},
        torch.attr("float16"),
        torch.attr("bfloat16"),
        torch.attr("float32"),
        torch.attr("int32"),
        torch.attr("uint8"),
        {attribute_or_none(internals, {"_dynamo", "guards", "_empty_strided_cpu"}), METH_VARARGS},
        {attribute_or_none(internals, {"_dynamo", "guards", "_empty_strided_cuda"}), METH_VARARGS},
        attribute_or_none(internals, {"_cuda_getDevice"}),
        attribute_or_none(internals, {"_cuda_getDeviceCount"}),
        attribute_or_none(torch, {"autograd", "forward_ad", "__dict__"}),
        attribute_or_none(torch, {"autograd", "forward_ad", "unpack_dual"}),
        attribute_or_none(internals, {"_is_fwd_grad_enabled"}),
        {attribute_or_none(internals, {"_functorch", "maybe_current_level"}), METH_NOARGS},
        {attribute_or_none(internals, {"_cuda_cudaCachingAllocator_raw_alloc"}), METH_VARARGS},
        {attribute_or_none(internals, {"_cuda_cudaCachingAllocator_raw_delete"}), METH_O},
        TorchMethod(torch.attr("Tensor").attr("is_neg")),
        TorchMethod(torch.attr("Tensor").attr("is_inference")),
        {torch.attr("is_inference_mode_enabled"), METH_NOARGS},
        {nb::getattr(internals, "_increment_version",
                     attribute_or_none(torch, {"autograd", "graph", "increment_version"})),
         METH_O},
    };
  }
  return *functions;
}

bool is_plain_torch_tensor(nb::handle tensor) {
  struct Torch {
    nb::object tensor;
    nb::object parameter;
    TorchFunction count_modes;
    TorchFunction is_compiling;
  };
  static const Torch* torch = nullptr;
  if (torch == nullptr) {
    const nb::object module = nb::module_::import_("torch");
    torch = new Torch{module.attr("Tensor"),
                      module.attr("nn").attr("Parameter"),
                      {module.attr("_C").attr("_len_torch_dispatch_stack"), METH_NOARGS},
                      {module.attr("compiler").attr("is_compiling"), METH_NOARGS}};
  }
  const PyObject* type = tensor.type().ptr();
  if (type != torch->tensor.ptr() && type != torch->parameter.ptr()) return false;
  return PyLong_AsLong(torch->count_modes(nullptr).ptr()) == 0 &&
         torch->is_compiling(nullptr).ptr() == Py_False;
}

bool may_be_for_torch_operators(nb::handle tensor) {
  return torch_transforms(torch_functions(nb::module_::import_("torch"))) ||
         tensor.attr("is_meta").ptr() == Py_True;
}

bool torch_records_gradients(const TorchFunctions& torch) {
  return torch.is_grad_enabled(nullptr).ptr() == Py_True;
}

bool torch_has_tangents(const TorchFunctions& torch) {
  static PyObject* const name = PyUnicode_InternFromString("_current_level");
  static PyObject* const outside = PyLong_FromLong(-1);  // CPython has it once
  PyObject* level = PyDict_GetItemWithError(torch.forward_ad.ptr(), name);
  if (level == outside) return false;
  if (level == nullptr) {
    PyErr_Clear();  // of what is no dictionary
    return false;
  }
  return PyLong_Check(level) && PyLong_AsLong(level) >= 0 &&
         torch.is_forward_ad_enabled().ptr() == Py_True;
}

bool has_tangent(const TorchFunctions& torch, nb::handle tensor) {
  if (torch.is_inference(tensor)) return false;  // which torch does not unpack
  return !torch.unpack_dual(tensor).attr("tangent").is_none();
}

bool refuses_writes(const TorchFunctions& torch, nb::handle tensor) {
  return torch.is_inference(tensor) && torch.is_inference_mode_enabled(nullptr).ptr() != Py_True;
}

void count_writes(const TorchFunctions& torch, const nb::handle* tensors, size_t count) {
  const nb::object tuple = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(count)));
  if (!tuple.is_valid()) nb::raise_python_error();
  for (size_t i = 0; i < count; ++i) {
    PyTuple_SetItem(tuple.ptr(), static_cast<Py_ssize_t>(i),
                    nb::borrow(tensors[i]).release().ptr());
  }
  torch.increment_version(tuple);
}

bool torch_transforms(const TorchFunctions& torch) {
  return torch.transform_level.exists() && !torch.transform_level(nullptr).is_none();
}

nb::object torch_empty(const TorchFunctions& torch, nb::handle like, flashmoe_device device,
                       flashmoe_dtype dtype, int rank, const int64_t* shape,
                       const int64_t* strides) {
  const TorchFunction* quick = nullptr;
  if (device.device_type == FLASHMOE_DEVICE_CPU) quick = &torch.empty_strided_cpu;
  if (device.device_type == FLASHMOE_DEVICE_CUDA &&
      torch_is_on_cuda_device(torch, device.device_id)) {
    quick = &torch.empty_strided_cuda;
  }
  if (quick != nullptr && quick->exists()) {
    static auto* const known = new Arguments();  // under the GIL
    return (*quick)(known->get(element_type(torch, dtype), rank, shape, strides));
  }
  return torch.empty_strided(tuple_of(shape, rank), tuple_of(strides, rank),
                             nb::arg("dtype") = element_type(torch, dtype),
                             nb::arg("device") = like.attr("device"));
}

bool torch_is_on_cuda_device(const TorchFunctions& torch, int32_t device_id) {
  if (torch.current_cuda_device.is_none() || torch.cuda_device_count.is_none()) return false;
  // A tenth of a microsecond each time, but for the many processes that see one device.
  static int32_t devices = 0;  // not known yet; under the GIL
  if (devices == 0) devices = nb::cast<int32_t>(torch.cuda_device_count());
  if (devices == 1) return device_id == 0;
  const nb::object answer = nb::steal(PyObject_CallNoArgs(torch.current_cuda_device.ptr()));
  if (!answer.is_valid()) nb::raise_python_error();
  return nb::cast<int32_t>(answer) == device_id;
}

void* torch_allocate_on_current_cuda_device(const TorchFunctions& torch, size_t bytes,
                                            void* stream) {
  if (!torch.cuda_allocate.exists() || !torch.cuda_free.exists()) return nullptr;
  const nb::object size = nb::steal(PyLong_FromSize_t(bytes));
  const nb::object handle = nb::steal(PyLong_FromVoidPtr(stream));
  if (!size.is_valid() || !handle.is_valid()) nb::raise_python_error();
  const nb::object arguments = nb::steal(PyTuple_Pack(2, size.ptr(), handle.ptr()));
  if (!arguments.is_valid()) nb::raise_python_error();
  return PyLong_AsVoidPtr(torch.cuda_allocate(arguments).ptr());
}

void torch_free_cuda(const TorchFunctions& torch, void* data) noexcept {
  try {
    const nb::object address = nb::steal(PyLong_FromVoidPtr(data));
    if (!address.is_valid()) nb::raise_python_error();
    torch.cuda_free(address);
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("flashmoe_science: giving memory back to torch");
  }
}

}  // namespace flashmoe
