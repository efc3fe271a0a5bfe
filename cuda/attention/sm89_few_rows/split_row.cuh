// A row for the second kernel. The blocks of its tile left its parts in the workspace, [blocks,
// rows, units] with row max and sum [blocks, rows].
#pragma once

#include "cuda/attention/combine.cuh"
#include "cuda/attention/sm89_few_rows/combine.cuh"

namespace flashmoe::sm89_few_rows {

template <class Traits>
class SplitRow {
 public:
  using Params = sm89_few_rows::Params;
  static constexpr int kUnitsPerRow = Traits::kUnitsPerRow;

  __device__ __forceinline__ SplitRow(const Params& params, int packed, int head)
      : tile_(Tile::of_rows<Traits>(params, head, packed / Traits::kRows)),
        row_(packed % Traits::kRows),
        first_block_((head * params.tiles_per_head.number() + packed / Traits::kRows) *
                     params.blocks_per_tile.number()) {}

  __device__ __forceinline__ RowParts parts(const Params& params) const {
    return {params.parts, params.statistics, first_block_ * Traits::kRows + row_, Traits::kRows,
            params.blocks_per_tile.number()};
  }

  __device__ __forceinline__ bool write(const Params& params, const Sum& total, int unit) const {
    return write_unit<typename Traits::Element>(total, params, tile_, keys(params), row_, unit);
  }

  static __device__ __forceinline__ void compute_again(const Params& params, int packed, int head) {
    const SplitRow row(params, packed, head);
    compute_row_again<Traits>(params, row.tile_, row.keys(params), row.row_, 0, kUnitsPerRow);
  }

 private:
  __device__ __forceinline__ Keys keys(const Params& params) const {
    const Sequence sequence = sequence_of(params, tile_.batch);
    if (!params.score.masked) return {0, sequence.length_k};
    return sequence.keys(params.score, Row::of(params, tile_, row_).query);
  }

  Tile tile_;
  int row_;
  int first_block_;
};

// The second kernel only depends on rows of values, so kernels with the same number of value
// columns share it.
template <class Traits>
const void* combine_kernel() {
  using OfValues =
      sm89_few_rows::Traits<typename Traits::Element, Traits::kDimV, Traits::kDimV, Traits::kRows>;
  return reinterpret_cast<const void*>(&attention_combine_kernel<SplitRow<OfValues>>);
}

}  // namespace flashmoe::sm89_few_rows
