// Checks that every operation shares. Each fails with a sentence that names the argument.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/dtype.h"
#include "core/status.h"

namespace flashmoe {

inline constexpr int64_t kRowAlignment = 16;  // bytes
inline constexpr int kMaxRank = 5;

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

// The stride of one axis is a multiple of 16 bytes.
flashmoe_status check_aligned_stride(const char* name, const View& view, int axis,
                                     int64_t element_bytes);

// Last stride 1, every row of `view` 16-byte aligned.
flashmoe_status check_rows(const char* name, const View& view, int rank, int64_t element_bytes);

flashmoe_status check_last_stride(const char* name, const View& view, int rank);

// No two index tuples of an output reach the same element.
flashmoe_status check_no_overlap(const char* name, const View& view, int rank);

// Whether an output is this input, element by element in the same memory. Either may be nullptr.
bool is_in_place(const flashmoe_tensor* input, const flashmoe_tensor* output);

// Returns params without a prior partial that the results overwrite.
template <class Params>
Params prior_apart(const Params& params) {
  Params apart = params;
  if (is_in_place(params.prior_out, params.out)) apart.prior_out = nullptr;
  if (is_in_place(params.prior_lse, params.lse)) apart.prior_lse = nullptr;
  return apart;
}

// The data, if any, begins on a multiple of `bytes`.
flashmoe_status check_alignment(const char* name, const View& view, size_t bytes);

// Row-major without gaps.
flashmoe_status check_contiguous(const char* name, const View& view, int rank);

// `name` has as many as `of`: "k: its batch is 3, but q has 2".
flashmoe_status check_extent(const char* name, const char* extent, int64_t got, const char* of,
                             int64_t want);

// fp16, bf16 or fp32.
flashmoe_status check_dtype(const char* name, const flashmoe_tensor& tensor, Dtype* dtype);
// Checks the dtype of a call's first tensor, which decides what is multiplied: fp16 or bf16, on the
// CPU also fp32 and fp64.
flashmoe_status check_first_dtype(const char* name, const flashmoe_tensor& tensor,
                                  flashmoe_device device, Dtype* dtype);
// fp16, bf16 or fp32; on the CPU also fp64.
flashmoe_status check_float_dtype(const char* name, const flashmoe_tensor& tensor,
                                  flashmoe_device device, Dtype* dtype);
flashmoe_status check_same_dtype(const char* name, const flashmoe_tensor& tensor, const char* of,
                                 Dtype want);
// Checks the dtype of keys or values in a cache: `want` or, unless that is fp64, fp8.
bool is_fp8(flashmoe_dtype dtype);
flashmoe_status check_cache_dtype(const char* name, const flashmoe_tensor& tensor, const char* of,
                                  Dtype want, Dtype* dtype);
// `want` or fp32.
flashmoe_status check_same_dtype_or_fp32(const char* name, const flashmoe_tensor& tensor,
                                         const char* of, Dtype want, Dtype* dtype);
flashmoe_status check_fp32(const char* name, const flashmoe_tensor& tensor);

// bool or uint8.
flashmoe_status check_mask_dtype(const char* name, const flashmoe_tensor& tensor);

// int32, or with `is_64` also int64.
flashmoe_status check_index_dtype(const char* name, const flashmoe_tensor& tensor, bool* is_64);

// The device that computes on a tensor. Pinned host memory belongs to the CPU, and a GPU model is a
// CUDA device of its own (core/gpu_model.h).
flashmoe_status check_device(const char* name, const flashmoe_tensor& tensor,
                             flashmoe_device* device);
flashmoe_status check_device(const char* name, flashmoe_device given, flashmoe_device* device);
flashmoe_status check_same_device(const char* name, const flashmoe_tensor& tensor, const char* of,
                                  flashmoe_device want);

// `query` names the function that returns the size.
flashmoe_status check_workspace(uint64_t needed, const void* workspace, size_t workspace_size,
                                size_t alignment, const char* query);

// Reads the caller's parameters. Callers built with an older header give fewer fields, but at least
// `oldest` bytes; the rest is 0.
template <typename Params>
flashmoe_status read_params(const char* name, const Params* given, size_t oldest, Params* params) {
  if (given == nullptr) {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT, "params: got a null pointer");
  }
  FLASHMOE_TRY(check_struct_size(name, given->struct_size, oldest, sizeof *params));
  *params = {};
  std::memcpy(static_cast<void*>(params), given, given->struct_size);
  return FLASHMOE_OK;
}

// Writes min(struct_size, sizeof(T)) bytes of a filled struct to the caller's, keeping the
// caller's struct_size.
template <typename T>
void copy_out(const T& filled, T* destination) {
  const size_t size = destination->struct_size;
  std::memcpy(static_cast<void*>(destination), &filled, size < sizeof(T) ? size : sizeof(T));
  destination->struct_size = size;
}

}  // namespace flashmoe
