// Split KV: the second kernel's view of a tile whose keys several blocks share. Each block leaves
// its part of the output in the workspace, relative to its own row max, and a second kernel adds
// the parts up (cuda/attention/combine.cuh).
#pragma once

#include "cuda/attention/combine.cuh"
#include "cuda/attention/sm90/fallback.cuh"
#include "cuda/attention/sm90/tile.cuh"

namespace flashmoe::sm90 {

// A row of a cut tile, for the second kernel. `tile` counts the cut tiles.
template <class Traits>
class SplitRow {
 public:
  using Params = SplitParams;
  using Element = typename Traits::Element;
  static constexpr int kUnitsPerRow = Traits::kUnitsPerRow;

  __device__ __forceinline__ SplitRow(const Params& params, int row, int tile)
      : row_of_tile_(row), cut_(tile) {
    const TilePart whole = TilePart::at<Traits>(params, params.starts[params.cuts[tile]].tile);
    batch_ = whole.batch;
    head_kv_ = whole.head_kv;
    row_ = PackedRow::of(params, whole, row / kRowsPerGroup, row % kRowsPerGroup);
  }

  __device__ __forceinline__ RowParts parts(const Params& params) const {
    // The first part ends at the tile's first cut. Its place is the one before that of the start
    // there.
    const int first = params.starts[params.cuts[cut_]].place - 1;
    const int behind = params.starts[params.cuts[cut_ + 1]].place - 1;
    return {params.part_outs, params.part_statistics, first * Traits::kTileQ + row_of_tile_,
            Traits::kTileQ, row_.exists ? behind - first : 0};
  }

  __device__ __forceinline__ bool write(const Params& params, const Sum& total, int unit) const {
    if (!row_.exists) return false;
    const bool sees_keys = sequence_of(params, batch_).sees_keys(params.score, row_.query);
    const RowEnd end = add_sink_and_end_row<Element, RowEndBy::kExact>(
        params.score, row_.head, sees_keys, {total.row_max, total.sum});
    if (unit == 0 && params.tensors.lse != nullptr) {
      params.tensors.lse[offset(params, params.tensors.lse_strides)] = end.lse;
    }
    if (4 * unit >= params.tensors.dim_v) return false;
    const uint2 packed = output_of<Element>(total, end);
    *reinterpret_cast<uint2*>(params.tensors.out + offset(params, params.tensors.out_strides) +
                              4 * unit) = packed;
    return is_suspect<Element>(total, end, params.score.masked != 0, packed);
  }

  static __device__ __forceinline__ void compute_again(const Params& params, int row, int tile) {
    const SplitRow again(params, row, tile);
    sm90::compute_again<Traits>(params, again.batch_, again.row_.head, again.head_kv_,
                                again.row_.query);
  }

 private:
  __device__ __forceinline__ int64_t offset(const Params& params, const RowStrides& strides) const {
    const int row = sequence_of(params, batch_).begin_q + row_.query;
    return batch_ * strides.batch + row_.head * strides.head + row * strides.seq;
  }

  int row_of_tile_;
  int cut_;
  int batch_;
  int head_kv_;
  PackedRow row_;
};

// The second kernel of kernels that have one, else nullptr. It only depends on rows of values, so
// kernels with the same number of value columns share it.
template <class Traits>
const void* combine_kernel() {
  if constexpr (Traits::kSplit) {
    constexpr int kDimV = Traits::kDimV;
    using OfValues =
        sm90::Traits<typename Traits::Element, kDimV, kDimV, SplitTuning<kDimV, kDimV>>;
    static_assert(OfValues::kTileQ == Traits::kTileQ);
    return reinterpret_cast<const void*>(&attention_combine_kernel<SplitRow<OfValues>>);
  } else {
    return nullptr;
  }
}

}  // namespace flashmoe::sm90
