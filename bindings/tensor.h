// Views of Python tensors: through the DLPack exchange API of the tensor's type (about 0.1 us), or
// through nb::ndarray, which speaks __dlpack__ and the buffer protocol (about 3 us for a framework
// whose __dlpack__ is written in Python).
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>

#include "bindings/dlpack.h"
#include "bindings/torch.h"
#include "flashmoe/flashmoe.h"

namespace flashmoe {

namespace nb = nanobind;

// Facts about a type. One is kept per type ever passed, for the life of the process.
struct TensorType {
  nb::object type;
  bool is_masked;                  // an array of numpy.ma
  const dlpack::ExchangeApi* api;  // nullptr: it has none, and the rest is unset
  bool is_torch;
  bool has_requires_grad;
  // For a framework with a known grad mode: its name and, except for torch, the function that reads
  // the mode.
  const char* grad_framework;
  nb::object is_grad_enabled;
};

// nullptr when the type of `object` has no exchange API of major version 1.
const TensorType* tensor_type(nb::handle object);

// The tensor's requires_grad; false if its type has none.
bool requires_grad(const TensorType& type, nb::handle tensor);

// Whether the framework records gradients now; true if that is unknown.
bool records_gradients(const TensorType& type);

// Raises a ValueError if torch has set the negative bit of a tensor of this dtype: its memory then
// holds the opposite sign.
void refuse_negated(const TensorType& type, const char* name, nb::handle tensor,
                    flashmoe_dtype dtype);

enum class Access { kRead, kWrite };

// A view of one argument, valid while the argument lives. Shape and strides are copied: another
// thread may reshape the tensor while the GIL is released.
class TensorView {
 public:
  static constexpr int kMaxRank = 8;  // a larger rank is kept as a number, for the error message

  TensorView() = default;
  TensorView(const TensorView&) = delete;
  TensorView& operator=(const TensorView&) = delete;
  ~TensorView() {
    if (managed_ != nullptr) give_back();
  }

  // Views through the exchange API of `type`, which is the type of `object` or shares its table.
  // May be called again for another object.
  void borrow(const TensorType& type, const char* name, nb::handle object,
              Access access = Access::kRead);

  // Views through the exchange API if there is one, else through nb::ndarray. Raises a TypeError
  // that begins with `name`, or a ValueError if the object must be written to but cannot be. NumPy
  // arrays of ml_dtypes.bfloat16 count as bf16.
  void borrow(const char* name, nb::handle object, Access access);

  // Views memory that no Python object owns; contiguous without `strides`. Without `data` it has no
  // memory at all, for plans, which read none.
  void describe(const int64_t* shape, int32_t rank, flashmoe_dtype dtype, flashmoe_device device,
                const int64_t* strides = nullptr, void* data = nullptr);

  // Views the same memory as `other`, which owns it.
  void describe(const TensorView& other);

  // Resets to the initial view of nothing.
  void clear();

  // Moves a described view to another address.
  void place(void* data) { tensor_.data = data; }

  // Whether it has this shape, and is contiguous with the strides that torch gives a new tensor.
  bool is_packed(int32_t rank, const int64_t* shape) const;

  // Makes the view two-dimensional: all dimensions but the last become one. False if strides do not
  // allow that; a single dimension becomes one row.
  bool flatten_rows();
  // Prepends an extent of 1. False if there is no room for it.
  bool add_leading_extent();

  const flashmoe_tensor& tensor() const { return tensor_; }
  const flashmoe_tensor* get() const { return set_ ? &tensor_ : nullptr; }
  int32_t rank() const { return tensor_.ndim; }
  int64_t extent(int axis) const { return shape_[axis]; }
  flashmoe_device device() const { return tensor_.device; }

 private:
  void take();
  void give_back();
  bool is_empty() const;
  bool borrow_array(const char* name, nb::handle object, Access access);
  bool borrow_foreign(const char* name, nb::handle object, Access access);

  flashmoe_tensor tensor_ = {};
  bool set_ = false;
  int64_t shape_[kMaxRank];
  int64_t strides_[kMaxRank];
  dlpack::ManagedTensor* managed_ = nullptr;
  std::optional<nb::ndarray<nb::ro>> array_;  // owns shape, strides and the producer's tensor
};

}  // namespace flashmoe
