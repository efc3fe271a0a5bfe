// Checks that every operation shares. Each fails with a sentence that names the argument.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/attention.h"
#include "core/status.h"

namespace flashmoe {

inline constexpr int64_t kRowAlignment = 16;  // bytes
inline constexpr int64_t kMaxHeadDim = 256;
inline constexpr int64_t kHeadDimMultiple = 8;
inline constexpr int kMaxRank = 4;

// A validated rank-N view: host-order strides, data already advanced by byte_offset.
struct View {
  void* data;
  int64_t shape[kMaxRank];
  int64_t strides[kMaxRank];
};

// struct_size must be one this library knows: [oldest, newest].
flashmoe_status check_struct_size(const char* name, size_t got, size_t oldest, size_t newest);

// Rank, dtype, shape, strides and pointer of one tensor; extents and reachable byte offsets fit in
// 63 bits. Does not look at alignment or overlap.
flashmoe_status check_view(const char* name, const flashmoe_tensor* tensor, int rank, View* view);

// Last stride 1, every row of `view` 16-byte aligned.
flashmoe_status check_rows(const char* name, const View& view, int rank, int64_t element_bytes);

// No two index tuples of an output reach the same element.
flashmoe_status check_no_overlap(const char* name, const View& view, int rank);

flashmoe_status check_dtype(const char* name, const flashmoe_tensor& tensor, Dtype* dtype);

// Writes min(struct_size, sizeof(T)) bytes of a filled struct to the caller's, keeping the
// caller's struct_size.
template <typename T>
void copy_out(const T& filled, T* destination) {
  const size_t size = destination->struct_size;
  std::memcpy(static_cast<void*>(destination), &filled, size < sizeof(T) ? size : sizeof(T));
  destination->struct_size = size;
}

}  // namespace flashmoe
