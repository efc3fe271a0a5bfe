// Reads the arguments that appending to a cache and gathering from one share: the extents and the
// dtype of k, the scales of an fp8 cache, and the tables that say where each sequence's rows are.
#pragma once

#include <cstdint>

#include "core/checks.h"
#include "core/operation.h"
#include "core/ops/attention/append_problem.h"
#include "core/ops/attention/checks.h"
#include "core/status.h"

namespace flashmoe {

// Problem has the fields that KvAppendProblem and KvGatherProblem share.
template <class Problem>
class CacheReader {
 protected:
  CacheReader(int32_t layout, Problem* problem)
      : p_(*problem), bhsd_(layout == FLASHMOE_LAYOUT_BHSD) {}

  int seq_axis() const { return bhsd_ ? 2 : 1; }
  int head_axis() const { return bhsd_ ? 1 : 2; }

  template <class Data>
  void set(const View& view, Dtype dtype, RowsView<Data>* rows) const {
    rows->data = view.data;
    rows->strides = {view.strides[0], view.strides[seq_axis()], view.strides[head_axis()]};
    rows->dtype = dtype;
  }

  flashmoe_status check_dim(const char* name, int64_t dim) const {
    if (dim > 0 && dim % kHeadDimMultiple == 0 && dim <= kMostAppendedDim) return FLASHMOE_OK;
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "%s: its head dimension is %lld, accepted are multiples of %lld up to %lld", name,
                static_cast<long long>(dim), static_cast<long long>(kHeadDimMultiple),
                static_cast<long long>(kMostAppendedDim));
  }

  // Reads rows of a cache, in k's dtype or fp8.
  template <class Data>
  flashmoe_status read_cache_rows(const char* name, const flashmoe_tensor* tensor, View* view,
                                  RowsView<Data>* rows) {
    Dtype dtype;
    FLASHMOE_TRY(check_view(name, tensor, 4, view));
    FLASHMOE_TRY(check_same_device(name, *tensor, "k", p_.device));
    FLASHMOE_TRY(check_cache_dtype(name, *tensor, "k", p_.k.dtype, &dtype));
    FLASHMOE_TRY(check_rows(name, *view, 4, dtype_bytes(dtype)));
    set(*view, dtype, rows);
    return FLASHMOE_OK;
  }

  // Checks v_cache against k_cache.
  flashmoe_status check_value_cache(const View& view) const {
    if (p_.v_cache.dtype != p_.k_cache.dtype) {
      return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                  "v_cache: got dtype %s, accepted is %s as k_cache's",
                  dtype_name(p_.v_cache.dtype), dtype_name(p_.k_cache.dtype));
    }
    FLASHMOE_TRY(check_extent("v_cache", "batch", view.shape[0], "k_cache", p_.batch_cache));
    return check_extent("v_cache", "sequence length", view.shape[seq_axis()], "k_cache",
                        p_.rows_cache);
  }

  flashmoe_status read_scale_of(const char* name, const flashmoe_tensor* tensor,
                                KeyScales* scales) const {
    if (tensor == nullptr) return FLASHMOE_OK;
    if (p_.k_cache.dtype != Dtype::kFloat8E4M3) {
      return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                  "%s: got one, accepted with caches of k's dtype is none", name);
    }
    return read_scale(name, *tensor, "k", p_.device, p_.batch_cache, p_.heads_kv, scales);
  }

  // int32, or with `wide` also int64.
  flashmoe_status check_numbers(const char* name, const flashmoe_tensor* tensor, int rank,
                                bool* wide, View* view) const {
    FLASHMOE_TRY(check_view(name, tensor, rank, view));
    FLASHMOE_TRY(check_same_device(name, *tensor, "k", p_.device));
    FLASHMOE_TRY(check_index_dtype(name, *tensor, wide));
    const bool is_wide = wide != nullptr && *wide;
    return check_alignment(name, *view, is_wide ? sizeof(int64_t) : sizeof(int32_t));
  }

  // Reads one number per sequence.
  flashmoe_status read_numbers(const char* name, const flashmoe_tensor* tensor,
                               Numbers* numbers) const {
    if (tensor == nullptr) return FLASHMOE_OK;
    View view;
    FLASHMOE_TRY(check_numbers(name, tensor, 1, nullptr, &view));
    if (view.shape[0] != p_.batch) return refuse_count(name, view.shape[0]);
    *numbers = {view.data, view.strides[0]};
    return FLASHMOE_OK;
  }

  // Reads where the sequences begin that are packed in k. The offsets tell how many sequences there
  // are.
  flashmoe_status read_offsets(const char* name, const flashmoe_tensor* tensor, Numbers* offsets) {
    if (tensor == nullptr) return FLASHMOE_OK;
    View view;
    FLASHMOE_TRY(check_numbers(name, tensor, 1, nullptr, &view));
    if (rows_of_batch_ != 1) {
      return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                  "k: its batch is %lld, accepted with %s is 1: all sequences one behind the other",
                  static_cast<long long>(rows_of_batch_), name);
    }
    if (view.shape[0] == 0) {
      return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                  "%s: got 0 numbers, accepted is one more than there are sequences", name);
    }
    p_.batch = view.shape[0] - 1;
    *offsets = {view.data, view.strides[0]};
    return FLASHMOE_OK;
  }

  flashmoe_status read_page_table(const flashmoe_tensor* tensor) {
    View view;
    FLASHMOE_TRY(check_numbers("page_table", tensor, 2, nullptr, &view));
    if (view.shape[0] != p_.batch) return refuse_count("page_table", view.shape[0]);
    p_.page_table = {view.data, view.strides[0]};
    p_.page_step = view.strides[1];
    p_.page_count = view.shape[1];
    return FLASHMOE_OK;
  }

  Problem& p_;
  int64_t rows_of_batch_ = 0;  // first extent of k

 private:
  flashmoe_status refuse_count(const char* name, int64_t got) const {
    return fail(FLASHMOE_ERROR_INVALID_ARGUMENT,
                "%s: got %lld numbers, accepted are %lld, of %lld sequences", name,
                static_cast<long long>(got), static_cast<long long>(p_.batch),
                static_cast<long long>(p_.batch));
  }

  const bool bhsd_;
};

}  // namespace flashmoe
