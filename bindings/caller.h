// What a call needs from its tensors' framework: views of them, new tensors on their device, and
// the current stream. For frameworks with the DLPack exchange API.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

#include "bindings/tensor.h"
#include "bindings/torch.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {

// Words for an operation in messages.
struct OperationWords {
  const char* name;     // "attention"
  const char* tensors;  // "all tensors of a call"
  const char* outputs;  // what to pass where no output can be made: "out, and lse with return_lse"
  const char* gradients;  // what there is of gradients: "has no backward pass yet"
  bool has_gradients;     // whether torch's gradients are recorded
};

class Caller {
 public:
  // `first` is the call's first tensor, of type `type` and named `name`.
  Caller(const OperationWords& words, const TensorType& type, const char* name, nb::handle first);

  // Views a tensor of the call. Raises a TypeError if it belongs to another framework than the
  // first. Raises a ValueError if it has a tangent or the negative bit, is inside a transform of
  // torch.func, must be written to but may not be, or requires grad while gradients are recorded
  // and this operation has none.
  void borrow(const char* name, nb::handle tensor, TensorView* view, Access access = Access::kRead);
  // The same; None stays absent.
  void borrow_optional(const char* name, nb::handle tensor, TensorView* view,
                       Access access = Access::kRead);

  // Whether gradients of a viewed tensor must be recorded.
  bool is_recorded() const { return is_recorded_; }

  // Reports that the tensors viewed for writing have been written to.
  void finish() const;

  // Makes a contiguous tensor on the first one's device, and views it.
  nb::object allocate(const char* name, flashmoe_device device, flashmoe_dtype dtype, int rank,
                      const int64_t* shape, TensorView* view);
  // Makes one with the shape and dtype of a tensor viewed as `of`, and with its order in memory if
  // the framework can.
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

  // The most of one call: the gradients of a layer, and what it may overwrite.
  static constexpr size_t kMostOutputs = 9;

  const TensorType& same_framework(const char* name, nb::handle tensor) const;
  void record_gradients(const TensorType& type, const char* name, nb::handle tensor, Access access);
  void refuse_tangents(const char* name, nb::handle tensor);
  // Memory from the exchange API's allocator, on the framework's current stream.
  dlpack::ManagedTensor* allocate_by_exchange(flashmoe_device device, flashmoe_dtype dtype,
                                              int rank, const int64_t* shape) const;
  // Takes dtype and shape from an existing tensor if they are equal, since torch is faster then.
  nb::object allocate_by_torch(flashmoe_dtype dtype, int rank, const int64_t* shape) const;
  // Views the new tensor and returns it.
  nb::object with_view(const char* name, nb::object made, TensorView* view);

  const OperationWords& words_;
  const TensorType& type_;
  const char* name_;
  nb::handle first_;
  bool records_gradients_;
  bool in_inference_mode_;  // of torch
  bool may_have_tangents_;
  bool is_recorded_ = false;
  nb::object made_;                        // the first new tensor, if any
  const TensorView* like_view_ = nullptr;  // of made_, else of the first tensor
  size_t written_count_ = 0;
  nb::handle written_[kMostOutputs];
};

// CUDA memory for the work of one call on `stream`, which the caller named or not. Memory returned
// at the end of the scope may serve later work on that stream at once.
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
  nb::object tensor_;  // replaces managed_ if the stream is not the current one
};

}  // namespace flashmoe
