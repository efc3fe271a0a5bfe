// Attention forward on sm_90 for few query rows and many keys.
//
//   out = softmax(scale * Q K^T + mask) V,  lse = log sum exp(scale * Q K^T + mask)
//
// The kernel of cuda/attention/sm90/forward.cuh, which see, on tiles that hold the rows of all query heads of
// a KV head, and with each tile's keys split over several blocks. Each of these leaves its part of the output
// in the workspace, relative to its own offsets, and a second kernel adds the parts up
// (cuda/attention/sum_parts.cuh). Where a tile is one block's, that one writes the output itself.
#pragma once

#include "cuda/attention/sm90/forward.cuh"
#include "cuda/attention/sum_parts.cuh"

namespace flashmoe::split {

using sm90::CappedSplitTuning;
using sm90::SplitParams;
using sm90::SplitTuning;
using sm90::Traits;

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    attention_forward_kernel(const __grid_constant__ SplitParams params) {
  sm90::compute_tiles<Traits>(params);
}

// A row of a query head, as the second kernel takes it.
template <class Traits>
class SplitRow {
 public:
  using Params = SplitParams;
  using Element = typename Traits::Element;
  static constexpr int kUnitsPerRow = Traits::kUnitsPerRow;

  __device__ __forceinline__ SplitRow(const Params& params, int packed, int head_kv) {
    const int heads = static_cast<int>(params.heads_of_query.value);
    query_ = params.heads_of_query.quotient(packed);
    batch_ = head_kv / params.heads_kv;
    head_ = head_kv % params.heads_kv * heads + packed - query_ * heads;
  }

  __device__ __forceinline__ RowParts parts(const Params& params) const {
    const int head_kv = head_ / params.heads_per_kv;
    const int head = head_ - head_kv * params.heads_per_kv;
    const int chunk = head / params.packed_heads;
    const int group = params.queries_of_group.quotient(query_);
    const int tile = group / params.groups_per_tile;
    const int row = (group - tile * params.groups_per_tile) * sm90::kRowsPerGroup +
                    (query_ - group * params.queries_per_group) * params.packed_heads + head -
                    chunk * params.packed_heads;
    const int tiles =
        ((batch_ * params.heads_kv + head_kv) * params.chunks + chunk) * params.tiles_per_head +
        tile;
    return {params.part_outs, params.part_statistics, tiles * params.parts * Traits::kTileQ + row,
            Traits::kTileQ, params.parts};
  }

  __device__ __forceinline__ bool write(const Params& params, const Sum& total, int unit) const {
    const bool sees_keys = sm90::first_key(params, query_) < sm90::end_key(params, query_);
    if (unit == 0 && params.lse != nullptr) {
      params.lse[offset(params.lse_strides)] = lse_of(total, sees_keys);
    }
    if (4 * unit >= params.dim_v) return false;
    const uint2 packed = output_of<Element>(total, sees_keys);
    *reinterpret_cast<uint2*>(params.out_data + offset(params.out_strides) + 4 * unit) = packed;
    return is_suspect<Element>(total, packed);
  }

  static __device__ __forceinline__ void compute_again(const Params& params, int packed,
                                                       int head_kv) {
    const SplitRow row(params, packed, head_kv);
    const float lse = sm90::compute_lone_row<Traits>(params, row.batch_, row.head_, row.query_);
    if (params.lse != nullptr && threadIdx.x % sm90::kThreadsPerWarp == 0) {
      params.lse[row.offset(params.lse_strides)] = lse;
    }
  }

 private:
  __device__ __forceinline__ int64_t offset(const RowStrides& strides) const {
    return batch_ * strides.batch + head_ * strides.head + query_ * strides.seq;
  }

  int batch_;
  int head_;
  int query_;
};

}  // namespace flashmoe::split
