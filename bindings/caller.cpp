#include "bindings/caller.h"

#include <string>

#include "bindings/errors.h"
#include "bindings/options.h"

namespace flashmoe {
namespace {

// May run without the GIL, so it only remembers the error, which is raised later.
void remember_error(void* context, const char* kind, const char* message) {
  *static_cast<std::string*>(context) = std::string(kind) + ": " + message;
}

// Whether a dtype has no derivatives in any framework.
bool is_integer(flashmoe_dtype dtype) {
  return dtype.code == dlpack::kInt || dtype.code == dlpack::kUInt;
}

}  // namespace

Caller::Caller(const OperationWords& words, const TensorType& type, const char* name,
               nb::handle first)
    : words_(words),
      type_(type),
      name_(name),
      first_(first),
      records_gradients_(records_gradients(type)),
      in_inference_mode_(type.is_torch && !records_gradients_ && torch_is_in_inference_mode()),
      may_have_tangents_(type.is_torch && !in_inference_mode_) {}

const TensorType& Caller::same_framework(const char* name, nb::handle tensor) const {
  if (tensor.type().ptr() == type_.type.ptr()) return type_;
  const TensorType* other = tensor_type(tensor);
  if (other == nullptr || other->api != type_.api) {
    raise_type_error(std::string(name) + ": got " + name_of_type(tensor) + ", but " + name_ +
                     " is " + name_of_type(first_) + "; " + words_.tensors +
                     " must come from one framework");
  }
  return *other;
}

void Caller::record_gradients(const TensorType& type, const char* name, nb::handle tensor,
                              Access access) {
  if (!requires_grad(type, tensor)) return;
  if (words_.has_gradients && type.is_torch && access == Access::kRead) {
    is_recorded_ = true;
    return;
  }
  std::string under;
  if (type.grad_framework != nullptr) {
    under = std::string("call under ") + type.grad_framework + ".no_grad() or ";
  }
  raise_value_error(std::string(name) + ": requires grad, but " + words_.name + " " +
                    words_.gradients + "; " + under + "pass " + name + ".detach()");
}

void Caller::refuse_tangents(const char* name, nb::handle tensor) {
  const Tangent tangent = tangent_of(tensor);
  may_have_tangents_ = tangent != Tangent::kOff;
  if (tangent != Tangent::kPresent) return;
  raise_value_error(std::string(name) + ": has a tangent of forward-mode differentiation, but " +
                    words_.name + " has no derivative yet; pass " + name + ".detach()");
}

void Caller::borrow(const char* name, nb::handle tensor, TensorView* view, Access access) {
  const TensorType& type = same_framework(name, tensor);
  try {
    view->borrow(type, name, tensor, access);
  } catch (const nb::python_error&) {
    if (type.is_torch) {
      nb::module_::import_("flashmoe_science._dispatch")
          .attr("refuse_without_memory")(name, tensor, words_.name);
    }
    throw;
  }
  const flashmoe_dtype dtype = view->tensor().dtype;
  if (!is_integer(dtype)) {
    if (records_gradients_) record_gradients(type, name, tensor, access);
    if (may_have_tangents_) refuse_tangents(name, tensor);
    refuse_negated(type, name, tensor, dtype);
  }
  if (tensor.is(first_)) like_view_ = view;
  if (access == Access::kWrite && type.is_torch) {
    if (!in_inference_mode_ && refuses_writes(tensor)) {
      raise_value_error(std::string(name) +
                        ": it is an inference tensor, accepted outside of torch.inference_mode() "
                        "are others, such as its clone()");
    }
    if (written_count_ == kMostOutputs) raise_value_error("more outputs than a call has");
    written_[written_count_++] = tensor;
  }
}

void Caller::borrow_optional(const char* name, nb::handle tensor, TensorView* view, Access access) {
  if (!tensor.is_none()) borrow(name, tensor, view, access);
}

void Caller::finish() const {
  if (written_count_ > 0) count_writes(written_, written_count_);
}

dlpack::ManagedTensor* Caller::allocate_by_exchange(flashmoe_device device, flashmoe_dtype dtype,
                                                    int rank, const int64_t* shape) const {
  int64_t extents[TensorView::kMaxRank];
  for (int axis = 0; axis < rank; ++axis) extents[axis] = shape[axis];
  dlpack::Tensor prototype = {nullptr, device, rank, dtype, extents, nullptr, 0};
  dlpack::ManagedTensor* managed = nullptr;
  std::string error;
  if (type_.api->allocate(&prototype, &managed, &error, &remember_error) != 0) {
    PyErr_SetString(PyExc_MemoryError, error.c_str());
    nb::raise_python_error();
  }
  return managed;
}

nb::object Caller::allocate_by_torch(flashmoe_dtype dtype, int rank, const int64_t* shape) const {
  const nb::handle like = made_.is_valid() ? nb::handle(made_) : first_;
  const flashmoe_dtype had = like_view_->tensor().dtype;
  const bool same = had.code == dtype.code && had.bits == dtype.bits && had.lanes == dtype.lanes;
  const flashmoe_dtype* const other = same ? nullptr : &dtype;
  if (like_view_->is_packed(rank, shape)) return torch_empty_like(like, other);
  return torch_empty(like, other, rank, shape);
}

nb::object Caller::allocate(const char* name, flashmoe_device device, flashmoe_dtype dtype,
                            int rank, const int64_t* shape, TensorView* view) {
  if (type_.is_torch) return with_view(name, allocate_by_torch(dtype, rank, shape), view);
  if (type_.api->allocate == nullptr || type_.api->object_from_managed == nullptr) {
    raise_type_error(std::string(name) + ": " + nb::str(type_.type.attr("__qualname__")).c_str() +
                     " offers no allocator; pass " + words_.outputs);
  }
  void* object = nullptr;
  if (type_.api->object_from_managed(allocate_by_exchange(device, dtype, rank, shape), &object) !=
      0) {
    nb::raise_python_error();
  }
  return with_view(name, nb::steal(static_cast<PyObject*>(object)), view);
}

nb::object Caller::allocate_like(const char* name, nb::handle tensor, const TensorView& of,
                                 TensorView* view) {
  if (type_.is_torch) return with_view(name, torch_empty_like(tensor), view);
  const flashmoe_tensor& like = of.tensor();
  return allocate(name, like.device, like.dtype, like.ndim, like.shape, view);
}

nb::object Caller::with_view(const char* name, nb::object made, TensorView* view) {
  view->borrow(same_framework(name, made), name, made);
  if (!made_.is_valid()) {
    made_ = made;
    like_view_ = view;
  }
  return made;
}

void DeviceWorkspace::allocate(const Caller& caller, size_t bytes, flashmoe_device device,
                               void* stream, bool named) {
  if (bytes == 0) return;
  if (named && stream != caller.current_stream(device)) {
    // Memory that is free on the current stream may still be in use there, and this stream does not
    // wait for that.
    if (!caller.type_.is_torch) {
      raise_value_error(std::string("stream: this call needs workspace, which ") +
                        name_of_type(caller.first_) +
                        " makes for its current stream alone; make this one current, or leave it "
                        "None");
    }
    tensor_ = nb::module_::import_("flashmoe_science._dispatch")
                  .attr("workspace")(caller.first_, bytes, reinterpret_cast<uintptr_t>(stream));
    TensorView view;
    view.borrow("workspace", tensor_, Access::kWrite);
    data_ = view.tensor().data;
    return;
  }
  if (caller.type_.api->allocate == nullptr) {
    raise_type_error(std::string(caller.name_) + ": this call needs " + std::to_string(bytes) +
                     " bytes of workspace, but " + name_of_type(caller.first_) +
                     " offers no allocator");
  }
  const int64_t shape[] = {static_cast<int64_t>(bytes)};
  managed_ = caller.allocate_by_exchange(device, {dlpack::kUInt, 8, 1}, 1, shape);
  data_ = static_cast<char*>(managed_->tensor.data) + managed_->tensor.byte_offset;
}

void* Caller::stream(nb::handle stream, flashmoe_device device, bool* named) const {
  void* handle = nullptr;
  *named = parse_stream(stream, &handle);
  if (!*named && device.device_type == FLASHMOE_DEVICE_CUDA) handle = current_stream(device);
  return handle;
}

void* Caller::current_stream(flashmoe_device device) const {
  void* handle = nullptr;
  if (type_.api->current_stream != nullptr &&
      type_.api->current_stream(device.device_type, device.device_id, &handle) != 0) {
    nb::raise_python_error();
  }
  return handle;
}

}  // namespace flashmoe
