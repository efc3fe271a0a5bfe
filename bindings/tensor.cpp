#include "bindings/tensor.h"

#include <cstring>
#include <string>
#include <unordered_map>

#include "bindings/errors.h"

namespace flashmoe {
namespace {

constexpr struct {
  const char* name;
  const char* seen_as;
  flashmoe_dtype dtype;
} kForeignDtypes[] = {
    {"bfloat16", "uint16", {FLASHMOE_DTYPE_BFLOAT, 16, 1}},
    {"float8_e4m3fn", "uint8", {FLASHMOE_DTYPE_FLOAT8_E4M3FN, 8, 1}},
};

const dlpack::ExchangeApi* exchange_api(nb::handle type) {
  nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
  if (!PyCapsule_CheckExact(capsule.ptr())) return nullptr;
  void* pointer = PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
  if (pointer == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  auto* header = static_cast<dlpack::ExchangeHeader*>(pointer);
  while (header != nullptr && header->version.major != dlpack::kMajorVersion) {
    header = header->previous;
  }
  auto* api = reinterpret_cast<const dlpack::ExchangeApi*>(header);
  if (api == nullptr || (api->view_of_object == nullptr && api->managed_from_object == nullptr)) {
    return nullptr;
  }
  return api;
}

// The module, if it has been imported.
nb::object loaded_module(const char* name) {
  return nb::borrow(nb::module_::import_("sys").attr("modules")).attr("get")(name);
}

// That module, if it has been imported and `type` is its tensor class, which has that name; else no
// object.
nb::object module_of_tensors(const char* name, nb::handle type, const char* tensors = "Tensor") {
  const nb::object module = loaded_module(name);
  if (module.is_none()) return {};
  const nb::object tensor = nb::getattr(module, tensors, nb::none());
  const bool of_it =
      PyType_Check(tensor.ptr()) && PyObject_IsSubclass(type.ptr(), tensor.ptr()) == 1;
  return of_it ? module : nb::object();
}

TensorType describe_type(nb::handle type, const dlpack::ExchangeApi* api) {
  TensorType made{nb::borrow(type), false, api, false, false, nullptr, {}};
  made.is_masked = module_of_tensors("numpy.ma", type, "MaskedArray").is_valid();
  if (api == nullptr) return made;
  made.has_requires_grad = nb::hasattr(type, "requires_grad");
  if (module_of_tensors("torch", type).is_valid()) {
    made.is_torch = true;
    made.grad_framework = "torch";
  } else if (const nb::object paddle = module_of_tensors("paddle", type); paddle.is_valid()) {
    made.is_grad_enabled = paddle.attr("is_grad_enabled");
    made.grad_framework = "paddle";
  }
  return made;
}

// The device that reads this memory as its own.
flashmoe_device home_of(flashmoe_device device) {
  if (device.device_type == FLASHMOE_DEVICE_CUDA_HOST) return {FLASHMOE_DEVICE_CPU, 0};
  if (device.device_type == dlpack::kCudaManaged) device.device_type = FLASHMOE_DEVICE_CUDA;
  return device;
}

[[noreturn]] void refuse_to_write(const char* name) {
  raise_value_error(std::string(name) + ": it is read-only, accepted is a writable tensor");
}

// Refuses tensors whose producer says that we cannot use them.
void check_managed(const char* name, const dlpack::ManagedTensor& managed, Access access) {
  if (managed.version.major != dlpack::kMajorVersion) {
    raise_type_error(std::string(name) + ": got a tensor of DLPack " +
                     std::to_string(managed.version.major) + "." +
                     std::to_string(managed.version.minor) + ", accepted is major version 1");
  }
  if (access == Access::kWrite && (managed.flags & dlpack::kIsCopied) != 0) {
    raise_value_error(std::string(name) +
                      ": DLPack gives a copy of it, accepted is a tensor that shares its memory");
  }
}

// The object's DLPack capsule. Write access asks first for a versioned one, which has flags.
// Returns no object if there is no capsule.
nb::object capsule_of(nb::handle object, Access access) {
  static PyObject* const method = PyUnicode_InternFromString("__dlpack__");
  static PyObject* const none = nb::make_tuple().release().ptr();
  static PyObject* const version = [] {
    nb::dict keywords;
    keywords["max_version"] = nb::make_tuple(dlpack::kMajorVersion, 0);
    return keywords.release().ptr();
  }();
  const nb::object exporter = nb::steal(PyObject_GetAttr(object.ptr(), method));
  for (int attempt = 0; attempt < 2 && exporter.is_valid(); ++attempt) {
    // Memory that is never read-only may be refused without a version, and old producers know no
    // versions.
    const bool versioned = (access == Access::kWrite) == (attempt == 0);
    nb::object capsule =
        nb::steal(PyObject_Call(exporter.ptr(), none, versioned ? version : nullptr));
    if (capsule.is_valid()) {
      return PyCapsule_CheckExact(capsule.ptr()) ? capsule : nb::object();
    }
    if (PyErr_ExceptionMatches(PyExc_BufferError) == 0 &&
        PyErr_ExceptionMatches(PyExc_TypeError) == 0) {
      break;
    }
    PyErr_Clear();
  }
  if (PyErr_Occurred() != nullptr && PyErr_ExceptionMatches(PyExc_Exception) == 0) {
    nb::raise_python_error();  // such as KeyboardInterrupt: not the producer's answer
  }
  PyErr_Clear();
  return {};
}

// Takes the producer's exception, if any.
[[noreturn]] void refuse_without_view(const char* name, nb::handle object) {
  std::string reason = "it gives no reason";
  if (PyErr_Occurred() != nullptr) {
    const nb::python_error error;
    reason = utf8(nb::str(error.value()));
    reason = reason.substr(0, reason.find('\n'));  // torch appends its C++ stack
  }
  raise_type_error(std::string(name) + ": " + name_of_type(object) +
                   " gives no view of its memory: " + reason);
}

// An aligned address for a tensor that is never read or written. Each call returns a new address,
// since outputs may overlap no other tensor.
void* address_of_nothing(const int64_t* shape, int32_t rank, flashmoe_dtype dtype) {
  constexpr uintptr_t kAlignment = 4096;
  constexpr uintptr_t kEnd = uintptr_t{1} << 46;
  constexpr uintptr_t kMost = kEnd >> 4;  // bytes of one tensor
  thread_local uintptr_t next = kAlignment;
  uintptr_t bytes = dtype.bits >= 8 ? dtype.bits / 8 : 1;
  for (int axis = 0; axis < rank && axis < TensorView::kMaxRank; ++axis) {
    const uintptr_t extent = shape[axis] > 0 ? static_cast<uintptr_t>(shape[axis]) : 1;
    bytes = extent < kMost / bytes ? bytes * extent : kMost;
  }
  if (next + bytes > kEnd) next = kAlignment;
  void* const address = reinterpret_cast<void*>(next);
  next += (bytes / kAlignment + 1) * kAlignment;
  return address;
}

const TensorType& type_of(nb::handle object) {
  // The GIL guards both; the map never shrinks and its nodes never move. Leaked on purpose: at exit
  // the interpreter is gone before static destructors run.
  static auto* const types = new std::unordered_map<PyObject*, TensorType>();
  static const TensorType* last = nullptr;
  nb::handle type = object.type();
  if (last == nullptr || last->type.ptr() != type.ptr()) {
    auto found = types->find(type.ptr());
    if (found == types->end()) {
      found = types->emplace(type.ptr(), describe_type(type, exchange_api(type))).first;
    }
    last = &found->second;
  }
  return *last;
}

// Refuses arrays of numpy.ma, whose mask would be ignored here.
[[noreturn]] void refuse_mask(const char* name, nb::handle object) {
  raise_type_error(std::string(name) + ": got " + name_of_type(object) +
                   ", of which the mask would be ignored, accepted is an array without; pass " +
                   name + ".filled() or " + name + ".data");
}

}  // namespace

const TensorType* tensor_type(nb::handle object) {
  const TensorType& type = type_of(object);
  return type.api != nullptr ? &type : nullptr;
}

bool requires_grad(const TensorType& type, nb::handle tensor) {
  static PyObject* const name = PyUnicode_InternFromString("requires_grad");
  return type.has_requires_grad && nb::object(tensor.attr(nb::handle(name))).ptr() == Py_True;
}

void refuse_negated(const TensorType& type, const char* name, nb::handle tensor,
                    flashmoe_dtype dtype) {
  if (!type.is_torch || !is_negated(tensor, dtype)) return;
  raise_value_error(std::string(name) +
                    ": its negative bit is set, accepted is a tensor without; pass " + name +
                    ".resolve_neg()");
}

bool records_gradients(const TensorType& type) {
  if (type.is_torch) return torch_records_gradients();
  return !type.is_grad_enabled.is_valid() || type.is_grad_enabled().ptr() != Py_False;
}

// Takes over tensor_ from a producer: copies shape and strides.
void TensorView::take() {
  tensor_.device = home_of(tensor_.device);
  const int rank = tensor_.ndim < kMaxRank ? tensor_.ndim : kMaxRank;
  for (int axis = 0; axis < rank; ++axis) shape_[axis] = tensor_.shape[axis];
  tensor_.shape = shape_;
  if (tensor_.strides != nullptr) {
    for (int axis = 0; axis < rank; ++axis) strides_[axis] = tensor_.strides[axis];
    tensor_.strides = strides_;
  }
  set_ = true;
}

void TensorView::borrow(const TensorType& type, const char* name, nb::handle object,
                        Access access) {
  give_back();
  int failed = 0;
  if (type.api->view_of_object != nullptr) {
    failed = type.api->view_of_object(object.ptr(), reinterpret_cast<dlpack::Tensor*>(&tensor_));
  } else {
    failed = type.api->managed_from_object(object.ptr(), &managed_);
    if (failed == 0) {
      check_managed(name, *managed_, access);
      std::memcpy(&tensor_, &managed_->tensor, sizeof tensor_);
      if (access == Access::kWrite && (managed_->flags & dlpack::kReadOnly) != 0) {
        refuse_to_write(name);
      }
    }
  }
  if (failed != 0) refuse_without_view(name, object);
  take();
  // torch's stand-ins for tensors may have a null address.
  if (type.is_torch && tensor_.data == nullptr && !is_empty()) refuse_without_view(name, object);
}

bool TensorView::is_empty() const {
  for (int axis = 0; axis < tensor_.ndim && axis < kMaxRank; ++axis) {
    if (shape_[axis] == 0) return true;
  }
  return false;
}

bool TensorView::borrow_array(const char* name, nb::handle given, Access access) {
  // Takes the capsule here, since nb::ndarray checks neither the version nor all flags. Without a
  // capsule nb::ndarray is used: it knows more protocols than DLPack.
  nb::object object =
      PyCapsule_CheckExact(given.ptr()) ? nb::borrow(given) : capsule_of(given, access);
  constexpr char kVersioned[] = "dltensor_versioned";
  if (object.is_valid() && PyCapsule_IsValid(object.ptr(), kVersioned) != 0) {
    const void* managed = PyCapsule_GetPointer(object.ptr(), kVersioned);
    check_managed(name, *static_cast<const dlpack::ManagedTensor*>(managed), access);
  }
  if (!object.is_valid()) object = nb::borrow(given);
  if (access == Access::kWrite) {
    nb::ndarray<> writable;
    if (!nb::try_cast(object, writable)) return false;
    array_.emplace(writable);
  } else {
    nb::ndarray<nb::ro> readable;
    if (!nb::try_cast(object, readable)) return false;
    array_.emplace(readable);
  }
  const nb::ndarray<nb::ro>& array = *array_;
  tensor_.data = array.data_handle();
  tensor_.device = {array.device_type(), array.device_id()};
  tensor_.ndim = static_cast<int32_t>(array.ndim());
  tensor_.dtype = {array.dtype().code, array.dtype().bits, array.dtype().lanes};
  tensor_.shape = array.shape_ptr();
  tensor_.strides = array.stride_ptr();
  tensor_.byte_offset = array.byte_offset();
  take();
  return true;
}

// NumPy's DLPack and buffer protocol know neither bf16 nor fp8, so the same memory is viewed as
// integers.
bool TensorView::borrow_foreign(const char* name, nb::handle object, Access access) {
  const nb::str dtype(nb::getattr(object, "dtype", nb::none()));
  for (const auto& foreign : kForeignDtypes) {
    if (PyUnicode_CompareWithASCIIString(dtype.ptr(), foreign.name) != 0) continue;
    if (!nb::hasattr(object, "view") ||
        !borrow_array(name, object.attr("view")(foreign.seen_as), access)) {
      return false;
    }
    tensor_.dtype = foreign.dtype;
    return true;
  }
  return false;
}

void TensorView::borrow(const char* name, nb::handle object, Access access) {
  const TensorType& type = type_of(object);
  if (type.api != nullptr) {
    borrow(type, name, object, access);
    return refuse_negated(type, name, object, tensor_.dtype);
  }
  if (type.is_masked) refuse_mask(name, object);
  const auto borrow_as = [&](Access wanted) {
    return borrow_array(name, object, wanted) || borrow_foreign(name, object, wanted);
  };
  if (borrow_as(access)) return;
  if (access == Access::kWrite && borrow_as(Access::kRead)) refuse_to_write(name);
  // The producer's exception was ignored while other protocols were tried.
  if (nb::hasattr(object, "__dlpack__")) {
    const nb::object capsule = nb::steal(PyObject_CallMethod(object.ptr(), "__dlpack__", nullptr));
    if (!capsule.is_valid()) refuse_without_view(name, object);
  }
  raise_type_error(std::string(name) + ": got " + name_of_type(object) +
                   ", accepted is a tensor of NumPy, torch, JAX or CuPy, or an object with "
                   "__dlpack__");
}

void TensorView::describe(const int64_t* shape, int32_t rank, flashmoe_dtype dtype,
                          flashmoe_device device, const int64_t* strides, void* data) {
  tensor_ = {};
  tensor_.data = data != nullptr ? data : address_of_nothing(shape, rank, dtype);
  tensor_.device = device;
  tensor_.ndim = rank;
  tensor_.dtype = dtype;
  tensor_.shape = shape;
  tensor_.strides = strides;
  take();
}

void TensorView::describe(const TensorView& other) {
  tensor_ = other.tensor_;
  take();
}

void TensorView::clear() {
  give_back();
  tensor_ = {};
  set_ = false;
}

bool TensorView::is_packed(int32_t rank, const int64_t* shape) const {
  if (tensor_.ndim != rank) return false;
  int64_t packed = 1;
  for (int axis = rank - 1; axis >= 0; --axis) {
    if (shape_[axis] != shape[axis]) return false;
    if (tensor_.strides != nullptr && strides_[axis] != packed) return false;
    packed *= shape[axis] > 1 ? shape[axis] : 1;
  }
  return true;
}

bool TensorView::flatten_rows() {
  const int rank = tensor_.ndim;
  if (rank == 2) return true;
  if (rank < 1 || rank > kMaxRank) return false;
  int64_t rows = 1;
  int64_t stride = shape_[rank - 1];  // between rows
  if (tensor_.strides == nullptr) {
    for (int axis = rank - 2; axis >= 0; --axis) rows *= shape_[axis];
  } else {
    bool found = false;
    for (int axis = rank - 2; axis >= 0; --axis) {
      if (shape_[axis] == 0) rows = 0;
      if (rows == 0 || shape_[axis] == 1) continue;
      if (!found) stride = strides_[axis];
      if (found && strides_[axis] != stride * rows) return false;
      found = true;
      rows *= shape_[axis];
    }
    strides_[1] = strides_[rank - 1];
    strides_[0] = stride;
  }
  shape_[1] = shape_[rank - 1];
  shape_[0] = rows;
  tensor_.ndim = 2;
  return true;
}

bool TensorView::add_leading_extent() {
  const int rank = tensor_.ndim;
  if (rank < 0 || rank >= kMaxRank) return false;
  for (int axis = rank; axis > 0; --axis) {
    shape_[axis] = shape_[axis - 1];
    if (tensor_.strides != nullptr) strides_[axis] = strides_[axis - 1];
  }
  if (tensor_.strides != nullptr) strides_[0] = rank > 0 ? strides_[1] * shape_[1] : 1;
  shape_[0] = 1;
  tensor_.ndim = rank + 1;
  return true;
}

void TensorView::give_back() {
  dlpack::give_back(managed_);
  managed_ = nullptr;
}

}  // namespace flashmoe
