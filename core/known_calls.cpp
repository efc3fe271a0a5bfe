#include "core/known_calls.h"

namespace flashmoe {

KnownShape KnownShape::of(const flashmoe_tensor* tensor, bool has_rows) {
  KnownShape shape = {};
  if (tensor == nullptr) return shape;
  shape.given = true;
  std::memcpy(shape.kind, reinterpret_cast<const unsigned char*>(tensor) + kKind, kKindBytes);
  shape.strided = tensor->strides != nullptr;
  shape.rank = tensor->ndim;
  const auto element_bytes = static_cast<uint64_t>(tensor->dtype.bits / 8);
  shape.low_bits = (has_rows ? uintptr_t{kRowAlignment} : element_bytes) - 1;
  for (int axis = 0; axis < tensor->ndim; ++axis) {
    shape.extents[axis] = tensor->shape[axis];
    if (shape.strided) shape.strides[axis] = tensor->strides[axis];
  }
  return shape;
}

}  // namespace flashmoe
