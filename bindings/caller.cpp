#include "bindings/caller.h"

#include <string>

#include "bindings/errors.h"
#include "bindings/options.h"

namespace flashmoe {
namespace {

// Whether torch is known to record no gradients, whatever its tensors say. That is asked at every
// call for as long as it is so, and else now and then: one question in place of one a tensor.
bool gradients_are_off(const TensorType& type) {
  constexpr unsigned kCallsBetween = 16;
  static bool off = false;  // under the GIL, as the next
  static unsigned calls = 0;
  if (type.torch == nullptr || (!off && ++calls % kCallsBetween != 0)) return false;
  off = !torch_records_gradients(*type.torch);
  return off;
}

// May come without the GIL: only remembers what is raised afterwards.
void remember_error(void* context, const char* kind, const char* message) {
  *static_cast<std::string*>(context) = std::string(kind) + ": " + message;
}

}  // namespace

void packed_strides(const int64_t* shape, int rank, int64_t* strides) {
  uint64_t packed = 1;
  for (int axis = rank - 1; axis >= 0; --axis) {
    strides[axis] = static_cast<int64_t>(packed);
    packed *= static_cast<uint64_t>(shape[axis] > 1 ? shape[axis] : 1);
  }
}

Caller::Caller(const OperationWords& words, const TensorType& type, const char* name,
               nb::handle first)
    : words_(words),
      type_(type),
      name_(name),
      first_(first),
      may_require_grad_(!gradients_are_off(type)),
      may_have_tangents_(type.torch != nullptr && torch_has_tangents(*type.torch)) {}

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

void Caller::refuse_gradients(const TensorType& type, const char* name, nb::handle tensor) const {
  if (!requires_grad(type, tensor) || !records_gradients(type)) return;
  std::string under;
  if (type.grad_framework != nullptr) {
    under = std::string("call under ") + type.grad_framework + ".no_grad() or ";
  }
  raise_value_error(std::string(name) + ": requires grad, but " + words_.name +
                    " has no backward pass yet; " + under + "pass " + name + ".detach()");
}

void Caller::refuse_tangents(const char* name, nb::handle tensor) const {
  if (!has_tangent(*type_.torch, tensor)) return;
  raise_value_error(std::string(name) + ": has a tangent of forward-mode differentiation, but " +
                    words_.name + " has no derivative yet; pass " + name + ".detach()");
}

void Caller::borrow(const char* name, nb::handle tensor, TensorView* view, Access access) {
  const TensorType& type = same_framework(name, tensor);
  try {
    view->borrow(type, name, tensor, access);
  } catch (const nb::python_error&) {
    if (type.torch == nullptr || !torch_transforms(*type.torch)) throw;
    raise_value_error(
        std::string(name) +
        ": got a tensor of a transform of torch.func, accepted is one with memory: " + words_.name +
        " has no derivative yet, and for torch.func.vmap there are the functions of "
        "flashmoe_science.torch");
  }
  if (may_require_grad_) refuse_gradients(type, name, tensor);
  if (may_have_tangents_) refuse_tangents(name, tensor);
  refuse_negated(type, name, tensor);
  if (access == Access::kWrite && type.torch != nullptr) {
    if (refuses_writes(*type.torch, tensor)) {
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
  if (written_count_ > 0) count_writes(*type_.torch, written_, written_count_);
}

nb::object Caller::allocate_by_exchange(const char* name, flashmoe_device device,
                                        flashmoe_dtype dtype, int rank,
                                        const int64_t* shape) const {
  const dlpack::ExchangeApi& api = *type_.api;
  if (!makes_tensors()) {
    raise_type_error(std::string(name) + ": " + nb::str(type_.type.attr("__qualname__")).c_str() +
                     " offers no allocator; pass " + words_.outputs);
  }
  int64_t extents[TensorView::kMaxRank];
  for (int axis = 0; axis < rank; ++axis) extents[axis] = shape[axis];
  dlpack::Tensor prototype = {nullptr, device, rank, dtype, extents, nullptr, 0};
  dlpack::ManagedTensor* managed = nullptr;
  std::string error;
  if (api.allocate(&prototype, &managed, &error, &remember_error) != 0) {
    PyErr_SetString(PyExc_MemoryError, error.c_str());
    nb::raise_python_error();
  }
  void* object = nullptr;
  if (api.object_from_managed(managed, &object) != 0) nb::raise_python_error();
  return nb::steal(static_cast<PyObject*>(object));
}

void Caller::check_makes_workspace(size_t bytes, flashmoe_device device, void* stream,
                                   bool named) const {
  if (!makes_tensors()) {
    raise_type_error(std::string(name_) + ": this call needs " + std::to_string(bytes) +
                     " bytes of workspace, but " + name_of_type(first_) + " offers no allocator");
  }
  if (named && stream != current_stream(device)) {
    raise_value_error(std::string("stream: this call needs workspace, which ") +
                      name_of_type(first_) +
                      " makes for its current stream alone; make this one current, or leave it "
                      "None");
  }
}

nb::object Caller::allocate(const char* name, flashmoe_device device, flashmoe_dtype dtype,
                            int rank, const int64_t* shape, const int64_t* strides,
                            TensorView* view) const {
  if (type_.torch == nullptr) {
    nb::object made = allocate_by_exchange(name, device, dtype, rank, shape);
    view->borrow(same_framework(name, made), name, made);
    return made;
  }
  int64_t packed[TensorView::kMaxRank];
  if (strides == nullptr) {
    packed_strides(shape, rank, packed);
    strides = packed;
  }
  nb::object made = torch_empty(*type_.torch, first_, device, dtype, rank, shape, strides);
  view->borrow(type_, name, made);
  return made;
}

void DeviceWorkspace::allocate(const Caller& caller, size_t bytes, flashmoe_device device,
                               void* stream, bool named) {
  constexpr char kName[] = "workspace";
  if (bytes == 0) return;
  const TorchFunctions* const torch = caller.type_.torch;
  if (torch != nullptr && torch_is_on_cuda_device(*torch, device.device_id)) {
    data_ = torch_allocate_on_current_cuda_device(*torch, bytes, stream);
    if (data_ != nullptr) {
      allocator_ = torch;
      return;
    }
  }
  if (torch == nullptr) {
    caller.check_makes_workspace(bytes, device, stream, named);
    named = false;
  }
  TensorView view;
  if (!named) {
    // Of the current stream, on which the work is: its framework may hand the memory on at once.
    const int64_t shape[] = {static_cast<int64_t>(bytes)};
    tensor_ = caller.allocate(kName, device, {dlpack::kUInt, 8, 1}, 1, shape, nullptr, &view);
  } else {
    tensor_ = nb::module_::import_("flashmoe_science._dispatch")
                  .attr("workspace")(caller.first_, bytes, reinterpret_cast<uintptr_t>(stream));
    view.borrow(kName, tensor_, Access::kWrite);
  }
  data_ = view.tensor().data;
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
