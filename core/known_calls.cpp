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
  // From the last axis back. Wraps round for strides below 0, of which no operation asks it.
  uint64_t last = 0;
  uint64_t packed = 1;
  bool empty = false;
  for (int axis = tensor->ndim - 1; axis >= 0; --axis) {
    shape.extents[axis] = tensor->shape[axis];
    if (shape.strided) shape.strides[axis] = tensor->strides[axis];
    empty = empty || tensor->shape[axis] == 0;
    const auto extent = static_cast<uint64_t>(tensor->shape[axis]);
    last += (extent - 1) * (shape.strided ? static_cast<uint64_t>(shape.strides[axis]) : packed);
    packed *= extent;
  }
  shape.bytes = empty ? 0 : (last + 1) * element_bytes;
  return shape;
}

}  // namespace flashmoe
