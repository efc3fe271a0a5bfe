// What a call asks of the framework that its tensors come from: views of them, new tensors beside
// them, and the stream that is current there. For frameworks with the DLPack exchange API.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

#include "bindings/tensor.h"
#include "bindings/torch.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {

// How messages speak of an operation.
struct OperationWords {
  const char* name;     // "attention"
  const char* tensors;  // "all tensors of a call"
  const char* outputs;  // what to pass where no output can be made: "out, and lse with return_lse"
  const char* gradients;  // what there is of gradients: "has no backward pass yet"
  bool has_gradients;     // whether those of torch's tensors are recorded
};

class Caller {
 public:
  // `first` is the call's first tensor, of `type`, and called `name`.
  Caller(const OperationWords& words, const TensorType& type, const char* name, nb::handle first);

  // Views a tensor of the call. Raises a TypeError if it is of another framework than the first,
  // and a ValueError if it has a tangent or the negative bit, is inside a transform of torch.func,
  // is to be written to and may not be, or requires grad where gradients are recorded, unless this
  // operation has gradients.
  void borrow(const char* name, nb::handle tensor, TensorView* view, Access access = Access::kRead);
  // The same, and nothing of None.
  void borrow_optional(const char* name, nb::handle tensor, TensorView* view,
                       Access access = Access::kRead);

  // Whether gradients are to be recorded of a tensor that was viewed.
  bool is_recorded() const { return is_recorded_; }

  // That the tensors viewed for writing have been written to.
  void finish() const;

  // A new contiguous tensor beside the first one, and its view.
  nb::object allocate(const char* name, flashmoe_device device, flashmoe_dtype dtype, int rank,
                      const int64_t* shape, TensorView* view);
  // One of the shape and dtype of a tensor that was viewed as `of`, with that one's order in memory
  // where its framework can make such.
  nb::object allocate_like(const char* name, nb::handle tensor, const TensorView& of,
                           TensorView* view);

  // The stream to launch on: `stream`, or the framework's current one on a CUDA device. Sets
  // *named to whether it was given.
  void* stream(nb::handle stream, flashmoe_device device, bool* named) const;

  // The framework's current stream on a CUDA device.
  void* current_stream(flashmoe_device device) const;

  const TensorType& type() const { return type_; }

 private:
  friend class DeviceWorkspace;

  // Of one call: the gradients of a layer, and what it may overwrite.
  static constexpr size_t kMostOutputs = 9;

  const TensorType& same_framework(const char* name, nb::handle tensor) const;
  void record_gradients(const TensorType& type, const char* name, nb::handle tensor, Access access);
  void refuse_tangents(const char* name, nb::handle tensor);
  // Memory of the exchange API's allocator, made on the framework's current stream.
  dlpack::ManagedTensor* allocate_by_exchange(flashmoe_device device, flashmoe_dtype dtype,
                                              int rank, const int64_t* shape) const;
  // Takes dtype and shape from an existing tensor where they are the same: torch is faster then.
  nb::object allocate_by_torch(flashmoe_dtype dtype, int rank, const int64_t* shape) const;
  // Views what was made, and returns it.
  nb::object with_view(const char* name, nb::object made, TensorView* view);

  const OperationWords& words_;
  const TensorType& type_;
  const char* name_;
  nb::handle first_;
  bool records_gradients_;
  bool in_inference_mode_;  // of torch
  bool may_have_tangents_;
  bool is_recorded_ = false;
  nb::object made_;                        // the first new tensor, if there is one
  const TensorView* like_view_ = nullptr;  // of that one, else of the first tensor
  size_t written_count_ = 0;
  nb::handle written_[kMostOutputs];
};

// Memory of a CUDA device for the work of one call on `stream`, which the caller named himself or
// not. What is given back at the end of the scope may serve later work on that stream at once.
class DeviceWorkspace {
 public:
  DeviceWorkspace() = default;
  DeviceWorkspace(const DeviceWorkspace&) = delete;
  DeviceWorkspace& operator=(const DeviceWorkspace&) = delete;
  ~DeviceWorkspace() { dlpack::give_back(managed_); }

  void allocate(const Caller& caller, size_t bytes, flashmoe_device device, void* stream,
                bool named);

  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
  dlpack::ManagedTensor* managed_ = nullptr;
  nb::object tensor_;  // in place of managed_ where the stream is not the current one
};

}  // namespace flashmoe
